"""Other libraries as the doctor's targets: the registry's errors, diffusers over Gloo, the page of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracle import Numbers, max_error, oracle, oracle_with_grads
from ulysses_attention.doctor import peers
from ulysses_attention.doctor.peers_report import render_peers
from ulysses_attention.launch import ProcessRanks
from ulysses_attention.layout import SequenceLayout

Gloo = Callable[[int], ProcessRanks]

WORLD, BATCH, SEQ_LEN, HEADS, HEAD_DIM, TEXT_LEN = 2, 2, 16, 4, 8, 6
TOLERANCE = 1e-5  # float32 over 16 to 28 keys

_attention: dict[str, Any] = {}  # of a rank process: setup() runs once in each


def tensors(num_tokens: int, seed: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, [B, S, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, num_tokens, HEADS, HEAD_DIM, generator=generator) for _ in range(4)]


def call(rank: int, group: Any, target: str, options: dict[str, Any]) -> Numbers:
    """out, dq, dk, dv of this rank's tokens, and the local sums <grad_out, out> and <dv, v>."""
    if target not in _attention:
        _attention[target] = peers.load(target)()
    q, k, v, grad_out = (x.chunk(WORLD, dim=1)[rank].clone() for x in tensors(SEQ_LEN, seed=1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(rank)
    result = _attention[target](*leaves, group, **options)
    out = result[0] if "joint" in options else result
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    sums = {"go_out": (grad_out * out).sum().detach(), "dv_v": (dv * v).sum().detach()}
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv, **sums}


def gathered(gloo: Gloo, target: str, **options: Any) -> Numbers:
    """The ranks' shards put together, and the sums over the ranks."""
    results = gloo(WORLD).run(call, target, options)
    whole = {name: torch.cat([r[name] for r in results], dim=1) for name in ("out", "dq", "dk", "dv")}
    return whole | {name: sum(r[name] for r in results) for name in ("go_out", "dv_v")}


def assert_close(got: Numbers, expected: Numbers) -> None:
    for name in ("out", "dq", "dk", "dv"):
        assert max_error(got[name], expected[name]) < TOLERANCE, name


def test_diffusers_native_is_right_with_gradients(gloo: Gloo) -> None:
    got = gathered(gloo, "peer:diffusers")
    assert_close(got, oracle_with_grads(*tensors(SEQ_LEN, seed=1)))


def test_diffusers_native_math_attends_within_each_rank(gloo: Gloo) -> None:
    got = gathered(gloo, "peer:diffusers/_native_math")
    shards = [
        oracle_with_grads(*shard) for shard in zip(*(x.chunk(WORLD, 1) for x in tensors(SEQ_LEN, 1)), strict=True)
    ]
    local = {name: torch.cat([each[name] for each in shards], dim=1) for name in ("out", "dq", "dk", "dv")}
    assert_close(got, local)
    everything = oracle_with_grads(*tensors(SEQ_LEN, seed=1))
    for name in local:
        assert max_error(got[name], everything[name]) > 0.1, name


def test_diffusers_native_hides_the_masked_keys(gloo: Gloo) -> None:
    mask = torch.arange(SEQ_LEN).lt(SEQ_LEN - 3).expand(BATCH, SEQ_LEN)
    got = gathered(gloo, "peer:diffusers", attn_mask=mask)
    q, k, v, grad_out = tensors(SEQ_LEN, seed=1)
    expected = oracle_with_grads(q, k[:, :-3], v[:, :-3], grad_out)
    assert max_error(got["out"], expected["out"]) < TOLERANCE
    assert max_error(got["dk"][:, :-3], expected["dk"]) < TOLERANCE
    assert got["dk"][:, -3:].abs().max() == 0


def test_text_kept_whole_is_counted_once_per_rank(gloo: Gloo) -> None:
    q, k, v, _ = tensors(SEQ_LEN, seed=1)
    text_q, text_k, text_v, _ = tensors(TEXT_LEN, seed=2)
    got = gathered(gloo, "peer:diffusers", joint=(text_q, text_k, text_v))["out"]

    def attended(copies: int) -> torch.Tensor:
        return oracle(q, torch.cat([text_k] * copies + [k], 1), torch.cat([text_v] * copies + [v], 1))[0]

    assert max_error(got, attended(WORLD)) < TOLERANCE
    assert max_error(got, attended(1)) > 0.1


def test_diffusers_backward_draws_another_dropout_mask(gloo: Gloo) -> None:
    # out is linear in v, so <grad_out, out> = <dv, v> if both passes use the same mask.
    plain = gathered(gloo, "peer:diffusers", dropout_p=0.0)
    torch.testing.assert_close(plain["go_out"], plain["dv_v"], rtol=1e-4, atol=1e-4)
    dropped = gathered(gloo, "peer:diffusers", dropout_p=0.5)
    assert (dropped["go_out"] - dropped["dv_v"]).abs() > 0.5
    alone = gathered(gloo, "peer:diffusers/_native_math", dropout_p=0.5)
    torch.testing.assert_close(alone["go_out"], alone["dv_v"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"is_causal": True}, "Causal attention is not yet supported"),
        ({"return_lse": True}, "does not support setting `return_lse=True`"),
        ({"kv_layout": SequenceLayout(13, WORLD)}, "kv_layout.padded_lengths=[8, 8] are not its lengths=[8, 5]"),
        (
            {"joint": tuple(tensors(TEXT_LEN, 2)[:3]), "attn_mask": torch.ones(BATCH, SEQ_LEN, dtype=torch.bool)},
            "joint and attn_mask together",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_refusals_are_raised_on_every_rank(gloo: Gloo, options: dict[str, Any], text: str) -> None:
    for message in gloo(WORLD).run(refused, options):
        assert text in message


def refused(rank: int, group: Any, options: dict[str, Any]) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as refusal:
        call(rank, group, "peer:diffusers", options)
    return str(refusal.value)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'peer:xformers' is no known library") as unknown:
        peers.load("peer:xformers")
    known = "peer:diffusers, peer:yunchang, peer:deepspeed, peer:para-attn, peer:cache-dit, peer:torch."
    assert known in str(unknown.value)
    with pytest.raises(ValueError, match="'peer:diffusers/ring' is no known variant") as unknown:
        peers.load("peer:diffusers/ring")
    assert "peer:diffusers/native, peer:diffusers/anything, " in str(unknown.value)


def test_a_missing_library_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_version", lambda distribution: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs para-attn, which is not installed\. Fix: pip install para-attn"
    ):
        peers.load("para-attn")
    assert peers.versions()["para-attn"] is None


def test_the_first_variant_is_the_default() -> None:
    assert peers.load("diffusers") is peers.load("peer:diffusers/native")
    assert peers.load("diffusers") is not peers.load("peer:diffusers/flex")
    assert {target.split("/")[0] for target in peers.targets()} == {
        f"peer:{name}" for name in ("diffusers", "yunchang", "deepspeed", "para-attn", "cache-dit", "torch")
    }


def test_versions_are_the_installed_ones() -> None:
    assert peers.versions()["torch"] == torch.__version__


def a_case(feature: str, verdict: str = "ok", message: str = "", **fields: Any) -> dict[str, Any]:
    plain = {"dtype": "float32", "strategy": "", "tensor": "", "backward": True, "id": f"{feature}/W2/float32/S16"}
    return {"feature": feature, "verdict": verdict, "message": message, **plain, **fields}


def a_report(*cases: dict[str, Any], findings: tuple[str, ...] = (), strategies: tuple[str, ...] = ("",)) -> Any:
    return {
        "library_version": "9.9",
        "torch_version": "2.13.0+cpu",
        "strategies": list(strategies),
        "cases": list(cases),
        "findings": [{"sentence": sentence} for sentence in findings],
    }


def page(**reports: Any) -> tuple[str, dict[str, dict[str, str]]]:
    """The text, and its cells by row and column."""
    text = render_peers(reports, {"diffusers": "1.2.3", "yunchang": None})
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return text, {row[0]: dict(zip(table[0], row, strict=True)) for row in table[2:]}


def test_a_cell_is_the_worst_verdict_of_its_feature() -> None:
    _, rows = page(
        some=a_report(
            a_case("is_causal"),
            a_case("is_causal", "crashed", "exit code -6"),
            a_case("is_causal", "wrong", "other tokens"),
            a_case("return_lse", "refused", "no lse"),
            a_case("uneven_shards", "one_rank_only", "rank 1 alone"),
            a_case("empty_shards", "refused", "no lse"),
            a_case("dropout", "unclear_message", "bad\nshape"),
            a_case("attn_mask"),
        )
    )
    row = rows["`some`"]
    assert row["causal"] == "**wrong** [2], 1 of 3 ok"
    assert row["uneven lengths"] == "one rank only [1]"
    assert row["lse"] == "refused [3]"
    assert row["dropout"] == "unclear [4]"
    assert row["mask"] == "ok"
    assert row["GQA"] == row["plain"] == row["backward"] == "not run"


def test_messages_stand_once_below_and_cannot_break_the_page() -> None:
    text, rows = page(
        a=a_report(a_case("is_causal", "refused", "a|b\n<i>*c*")),
        b=a_report(a_case("dropout", "refused", "a|b\n<i>*c*")),
    )
    assert rows["`a`"]["causal"] == rows["`b`"]["dropout"] == "refused [1]"
    assert text.count("1. a\\|b \\<i\\>\\*c\\*\n") == 1


def test_wrong_gradients_leave_the_plain_call_right() -> None:
    wrong = {"verdict": "wrong", "message": "dk is off", "tensor": "dk"}
    _, rows = page(
        some=a_report(a_case("equal_shards", **wrong)),
        out=a_report(a_case("equal_shards", "wrong", "off", tensor="out")),
        halves=a_report(
            a_case("equal_shards", "refused", "no backward"),
            a_case("equal_shards", backward=False, id="equal_shards/W2/float32/S16-forward"),
        ),
    )
    assert (rows["`some`"]["plain"], rows["`some`"]["backward"]) == ("ok", "**wrong** [1]")
    assert (rows["`out`"]["plain"], rows["`out`"]["backward"]) == ("**wrong** [2]", "**wrong** [2]")
    assert (rows["`halves`"]["plain"], rows["`halves`"]["backward"]) == ("ok", "refused [3]")


def test_sixteen_bit_and_strategies_have_cells_of_their_own() -> None:
    _, rows = page(
        ours=a_report(
            a_case("equal_shards", strategy="ulysses"),
            a_case("equal_shards", "wrong", "off", strategy="ulysses", dtype="bfloat16"),
            a_case("equal_shards", strategy="allgather_kv", dtype="float16"),
            strategies=("ulysses", "allgather_kv"),
        )
    )
    assert (rows["`ours`, ulysses"]["plain"], rows["`ours`, ulysses"]["16-bit"]) == ("ok", "**wrong** [1]")
    assert (rows["`ours`, allgather_kv"]["plain"], rows["`ours`, allgather_kv"]["16-bit"]) == ("not run", "ok")


def test_the_page_names_versions_and_findings() -> None:
    text, _ = page(a=a_report(findings=("keys 0-7 never influence queries 8-15",)), b=a_report())
    assert "Versions: ulysses-attention 9.9 (torch 2.13.0+cpu), diffusers 1.2.3, yunchang not installed." in text
    assert "### a\n\n- keys 0-7 never influence queries 8-15\n\n### b\n\n- none\n" in text
