"""What is done to the scores besides a mask: sinks, softcap, and the gradient that comes back through lse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES, with_nan_behind
from full_calls import GRADIENT, FullCall, check_on_threads
from probes import Tensors, assert_rows, attend, normal, per_token, uniform

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
SHARDS: list[dict[str, Any]] = [
    {"seq_len": 8},
    {"seq_len": 11},
    {"seq_len": 11, "padded": True},
    {"seq_len": 11, "lengths": (0, 4, 7)},
]


def _grid(strategy: str, heads: tuple[int, int], **options: Any) -> list[FullCall]:
    return [
        FullCall(**shards, heads=heads, strategy=strategy, is_causal=is_causal, mask=mask, **options)
        for shards, is_causal, mask in itertools.product(SHARDS, (False, True), ("", "rows", "bias" + GRADIENT))
    ]


# --- sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (2, 2)], ids=str)
@each_strategy
def test_sinks_take_weight_and_get_a_gradient(strategy: str, heads: tuple[int, int]) -> None:
    check_on_threads(3, _grid(strategy, heads, sinks=True))


@pytest.mark.parametrize("world", [1, 2, 4])
@each_strategy
def test_sinks_by_a_closed_form(strategy: str, world: int) -> None:
    """n equal keys and a sink of logit s: the keys share n / (n + eˢ), and lse = ln(n + eˢ)."""
    logits = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    got = attend(world, uniform(per_token([1.0] * 8)), strategy=strategy, sinks=logits)
    total = 8 + logits.exp()
    assert (got["out"] - (8 / total).view(1, 1, 4, 1)).abs().max() < 1e-5
    assert (got["lse"] - total.log().view(1, 4, 1)).abs().max() < 1e-5
    causal = attend(world, uniform(per_token([1.0] * 8)), strategy=strategy, sinks=logits, is_causal=True)
    seen = torch.arange(1.0, 9.0).view(1, 8, 1, 1)
    assert (causal["out"] - seen / (seen + logits.exp().view(1, 1, 4, 1))).abs().max() < 1e-5


@each_strategy
def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_all(strategy: str) -> None:
    qkv = normal(8)[:3]
    without = attend(2, qkv, strategy=strategy)
    none = attend(2, qkv, strategy=strategy, sinks=torch.full((4,), -math.inf))
    assert (none["out"] - without["out"]).abs().max() < 1e-6 and (none["lse"] - without["lse"]).abs().max() < 1e-5
    all_of_it = attend(2, qkv, strategy=strategy, sinks=torch.full((4,), 200.0))
    assert not all_of_it["out"].any() and (all_of_it["lse"] - 200.0).abs().max() < 1e-4


@each_strategy
def test_a_query_that_sees_the_sink_alone(strategy: str) -> None:
    """Its output is 0, its lse the sink's logit, and nothing but a gradient through lse comes back to the sink."""
    hidden = torch.zeros(1, 8, dtype=torch.bool)
    got = attend(2, normal(8)[:3], strategy=strategy, attn_mask=hidden, sinks=torch.arange(4.0))
    assert not got["out"].any() and (got["lse"] - torch.arange(4.0).view(1, 4, 1)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@each_strategy
def test_sinks_in_another_dtype_than_q(strategy: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=dtype)

    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x[:, 4 * rank : 4 * rank + 4] for x in uniform(per_token([1.0] * 8)))
        leaf = logits.clone().requires_grad_()
        out = ua.ulysses_attention(q, k, v, group, strategy=strategy, sinks=leaf)
        return out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0]  # type: ignore[arg-type,union-attr]

    ranks = ua.run_ranks(on_rank, 2)
    share = 8 / (8 + logits.double().exp())
    assert_rows(torch.cat([out for out, _ in ranks], 1), share.view(1, 1, 4, 1))
    assert all(grad.dtype == dtype for _, grad in ranks)
    # d share / d sink = −share · (1 − share), for 8 queries of 8 columns.
    wanted = -8 * 8 * share * (1 - share)
    assert (sum(grad.double() for _, grad in ranks) - wanted).abs().max() < 64 * torch.finfo(dtype).eps + 1e-4


# --- softcap ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.5, 5.0])
@each_strategy
def test_softcap(strategy: str, softcap: float) -> None:
    check_on_threads(3, _grid(strategy, (4, 2), softcap=softcap, softmax_scale=1.0))


@each_strategy
def test_softcap_by_a_closed_form(strategy: str) -> None:
    """Scores of 10 and 0, capped at 2: 2 · tanh(5) = 1.9998 and 0, so 0.8808 and not 0.99995."""
    q, k, v = torch.ones(1, 2, 4, 1), per_token([10.0, 0.0], head_dim=1), per_token([1.0, 0.0], head_dim=1)
    weight = 1 / (1 + math.exp(-2 * math.tanh(5)))
    assert_rows(attend(2, (q, k, v), strategy=strategy, softcap=2.0)["out"], [weight] * 2)
    # The mask comes behind the cap: what it hides stays hidden, what it adds isn't capped.
    hidden = torch.tensor([[False, True]])
    assert_rows(attend(2, (q, k, v), strategy=strategy, softcap=2.0, attn_mask=hidden)["out"], [0.0] * 2)
    added = torch.tensor([[0.0, 10.0]])
    weight = 1 / (1 + math.exp(10 - 2 * math.tanh(5)))
    assert_rows(attend(2, (q, k, v), strategy=strategy, softcap=2.0, attn_mask=added)["out"], [weight] * 2)


@each_strategy
def test_softcap_over_negative_and_zero_scales(strategy: str) -> None:
    check_on_threads(2, [FullCall(9, strategy=strategy, softcap=1.5, softmax_scale=s) for s in (-0.7, 0.0, 3.0)])


# --- lse --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 2), (5, 1), (2, 2)], ids=str)
@each_strategy
def test_the_gradient_through_lse(strategy: str, heads: tuple[int, int]) -> None:
    check_on_threads(3, _grid(strategy, heads, lse_grad=True))


@each_strategy
def test_the_gradient_through_lse_in_float64(strategy: str) -> None:
    """Of its own dtype: nothing of it is rounded to float32 on the way."""
    calls = [FullCall(11, strategy=strategy, lse_grad=True, dtype=torch.float64, is_causal=c) for c in (False, True)]
    check_on_threads(3, calls)


def _gradients(rank: int, group: Any, whole: Tensors, weigh_lse: bool, weigh_out: bool, **options: Any) -> Tensors:
    layout = ua.SequenceLayout(whole[0].size(1), group.size())
    leaves = [with_nan_behind(layout.shard(x, rank), layout.lengths[rank]).requires_grad_() for x in whole]
    out, lse = ua.ulysses_attention(*leaves, group, layout=layout, return_lse=True, **options)
    weighed = [x for x, asked in ((out, weigh_out), (lse, weigh_lse)) if asked]
    # Padding rows have an lse of −inf; what a loss makes of them must not come back.
    return torch.autograd.grad(weighed, leaves, [torch.ones_like(x) for x in weighed])


@each_strategy
def test_a_loss_of_lse_alone(strategy: str) -> None:
    """The lse of n equal keys is ln(n) + q · mean(k) · scale: dq is the mean key, dk the sum of queries / n."""
    q = torch.randn(1, 6, 4, 8)
    k = torch.randn(1, 1, 4, 8).expand(1, 6, 4, 8).clone()
    ranks = ua.run_ranks(
        lambda rank, group: _gradients(rank, group, (q, k, torch.randn(1, 6, 4, 8)), True, False, strategy=strategy), 2
    )
    layout = ua.SequenceLayout(6, 2)
    dq, dk, dv = (
        torch.cat([x[:, :real] for x, real in zip(parts, layout.lengths, strict=True)], 1)
        for parts in zip(*ranks, strict=True)
    )
    scale = 8**-0.5
    assert (dq - k * scale).abs().max() < 1e-5
    assert (dk - q.sum(1, keepdim=True) * scale / 6).abs().max() < 1e-5
    assert not dv.any()


@each_strategy
def test_ranks_may_differ_in_whether_their_loss_uses_lse(strategy: str) -> None:
    """Rank 0 weighs out alone, rank 1 lse alone, rank 2 both: no rank waits for another, and each gets its part."""
    uses = [(False, True), (True, False), (True, True)]
    whole = normal(12, 4, 2)[:3]
    ranks = ua.run_ranks(lambda rank, group: _gradients(rank, group, whole, *uses[rank], strategy=strategy), 3)
    leaves = [x.double().requires_grad_() for x in whole]
    layout = ua.SequenceLayout(12, 3)
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1].repeat_interleave(2, 2)) * 8**-0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(3), leaves[2].repeat_interleave(2, 2))
    loss = torch.zeros((), dtype=torch.float64)
    for (weigh_lse, weigh_out), begin, length in zip(uses, (0, 8, 12), layout.lengths, strict=True):
        loss = loss + weigh_out * out[:, begin : begin + length].sum()
        loss = loss + weigh_lse * scores.logsumexp(3)[..., begin : begin + length].sum()
    for index, wanted in enumerate(torch.autograd.grad(loss, leaves)):
        parts = [part[index][:, :real] for part, real in zip(ranks, layout.lengths, strict=True)]
        assert (torch.cat(parts, 1) - wanted).abs().max() < 1e-5
