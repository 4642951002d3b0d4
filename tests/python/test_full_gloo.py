"""Masks, text, replicated keys, formats, sinks, softcap and gradients through lse over real collectives: 2 to 4 Gloo
processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES
from full_calls import GRADIENT, FullCall, assert_full, run_fulls
from refusals import arguments, assert_text
from ulysses_attention.launch import ProcessRanks

Gloo = Callable[[int], ProcessRanks]

OPTIONS: list[dict[str, Any]] = [
    {"mask": "keys"},
    {"mask": "keys", "mask_cut": ("global", "local")},
    {"mask": "full", "mask_cut": ("local", "global")},
    {"mask": "rows", "mask_cut": ("global", "local")},
    {"mask": "bias" + GRADIENT, "sinks": True, "lse_grad": True},
    {"text_len": 5},
    {"text_len": 5, "position": "suffix", "valid_lens": (5, 2), "lse_grad": True},
    {"text_len": 3, "mask": "full", "softcap": 3.0},
    {"text_len": 2, "qkv_format": "bhsd"},
    {"kv_len": 6, "replicated": True, "mask": "keys", "qkv_format": "sbhd"},
    {"kv_len": 7, "mask": "bias of heads" + GRADIENT},
    {"sinks": True, "softcap": 2.0, "return_lse": False},
]
SHARDS: list[dict[str, Any]] = [
    {"seq_len": 12},
    {"seq_len": 11, "is_causal": True, "heads": (5, 1)},
    {"seq_len": 13, "padded": True, "is_causal": True},
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_option_in_every_kind_of_shards(gloo: Gloo, world: int) -> None:
    calls = [
        FullCall(strategy=strategy, **shards, **options)
        for strategy, shards, options in itertools.product(STRATEGIES, SHARDS, OPTIONS)
    ]
    assert_full(calls, gloo(world).run(run_fulls, calls))


def test_half_precision_text_has_the_same_bits_on_all_ranks(gloo: Gloo) -> None:
    calls = [
        FullCall(21, (6, 3), text_len=5, position=position, strategy=strategy, dtype=torch.bfloat16)
        for strategy, position in itertools.product(STRATEGIES, ("prefix", "suffix"))
    ]
    first, *others = gloo(4).run(run_fulls, calls)
    for numbers in others:
        for one, other in zip(first, numbers, strict=True):
            assert torch.equal(one["joint_out"], other["joint_out"])
            assert torch.equal(one["joint_lse"], other["joint_lse"])


def _refused(rank: int, group: Any, calls: list[dict[str, Any]]) -> list[str]:
    """The error of each call that rank 1 alone makes wrong; "" behind them for a right one."""
    texts = []
    for options in [*calls, {}]:
        try:
            ua.ulysses_attention(cp_group=group, **arguments(**(options if rank == 1 else {})))
            texts.append("")
        except (ValueError, NotImplementedError, RuntimeError) as error:
            texts.append(str(error))
    return texts


def test_one_wrong_rank_is_refused_on_all_and_the_group_goes_on(gloo: Gloo) -> None:
    text = torch.zeros(1, 3, 4, 8)
    bad = {
        "CP027": {"attn_mask": torch.ones(1, 9, dtype=torch.bool)},
        "CP028": {"mask_layout": ua.MaskLayout(kv="local")},
        "CP029": {"joint": ua.JointTokens(text, text[:, :2], text)},
        "CP034": {"sinks": torch.zeros(3)},
        "CP040": {"attn_mask": torch.zeros(1, 8).requires_grad_()},
        "CP043": {"joint": ua.JointTokens(text, text, text), "kv_role": "replicated"},
        "CP044": {"kv_role": "replicated", "kv_layout": ua.SequenceLayout.from_lengths([8, 8])},
    }
    for texts in gloo(2).run(_refused, list(bad.values()), timeout_s=60.0):
        for error_id, text_of in zip(bad, texts[:-1], strict=True):
            assert_text(text_of, error_id)
        assert texts[-1] == ""


def _written_on_one_rank(rank: int, group: Any, strategy: str) -> str:
    mask = torch.ones(1, 8, dtype=torch.bool)
    options = {"strategy": strategy, "attn_mask": mask, "agreement": "always"}
    ua.ulysses_attention(cp_group=group, **arguments(**options))
    if rank == 1:
        mask[:, 0] = False
    try:
        ua.ulysses_attention(cp_group=group, **arguments(**options))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_would_gather_differently_are_told(gloo: Gloo, strategy: str) -> None:
    for text in gloo(2).run(_written_on_one_rank, strategy, timeout_s=60.0):
        assert_text(text, "CP060", "attn_mask.is_gathered: rank 0 has True, rank 1 has False")


def _summed(rank: int, group: Any) -> torch.Tensor:
    x = torch.zeros(3).requires_grad_()
    return torch.autograd.grad((ua.sum_grad(x, group) * (rank + 1)).sum(), x)[0]


@pytest.mark.parametrize("world", [2, 4])
def test_sum_grad(gloo: Gloo, world: int) -> None:
    for grad in gloo(world).run(_summed):
        assert torch.equal(grad, torch.full((3,), world * (world + 1) / 2))
