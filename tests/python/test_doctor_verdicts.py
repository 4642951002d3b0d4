"""What the doctor must not call right, must not confuse, and must survive: targets that are no simple wrong recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mutants.parts import Steps, attention_of
from ulysses_attention import SequenceLayout, check_attention, run_ranks
from ulysses_attention.doctor import run
from ulysses_attention.doctor.run import examine

Attention = Callable[..., Any]
RIGHT: Attention = attention_of(Steps)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def _ask(target: Attention, cases: str = "", **options: Any) -> Any:
    return examine(target, worlds=(2,), quick=True, cases=cases, **options)


def _sentences(report: Any) -> dict[str, str]:
    return {finding["kind"]: finding["sentence"] for finding in report["findings"]}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Trying to backward through the graph a second time", "unclear_message"),
        ("needed for gradient computation has been modified by an inplace operation", "unclear_message"),
        ("group at 0x7f82d8c4e2b0 is not in the world map", "unclear_message"),  # the digits of an address
        ("no such context: frank padlock", "unclear_message"),  # parts of words
        ("backward is not implemented", "refused"),
        ("16 tokens are too many", "refused"),
    ],
)
def test_a_text_is_clear_only_where_it_says_what_was_asked(text: str, verdict: str) -> None:
    def raises(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
        raise RuntimeError(text)

    (case,) = _ask(raises, "equal_shards/*/float32/*")["cases"][:1]
    assert case["verdict"] == verdict


def test_a_target_that_refuses_everything_has_proved_nothing() -> None:
    def refuses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
        raise NotImplementedError(f"{group.size()} ranks need a GPU each")

    report = _ask(refuses)
    assert report["summary"]["refused"] == len(report["cases"])
    assert report["exit_status"] == 1
    assert _sentences(report)["nothing_served"].startswith("not even the plain call is served: ")


def _with_dropout(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Attention:
    def attend(q: Any, k: Any, v: Any, group: Any, *, dropout_p: float = 0.0) -> torch.Tensor:
        out = RIGHT(q, k, v, group)
        return change(out, dropout_p) if dropout_p else out

    return attend


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda out, p: out, "dropout", "dropout_p=0.5: the output is that of no dropout"),
        (lambda out, p: out * 0, "dropout", "dropout_p=0.5: the output is zero"),
        (lambda out, p: out * float("nan"), "dropout", "the output is not finite"),
        (lambda out, p: _Scale.apply(torch.dropout(out, p, True), 2.0), "dropout_backward", "dv·v = "),
    ],
)
def test_dropout_is_looked_at_although_its_values_are_chance(change: Any, kind: str, says: str) -> None:
    report = _ask(_with_dropout(change), "dropout/*")
    assert {case["verdict"] for case in report["cases"]} == {"wrong"}
    assert says in _sentences(report)[kind]


def test_right_dropout_is_not_accused() -> None:
    report = _ask(_with_dropout(lambda out, p: torch.dropout(out, p, True)))
    assert report["exit_status"] == 0
    assert {case["verdict"] for case in report["cases"] if case["feature"] == "dropout"} == {"ok"}


def test_gradients_that_are_wrong_in_different_ways_have_a_part_of_the_sentence_each() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
        return RIGHT(_Scale.apply(q, 2.0), _Scale.apply(k, 3.0), _Scale.apply(v, 0.0), group)

    sentence = _sentences(_ask(attend, "equal_shards/*/float32/*"))["gradient_factor"]
    assert sentence.startswith("the gradient of q is 2 times what it must be (cp_size")
    assert "the gradient of k is 3 times what it must be; the gradient of v is missing" in sentence


def test_one_fault_does_not_hide_another() -> None:
    class Twice(Steps):
        def reduce(self, grad: torch.Tensor) -> torch.Tensor:
            return grad

        def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(super().hidden(q_positions, kv_positions))

    report = _ask(attention_of(Twice))
    assert set(_sentences(report)) == {"gradient_not_reduced", "causal_ignored"}
    causal = {case["feature"] for case in report["cases"] if case["finding"] is not None and "causal" in case["id"]}
    by_kind = {finding["kind"]: finding["cases"] for finding in report["findings"]}
    assert causal and any("causal" in case for case in by_kind["causal_ignored"])
    assert not any("causal" in case for case in by_kind["gradient_not_reduced"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda out: out.to("meta"), "out is a Strided tensor of float32 on meta, not a plain one like q"),
        (lambda out: out.detach().to_sparse(), "out is a Sparse tensor"),
        (lambda out: out.to(torch.complex64), "out is a Strided tensor of complex64"),
    ],
)
def test_a_result_that_is_no_plain_tensor_is_said(change: Any, says: str) -> None:
    report = _ask(lambda q, k, v, group: change(RIGHT(q, k, v, group)), "equal_shards/*/float32/*")
    (case,) = report["cases"]
    assert case["verdict"] == "wrong" and says in case["message"]


def test_heads_taken_for_tokens_are_not_called_local_keys() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)  # [B, S, H, D] as if [B, H, S, D]

    sentence = _sentences(_ask(attend, "equal_shards/*/float32/*"))["heads_for_tokens"]
    assert sentence.endswith("query 1 sees key 1 instead of keys 0-15")


def test_code_that_needs_processes_is_told_so_on_threads() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
        return RIGHT(q, k, v, group) * dist.get_world_size()

    (case,) = _ask(attend, "equal_shards/*/float32/*")["cases"][:1]
    assert case["message"].endswith("these ranks are threads. Fix: --transport gloo, or shm")


def test_the_callers_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _ask(RIGHT, "equal_shards/*/float32/*")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_double_weight_is_a_number_and_not_a_word() -> None:
    layout = SequenceLayout.from_lengths([8, 8])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
        keys, values = (layout.gather(x, group, grad="sum") for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, keys) * q.size(3) ** -0.5
        bias = torch.zeros(scores.size(3))
        bias[3] = 1.45
        weights = (scores + bias.clamp_min(1e-30).log().clamp_min(0)).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, values)

    report = run_ranks(lambda rank, group: check_attention(lambda q, k, v: attend(q, k, v, group), group).diagnosis, 2)
    assert report[0].startswith("key 3 weighs 1.45 times as much as the others in query 0")


class _Hook(torch.autograd.Function):
    """The identity, whose backward does something to the gradient that it is handed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(grad), None


def _with(
    change_out: Callable[..., torch.Tensor] = lambda out, q, layout: out,
    change_q: Callable[[torch.Tensor], torch.Tensor] = lambda q: q,
) -> Attention:
    """Right attention but for a change of its output, or of its query."""

    def attend(
        q: Any, k: Any, v: Any, group: Any, *, is_causal: bool = False, layout: Any = None, kv_layout: Any = None
    ) -> torch.Tensor:
        out = RIGHT(change_q(q), k, v, group, is_causal=is_causal, layout=layout, kv_layout=kv_layout)
        return change_out(out, q, layout)

    return attend


SUBTLE = {
    "writes to the gradient": (_with(lambda out, q, layout: _Hook.apply(out, lambda g: g.mul_(2))), "form"),
    "right only for 16 columns": (_with(change_q=lambda q: q * (q.size(3) ** 0.5 / 4)), "scale"),
    "right only with gradients": (
        _with(lambda out, q, layout: out if out.requires_grad else out * 1.01),
        "other_weights",
    ),
    "reads ones for a gradient of .sum()": (
        _with(lambda out, q, layout: _Hook.apply(out, lambda g: g * 2 if 0 in g.stride() else g)),
        "other_backward",
    ),
    "right for two sequences": (_with(lambda out, q, layout: out.flip(0) if out.size(0) > 2 else out), "batch_mixed"),
    "right for 64 tokens": (_with(lambda out, q, layout: out.flip(1) if out.size(1) > 32 else out), "token_order"),
}


@pytest.mark.parametrize("name", SUBTLE)
def test_what_is_right_in_the_usual_case_only_is_found(name: str) -> None:
    target, kind = SUBTLE[name]
    report = examine(target, worlds=(2,))
    assert report["exit_status"] == 1
    assert kind in _sentences(report), _sentences(report)


def test_what_padding_rows_hold_shows_and_their_gradients_are_looked_at() -> None:
    def reads_padding(out: torch.Tensor, q: torch.Tensor, layout: Any) -> torch.Tensor:
        return out + 1e-3 * (q.sum(1, keepdim=True) - q[:, :5].sum(1, keepdim=True))

    def writes_gradient(out: torch.Tensor, q: torch.Tensor, layout: Any) -> torch.Tensor:
        return out + (q.sum(1, keepdim=True) - q.sum(1, keepdim=True).detach())

    for change, verdict in ((reads_padding, "wrong"), (writes_gradient, "wrong"), (lambda out, q, layout: out, "ok")):
        report = examine(_with(change), worlds=(2,), cases="padded_shards/*/float32/S13-H4-B2")
        assert [case["verdict"] for case in report["cases"]] == [verdict]


def test_a_target_that_stops_answering_is_not_asked_for_ever() -> None:
    asked: list[int] = []

    def silent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
        if group.rank() == 0:
            asked.append(1)
            group.barrier().wait()  # the other rank never comes
        return torch.zeros_like(q)

    real = run.ranks_of
    try:
        run.ranks_of = lambda target, transport: run._C.ThreadRanks(run.as_target(target), hang_limit_s=0.3)
        report = examine(silent, worlds=(2,), quick=True, probes=False)
    finally:
        run.ranks_of = real
    assert len(asked) <= 8
    assert report["summary"]["hung"] > 5
    assert report["cases"][-12]["verdict"] in ("hung", "refused")
