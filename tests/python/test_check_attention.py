"""check_attention: ok for what is right, and one plain sentence for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ulysses_attention import SequenceLayout, check_attention, run_ranks, ulysses_attention
from ulysses_attention.recipe import context_parallel_attention

ROWS = 8  # of the shards that check_attention makes
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def _by_hand(rank: int, group: Any) -> dict[str, Attention]:
    """Attentions over gathered keys and values; the first is right."""
    world = group.size()
    layout = SequenceLayout.from_lengths([ROWS] * world)

    def gather(x: torch.Tensor, grad: Any = "sum") -> torch.Tensor:
        return layout.gather(x, group, grad=grad)

    def right_by_hand(q: Any, k: Any, v: Any) -> torch.Tensor:
        return _attend(q, gather(k), gather(v))

    def swapped_ranks(q: Any, k: Any, v: Any) -> torch.Tensor:
        other = (rank + 1) % world
        return right_by_hand(gather(q)[:, ROWS * other : ROWS * other + ROWS], k, v)

    def own_counted_twice(q: Any, k: Any, v: Any) -> torch.Tensor:
        return _attend(q, torch.cat([gather(k), k], 1), torch.cat([gather(v), v], 1))

    def last_rank_dropped(q: Any, k: Any, v: Any) -> torch.Tensor:
        return _attend(q, gather(k)[:, :-ROWS], gather(v)[:, :-ROWS])

    def batch_mixed(q: Any, k: Any, v: Any) -> torch.Tensor:  # gathers along the batch, then views: right for B = 1
        batch = q.shape[0]
        stacked = [torch.cat(gather(x).chunk(world, 1), 0) for x in (k, v)]  # [W · B, S_local, H, D]
        return _attend(q, *(x.reshape(batch, -1, *q.shape[2:]) for x in stacked))

    return {
        "right_by_hand": right_by_hand,
        "own_repeated": lambda q, k, v: _attend(q, k.repeat(1, world, 1, 1), v.repeat(1, world, 1, 1)),
        "own_counted_twice": own_counted_twice,
        "last_rank_dropped": last_rank_dropped,
        "batch_mixed": batch_mixed,
        "swapped_ranks": swapped_ranks,
        "not_reduced": lambda q, k, v: _attend(q, gather(k, "slice"), gather(v, "slice")),
        "whole_shape": lambda q, k, v: _attend(gather(q), gather(k), gather(v)),
    }


def _attention(kind: str, rank: int, group: Any) -> Attention:
    """A context-parallel attention with one property, wrong unless its name says otherwise."""
    world = group.size()

    def ours(q: Any, k: Any, v: Any, **options: Any) -> torch.Tensor:
        return ulysses_attention(q, k, v, group, **options)

    def raises_on_rank_1(q: Any, k: Any, v: Any) -> torch.Tensor:
        if rank == 1:
            raise ArithmeticError("cannot attend")
        return _attend(q, k, v)

    kinds: dict[str, Attention] = {
        "ours": ours,
        "ours_by_gather": lambda q, k, v: ours(q, k, v, strategy="allgather_kv"),
        "recipe": lambda q, k, v: context_parallel_attention(q, k, v, group=group),
        "local": _attend,
        "16-bit_inside": lambda q, k, v: ours(*(x.bfloat16() for x in (q, k, v))).float(),
        "tuple": lambda q, k, v: ours(q, k, v, return_lse=True),
        "swapped_heads": lambda q, k, v: ours(q, k, v).flip(2),
        "swapped_rows": lambda q, k, v: ours(q, k, v).flip(1),
        "scale_1": lambda q, k, v: ours(q, k, v, softmax_scale=1.0),
        "scale_1/D": lambda q, k, v: ours(q, k, v, softmax_scale=1.0 / q.shape[3]),
        "values_off": lambda q, k, v: ours(q, k, v) + 0.01 * k.abs().sum() * v.std(),
        "scaled_grad": lambda q, k, v: _ScaleGrad.apply(ours(q, k, v), float(world)),
        "no_grad_of_q": lambda q, k, v: ours(q.detach(), k, v),
        "no_grad": lambda q, k, v: ours(q, k, v).detach(),
        "nan": lambda q, k, v: ours(q, k, v) * float("nan"),
        "no_tensor": lambda q, k, v: None,
        "raises": raises_on_rank_1,
    }
    return (kinds | _by_hand(rank, group))[kind]


def _check(rank: int, group: Any, kind: str) -> tuple[str, bool, str]:
    check = check_attention(_attention(kind, rank, group), group)
    assert check.diagnosis in str(check)
    return check.diagnosis, check.ok, str(check)


def _run(way: str, world: int, kind: str, gloo: Any) -> list[tuple[str, bool, str]]:
    if way == "gloo":
        return gloo(world).run(_check, kind, timeout_s=60.0)
    return run_ranks(lambda rank, group: _check(rank, group, kind), world)


RIGHT = [("threads", "ours"), ("threads", "ours_by_gather"), ("threads", "right_by_hand"),
         ("gloo", "ours"), ("gloo", "ours_by_gather"), ("gloo", "recipe")]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("way", "kind"), RIGHT)
def test_ok_for_what_is_right(way: str, kind: str, world: int, gloo: Any) -> None:
    results = _run(way, world, kind, gloo)
    for diagnosis, ok, text in results:
        assert diagnosis == "ok" and ok
        assert text == results[0][2] and text.startswith("ok (largest error: out ")


WRONG = {
    "local": "each rank attends only to its own tokens: keys 8-{last} never influence queries 0-7",
    "own_repeated": "each rank attends only to its own tokens: keys 8-{last} never influence queries 0-7",
    "last_rank_dropped": "the tail of the sequence is dropped: keys {first_of_last}-{last} never influence any query",
    "own_counted_twice": "keys 0-7 weigh 2 times as much as the others in query 0: {twice}",
    "swapped_heads": "the heads are out of order: token 0, head 0 holds what belongs to token 0, head 3",
    "swapped_rows": "the tokens are out of order: token 0, head 0 holds what belongs to token 7, head 0",
    "swapped_ranks": "rank 0 gets the rows of rank 1: token 0, head 0 holds what belongs to token 8, head 0",
    "scale_1": "the softmax scale is 1 (no scale) instead of 0.25",
    "scale_1/D": "the softmax scale is 0.0625 (1 / D) instead of 0.25",
    "values_off": "the numbers are wrong although every key reaches every query in order: out is off by ",
    "batch_mixed": "the sequences of a batch are mixed: token 0 of sequence 0 sees the values of several sequences",
    "16-bit_inside": "as far as 16-bit arithmetic goes: the call gets float32 and must compute in it",
    "tuple": "every rank raised: the call returned tuple instead of one tensor like q",
    "not_reduced": "the gradients of k and v come from the rank's own queries only: not summed over the {world} ranks",
    "scaled_grad": "the gradients of q, k, v are {world} times what they must be (cp_size: summed over the ranks once",
    "no_grad_of_q": "the gradient of q is missing",
    "no_grad": "the output carries no gradient: backward would train nothing",
    "whole_shape": "ranks 0-{last_rank}: out has shape [2, {seq_len}, 4, 16] instead of [2, 8, 4, 16]",
    "nan": "the output of queries 0-{last} is not finite",
    "no_tensor": "every rank raised: the call returned NoneType instead of one tensor like q",
    "raises": "rank 1 raised, the others did not: ArithmeticError: cannot attend",
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", WRONG)
def test_one_sentence_for_what_is_wrong(kind: str, world: int, gloo: Any) -> None:
    seq_len = ROWS * world
    wanted = WRONG[kind].format(
        world=world, last_rank=world - 1, seq_len=seq_len, last=seq_len - 1, first_of_last=seq_len - ROWS,
        # A rank sees its own 8 keys twice: 2 / (S + 8) instead of 1 / S.
        twice="0.0833333 instead of 0.0625" if world == 2 else "0.05 instead of 0.03125",
    )  # fmt: skip
    for way in ("threads", "gloo"):
        results = _run(way, world, kind, gloo)
        for diagnosis, ok, text in results:
            assert wanted in diagnosis and not ok, (way, diagnosis)
            assert "\n" not in diagnosis
            assert text == results[0][2]  # the same on every rank


def test_the_errors_stand_behind_the_sentence() -> None:
    for check in run_ranks(lambda r, g: check_attention(_attention("ours", r, g), g), 2):
        assert 0 <= check.forward_error < 1e-5 and 0 <= check.dq_error < 1e-4
        assert 0 <= check.dk_error < 1e-4 and 0 <= check.dv_error < 1e-4
    for check in run_ranks(lambda r, g: check_attention(_attention("not_reduced", r, g), g), 2):
        assert check.forward_error < 1e-5 and check.dv_error > 1e-2 and f"dv {check.dv_error:.3f}"[:6] in str(check)
    for check in run_ranks(lambda r, g: check_attention(_attention("local", r, g), g), 2):
        assert check.forward_error > 1e-1 and check.dv_error > 1e-1  # of random inputs, not of the probe that named it
    for check in run_ranks(lambda r, g: check_attention(_attention("whole_shape", r, g), g), 2):
        assert check.forward_error == check.dq_error == -1 and "out not reached" in str(check)


@pytest.mark.parametrize("world", [2, 4])
def test_causal_attention_is_right_when_it_is_meant_to_be(world: int) -> None:
    def check(rank: int, group: Any, kind: str, is_causal: bool) -> str:
        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ulysses_attention(q, k, v, group, is_causal=kind == "causal")

        return check_attention(local, group, is_causal=is_causal).diagnosis

    def run(kind: str, is_causal: bool) -> str:
        (text,) = set(run_ranks(lambda rank, group: check(rank, group, kind, is_causal), world))
        return text

    assert run("causal", True) == "ok"
    assert run("full", False) == "ok"
    last = ROWS * world - 1
    assert run("causal", False).startswith(
        "attention is causal although is_causal is not asked for: "
        f"query 0 (row 0 of rank 0) sees key 0 instead of keys 0-{last}"
    )
    assert run("full", True).startswith(
        f"is_causal is ignored: query 0 (row 0 of rank 0) sees keys 0-{last} instead of key 0"
    )


def test_a_causal_attention_with_another_fault_is_not_taken_for_one_that_is_causal_unasked() -> None:
    def check(rank: int, group: Any) -> str:
        def halved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _ScaleGrad.apply(ulysses_attention(q, k, v, group, is_causal=True), 0.5)

        return check_attention(halved, group, is_causal=True).diagnosis

    (text,) = set(run_ranks(check, 2))
    assert text.startswith("the gradients of q, k, v are 0.5 times what they must be (1 / cp_size: averaged over")


def test_what_cannot_be_called_is_a_type_error_that_shows_how() -> None:
    with pytest.raises(TypeError, match=r"lambda q, k, v: backend.forward"):
        run_ranks(lambda rank, group: check_attention(object(), group), 2)
