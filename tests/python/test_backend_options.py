"""attend() of a backend, or a kernel= function, gets the mask, sinks and softcap of exactly its heads and rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES
from full_calls import (
    GRADIENT,
    MASKS,
    FullCall,
    check_on_threads,
    expected,
    inputs,
    leaves_of,
    options_of,
    run_full,
    together,
)
from honest_attention import attend
from oracle import max_error

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def only_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
    return attend(q, k, v, call)[0]


class Honest(ua.UlyssesAttentionProcessor):
    """The same as a class."""

    supports = frozenset({"is_causal", "softmax_scale", "q_positions", "need_lse", "attn_mask", "sinks", "softcap"})

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> Any:
        return attend(q, k, v, call) if call.need_lse else attend(q, k, v, call)[0]


OPTIONS: list[dict[str, Any]] = [
    {"sinks": True, "softcap": 2.0},
    {"softmax_scale": 0.3, "softcap": 2.0, "lse_grad": True},
    {"text_len": 4, "valid_lens": (4, 1), "sinks": True},
    {"text_len": 4, "position": "suffix", "mask": "full"},
    {"text_len": 3, "mask": "bias of all" + GRADIENT, "valid_lens": (3, 0)},
    {"kv_len": 6, "replicated": True, "mask": "full", "mask_cut": ("local", "global")},
    *({"mask": mask} for mask in MASKS),
    {"mask": "full", "mask_cut": ("local", "global")},
    {"mask": "keys", "mask_cut": ("global", "local")},
    {"mask": "bias" + GRADIENT, "sinks": True, "lse_grad": True},
]


@pytest.mark.parametrize("heads", [(4, 2), (5, 1)], ids=str)
@each_strategy
def test_a_function_that_honours_them_is_right(strategy: str, heads: tuple[int, int]) -> None:
    calls = [
        FullCall(11, heads, kernel=attend, strategy=strategy, is_causal=is_causal, **options)
        for options, is_causal in itertools.product(OPTIONS, (False, True))
    ]
    calls += [FullCall(11, heads, kernel=only_out, strategy=strategy, return_lse=False, **o) for o in OPTIONS[6:-1]]
    check_on_threads(3, calls)


@each_strategy
def test_a_class_that_honours_them_is_right(strategy: str) -> None:
    backend = Honest()
    call = FullCall(11, mask="bias" + GRADIENT, text_len=3, sinks=True, softcap=2.0, strategy=strategy, is_causal=True)

    def on_rank(rank: int, group: Any) -> Any:
        mine = leaves_of(call, group.size(), rank)
        options = options_of(call, group.size(), rank, mine)
        assert options.pop("kernel") == "auto" and options.pop("qkv_format") == "bshd"
        joint = ua.JointTokens(mine["joint_q"], mine["joint_k"], mine["joint_v"])
        (out, joint_out), (lse, joint_lse) = backend.forward(
            mine["q"], mine["k"], mine["v"], group, joint=joint, **options
        )
        return {name: x.detach() for name, x in
                {"out": out, "lse": lse, "joint_out": joint_out, "joint_lse": joint_lse}.items()}  # fmt: skip

    got, wanted = together(call, ua.run_ranks(on_rank, 3)), expected(call, 3)
    for name, x in got.items():
        assert max_error(x, wanted[name]) < 1e-5, name


def _seen_by_attend(world: int, call: FullCall) -> list[dict[str, Any]]:
    """What each call of attend() was told, in any order."""
    told: list[dict[str, Any]] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: Any) -> Any:
        told.append({
            "heads": range(given.q_head_start, given.q_head_start + q.size(2)),
            "rows": given.q_positions.tolist(),
            "keys": given.kv_positions.tolist(),
            "mask": given.attn_mask,
            "sinks": given.sinks,
            "softcap": given.softcap,
        })  # fmt: skip
        return attend(q, k, v, given)

    full = FullCall(**{**call.__dict__, "kernel": spy})
    ua.run_ranks(lambda rank, group: run_full(rank, group, full), world)
    return told


@pytest.mark.parametrize("heads", [(4, 4), (5, 1), (6, 3)], ids=str)
@each_strategy
def test_the_mask_is_cut_to_the_heads_and_rows_of_the_call(strategy: str, heads: tuple[int, int]) -> None:
    """And together the calls of all ranks cover every head and row, none of them with another one's mask."""
    call = FullCall(6, heads, mask="bias", text_len=2, sinks=True, softcap=7.0, strategy=strategy)
    x = inputs(call)
    told = _seen_by_attend(3, call)
    tokens = range(8)
    covered = set()
    for part in told:
        heads_of, rows = list(part["heads"]), part["rows"]
        assert part["keys"] == list(tokens) and part["softcap"] == 7.0
        assert torch.equal(part["mask"], x["mask"][:, heads_of][:, :, rows])
        assert torch.equal(part["sinks"], x["sinks"][heads_of])
        covered |= set(itertools.product(heads_of, rows))
    assert covered == set(itertools.product(range(heads[0]), tokens))


@each_strategy
def test_what_was_not_asked_for_is_none(strategy: str) -> None:
    for part in _seen_by_attend(2, FullCall(6, strategy=strategy)):
        assert part["mask"] is None and part["sinks"] is None and part["softcap"] is None


@each_strategy
def test_an_axis_of_one_stays_one(strategy: str) -> None:
    for part in _seen_by_attend(2, FullCall(6, mask="keys", strategy=strategy)):
        assert part["mask"].shape == (2, 1, 1, 6)
    for part in _seen_by_attend(2, FullCall(6, mask="heads", strategy=strategy)):
        assert part["mask"].shape == (1, len(part["heads"]), 1, 6)
