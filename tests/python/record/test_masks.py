"""Masks: every form is read as what it says, none is replaced, and each head gets its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from probes import (
    assert_equal,
    assert_refused_before_data,
    assert_rows,
    attend,
    each_strategy,
    normal,
    per_token,
    plain_with_grads,
    uniform,
)

KEYS = torch.ones(2, 12, dtype=torch.bool)  # two prompts: the second has three tokens less
KEYS[1, 9:] = False


def _rows_of(rank: int, x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.narrow(dim, 6 * rank, 6)


def _layout(q: str | None, kv: str) -> Any:
    return ua.MaskLayout(q=q, kv=kv)


FORMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "[B, S]": lambda rank: {"attn_mask": KEYS},
    "[B, 1, 1, S]": lambda rank: {"attn_mask": KEYS[:, None, None]},
    "[B, 1, S, S]": lambda rank: {"attn_mask": KEYS[:, None, None].expand(2, 1, 12, 12)},
    "[B, H, S, S]": lambda rank: {"attn_mask": KEYS[:, None, None].expand(2, 4, 12, 12).contiguous()},
    "[B, S_local]": lambda rank: {
        "attn_mask": _rows_of(rank, KEYS, 1),
        "mask_layout": _layout(None, "local"),
    },
    "[B, 1, S_local, S]": lambda rank: {
        "attn_mask": KEYS[:, None, None].expand(2, 1, 6, 12),
        "mask_layout": _layout("local", "global"),
    },
    "added": lambda rank: {"attn_mask": torch.zeros(2, 12).masked_fill(~KEYS, -math.inf)},
}


@pytest.mark.parametrize("form", FORMS)
@each_strategy
def test_b21_a_mask_of_two_prompts_in_every_form(strategy: str, form: str) -> None:
    """Two prompts of different length in one batch failed, because the mask kept all heads while ranks held a share.

    Source: https://github.com/huggingface/diffusers/issues/13277
    """
    values = uniform(per_token(range(12), batch=2))
    got = attend(2, values, torch.ones(2, 12, 4, 8), strategy=strategy, local=FORMS[form])
    assert_rows(got["out"], torch.tensor([5.5, 4.0]).view(2, 1, 1, 1))
    seen = torch.tensor([12, 9]).log().view(2, 1, 1).expand(2, 4, 12)
    assert (got["lse"] - seen).abs().max() < 1e-5
    # Twelve queries give a twelfth, or a ninth, to each key that they see.
    assert_rows(got["dv"], (KEYS * torch.tensor([[1.0], [12 / 9]])).view(2, 12, 1, 1))


@pytest.mark.parametrize("form", FORMS)
@each_strategy
def test_b21_the_forms_hide_the_same_keys_of_any_numbers(strategy: str, form: str) -> None:
    *qkv, weights = normal(12, 4, 2, batch=2)
    got = attend(2, tuple(qkv), weights, strategy=strategy, local=FORMS[form])
    assert_equal(got, plain_with_grads(*qkv, weights, seen=KEYS[:, None, None]))


@pytest.mark.parametrize("kind", ["seen", "added"])
@each_strategy
def test_b23_each_head_has_its_own_mask(strategy: str, kind: str) -> None:
    """A rank that held a share of the heads used the masks of other heads, or crashed.

    Source: https://github.com/huggingface/diffusers/issues/14316
    """
    seen = torch.eye(8, dtype=torch.bool)[:4].view(1, 4, 1, 8).expand(1, 4, 8, 8).contiguous()  # head h: key h alone
    mask = seen if kind == "seen" else torch.zeros(1, 4, 8, 8).masked_fill(~seen, -math.inf)
    out = attend(2, uniform(per_token(range(8))), strategy=strategy, attn_mask=mask)["out"]
    assert_rows(out, torch.arange(4).view(1, 1, 4, 1))
    *qkv, weights = normal(8)
    bias = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(7))
    got = attend(2, tuple(qkv), weights, strategy=strategy, attn_mask=bias)
    assert_equal(got, plain_with_grads(*qkv, weights, added=bias))


def _key_before_and_own() -> torch.Tensor:
    position = torch.arange(8)
    distance = position.view(8, 1) - position.view(1, 8)
    return ((distance == 0) | (distance == 1)).view(1, 1, 8, 8)


@each_strategy
def test_b24_an_explicit_mask_is_not_replaced_by_causal(strategy: str) -> None:
    """Every given mask was thrown away and plain causal used: row i was i / 2 where it is i − 1 / 2.

    Source: https://github.com/huggingface/accelerate/pull/4177
    """
    seen = _key_before_and_own()
    out = attend(2, uniform(per_token(range(8))), strategy=strategy, attn_mask=seen)["out"]
    assert_rows(out, [0.0] + [i - 0.5 for i in range(1, 8)])
    *qkv, weights = normal(8)
    got = attend(2, tuple(qkv), weights, strategy=strategy, attn_mask=seen)
    assert_equal(got, plain_with_grads(*qkv, weights, seen=seen))


@each_strategy
def test_b24_causal_and_a_mask_hold_together(strategy: str) -> None:
    """A mask that allows the key before and the key behind, under is_causal: the key before alone."""
    near = _key_before_and_own() | _key_before_and_own().transpose(2, 3)
    out = attend(2, uniform(per_token(range(8))), strategy=strategy, attn_mask=near, is_causal=True)["out"]
    assert_rows(out, [0.0] + [i - 0.5 for i in range(1, 8)])


@each_strategy
def test_b24_a_window_is_refused(strategy: str) -> None:
    assert_refused_before_data(
        2, lambda rank: {"strategy": strategy, "window": (1, 0)}, NotImplementedError, "CP041", "window"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@each_strategy
def test_b26_a_boolean_mask_hides_in_every_dtype(strategy: str, dtype: torch.dtype) -> None:
    """A boolean mask was cast to the queries' dtype and added to the scores: 0.7311 came out where 1 is right.

    Source: https://github.com/xdit-project/xDiT/pull/754
    """
    values = tuple(x.to(dtype) for x in uniform(per_token([1.0, 1.0, 0.0, 0.0])))
    seen = torch.tensor([[True, True, False, False]])
    out = attend(2, values, strategy=strategy, attn_mask=seen)["out"]
    assert out.dtype == dtype and bool((out == 1.0).all()), out[0, :, 0, 0]
