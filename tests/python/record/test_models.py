"""A small model on shards: its last rows, and the positions that its tokens have in the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ulysses_attention as ua
from cells import UNEVEN
from oracle import max_error, oracle, tolerance
from probes import Tensors, assert_equal, each_strategy, normal, plain

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _TwoLayers(nn.Module):
    """Attention with a residual, then a feed-forward layer with one; twice."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.inner = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        for qkv, inner in zip(self.qkv, self.inner, strict=True):
            q, k, v = qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
            x = x + attention(q, k, v).flatten(2)
            x = x + torch.tanh(inner(x))
        return x


@pytest.mark.parametrize("world", [2, 4])
@each_strategy
def test_b92_the_last_rank_is_as_right_as_the_first(strategy: str, world: int) -> None:
    """The last frames of a video were noise on two or more ranks, and the rest looked right.

    Source: https://github.com/huggingface/diffusers/issues/12567
    """
    x = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected = _TwoLayers().double()(x.double(), lambda q, k, v: plain(q, k, v)[0])

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ua.ulysses_attention(q, k, v, group, strategy=strategy)

        with torch.no_grad():
            return _TwoLayers()(x.chunk(world, 1)[rank], attention)

    outs = ua.run_ranks(on_rank, world)
    allowed = tolerance(torch.float32, expected)
    for out, right in zip(outs, expected.chunk(world, 1), strict=True):
        assert max_error(out, right) <= allowed


# --- rotary positions -------------------------------------------------------------------------------------------------


def _rotate(x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Rotary embedding of x [B, S, H, D]: pair d of a token turns by position / 10000^(d / (D / 2))."""
    half = x.size(3) // 2
    speed = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.tensor(positions, dtype=torch.float64).view(-1, 1) * speed
    cos, sin = (f(angle).to(x.dtype).view(1, -1, 1, half) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, 3)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], 3)


def _on_shards(inputs: Tensors, layout: ua.SequenceLayout, positions_of: Any, **options: Any) -> torch.Tensor:
    def on_rank(rank: int, group: Any) -> torch.Tensor:
        q, k, v = (layout.shard(x, rank) for x in inputs)
        q, k = (_rotate(x, positions_of(rank)) for x in (q, k))
        return ua.ulysses_attention(q, k, v, group, layout=layout, **options)[:, : layout.lengths[rank]]

    return torch.cat(ua.run_ranks(on_rank, layout.cp_size), 1)


@pytest.mark.parametrize("is_causal", [False, True])
@each_strategy
def test_b99_rotary_positions_are_those_of_the_whole_sequence(strategy: str, is_causal: bool) -> None:
    """Activations were sharded and the rotary table was not, so that positions began again on each rank.

    Source: https://github.com/ByteDance-Seed/VeOmni/pull/448
    """
    q, k, v = normal(8)[:3]
    rotated = (*(_rotate(x.double(), range(8)) for x in (q, k)), v.double())
    expected = {"out": oracle(*rotated, is_causal=is_causal)[0]}
    options = {"strategy": strategy, "is_causal": is_causal}
    for layout in (ua.SequenceLayout(8, 2, UNEVEN), ua.SequenceLayout(8, 2), ua.SequenceLayout(8, 3, UNEVEN)):
        assert_equal({"out": _on_shards((q, k, v), layout, layout.positions, **options)}, expected)
    assert ua.SequenceLayout(8, 2, UNEVEN).positions(1) == (4, 5, 6, 7)
    again = _on_shards((q, k, v), ua.SequenceLayout(8, 2, UNEVEN), lambda rank: range(4), **options)
    assert max_error(again, expected["out"]) > 1e-2  # so the values above show the positions


@each_strategy
def test_b99_gradients_pass_the_rotation_of_the_shards(strategy: str) -> None:
    inputs = normal(8)
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    rotated = [_rotate(x, range(8)) for x in leaves[:2]]
    plain(*rotated, leaves[2])[0].backward(inputs[3].double())
    layout = ua.SequenceLayout(8, 2, UNEVEN)

    def on_rank(rank: int, group: Any) -> Tensors:
        local = [layout.shard(x, rank).clone().requires_grad_() for x in inputs[:3]]
        q, k = (_rotate(x, layout.positions(rank)) for x in local[:2])
        out = ua.ulysses_attention(q, k, local[2], group, strategy=strategy)
        return torch.autograd.grad(out, local, layout.shard(inputs[3], rank))

    parts = zip(*ua.run_ranks(on_rank, 2), strict=True)
    got = dict(zip(("dq", "dk", "dv"), (torch.cat(x, 1) for x in parts), strict=True))
    assert_equal(got, {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True)})
