"""Samples of a batch, orders of the dimensions, and memory that is not contiguous."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STORAGES, Cell, assert_right, run_cells
from oracle import oracle_with_grads
from probes import (
    Tensors,
    assert_equal,
    assert_refused_before_data,
    assert_rows,
    attend,
    each_strategy,
    identity,
    normal,
    per_token,
)

FORMATS = {"sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}  # where batch, tokens, heads and numbers go


def test_b82_the_exchange_keeps_samples_apart() -> None:
    """With two samples the exchange mixed tokens of different samples.

    Source: https://github.com/deepspeedai/DeepSpeed/issues/5808
    """
    batch, token, head = torch.meshgrid(torch.arange(2.0), torch.arange(4.0), torch.arange(2.0), indexing="ij")
    x = (100 * batch + 10 * token + head).unsqueeze(3)

    def on_rank(rank: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        received: list[torch.Tensor] = []

        def keep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
            received.extend(tensor.clone() for tensor in (q, k, v))
            return v

        shard = x[:, 2 * rank : 2 * rank + 2]
        return received, ua.ulysses_attention(shard, shard, shard, group, kernel=keep)

    for rank, (received, restored) in enumerate(ua.run_ranks(on_rank, 2)):
        assert len(received) == 3
        for tensor in received:
            assert tensor.shape == (2, 4, 1, 1)
            assert torch.equal(tensor, x[:, :, rank : rank + 1])
        assert torch.equal(restored, x[:, 2 * rank : 2 * rank + 2])


@each_strategy
def test_b82_samples_of_other_values_stay_apart(strategy: str) -> None:
    values = torch.cat([per_token(range(8)), per_token(range(100, 108))])
    assert_rows(attend(2, identity(values), strategy=strategy)["out"], values)
    *qkv, weights = normal(8, batch=2)
    assert_equal(attend(2, tuple(qkv), weights, strategy=strategy), oracle_with_grads(*qkv, weights))


def _in_format(qkv_format: str, strategy: str, options: dict[str, Any], world: int, inputs: Tensors) -> list[Any]:
    """out and the gradients of each rank, whose shards and outputs are in qkv_format, turned back to [B, S, H, D]."""
    order = FORMATS[qkv_format]
    back = [order.index(dim) for dim in range(4)]

    def on_rank(rank: int, group: Any) -> Any:
        shards = [x.chunk(world, 1)[rank].permute(order).contiguous() for x in inputs]
        leaves = [x.requires_grad_() for x in shards[:3]]
        out, lse = ua.ulysses_attention(
            *leaves, group, qkv_format=qkv_format, strategy=strategy, return_lse=True, **options
        )
        assert out.shape == leaves[0].shape
        grads = torch.autograd.grad(out, leaves, shards[3])
        return (out.detach().permute(back), *(x.permute(back) for x in grads), lse.detach())

    return ua.run_ranks(on_rank, world)


@pytest.mark.parametrize("qkv_format", FORMATS)
def test_b84_another_order_of_dimensions_keeps_every_number_in_place(qkv_format: str) -> None:
    """Sequence first: the result had the right number of elements in the wrong order.

    Source: https://github.com/deepspeedai/DeepSpeed/pull/8317
    """
    x = torch.arange(4 * 2 * 4 * 2.0).view(4, 2, 4, 2).transpose(0, 1).contiguous()  # B = 2, S = 4, H = 4, D = 2
    received = []

    def keep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        received.append(q.shape)
        return v

    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shard = x[:, 2 * rank : 2 * rank + 2].permute(FORMATS[qkv_format]).contiguous()
        return shard, ua.ulysses_attention(shard, shard, shard, group, qkv_format=qkv_format, kernel=keep)

    for shard, out in ua.run_ranks(on_rank, 2):
        assert shard.shape == ((2, 2, 4, 2) if qkv_format == "sbhd" else (2, 4, 2, 2))
        assert torch.equal(out, shard)
    assert received == [(2, 4, 2, 2)] * 2  # attend() sees [B, S, h, D] whatever the format


@pytest.mark.parametrize("qkv_format", FORMATS)
@each_strategy
def test_b84_another_order_of_dimensions_gives_the_same_attention(strategy: str, qkv_format: str) -> None:
    inputs = normal(6, 4, 2, batch=3)
    parts = zip(*_in_format(qkv_format, strategy, {"is_causal": True}, 3, inputs), strict=True)
    names = ("out", "dq", "dk", "dv", "lse")
    got = {name: torch.cat(x, 2 if name == "lse" else 1) for name, x in zip(names, parts, strict=True)}
    assert_equal(got, oracle_with_grads(*inputs, is_causal=True))


@each_strategy
def test_b84_a_policy_that_restores_another_dimension_is_refused(strategy: str) -> None:
    def call(rank: int) -> dict[str, Any]:
        policy = ua.UlyssesContextParallelPolicy(output_restore_dim=1)
        return {"strategy": strategy, "qkv_format": "sbhd", "policy": policy}

    assert_refused_before_data(2, call, ValueError, "CP005", "output_restore_dim=1", "output_restore_dim=0")


@each_strategy
def test_b86_slices_of_a_larger_tensor(strategy: str) -> None:
    """A slice along the sequence is contiguous for one sample only; with two the collective refused it.

    Source: https://github.com/sgl-project/sglang/pull/39291
    """
    *qkv, weights = normal(8, batch=2)
    larger = [torch.nn.functional.pad(x, (0, 0, 0, 0, 2, 2), value=math.nan) for x in qkv]

    def on_rank(rank: int, group: Any) -> Tensors:
        # Rank 0 has the first four of x[:, 2:], rank 1 the last four of x[:, :-2]: neither is contiguous.
        shards = [(x[:, 2:] if rank == 0 else x[:, :-2]) for x in larger]
        shards = [x[:, :4] if rank == 0 else x[:, -4:] for x in shards]
        assert not any(x.is_contiguous() for x in shards)
        leaves = [x.requires_grad_() for x in shards]
        out = ua.ulysses_attention(*leaves, group, strategy=strategy)
        return (out.detach(), *torch.autograd.grad(out, leaves, weights[:, 4 * rank : 4 * rank + 4]))

    parts = zip(*ua.run_ranks(on_rank, 2), strict=True)
    got = dict(zip(("out", "dq", "dk", "dv"), (torch.cat(x, 1) for x in parts), strict=True))
    assert_equal(got, oracle_with_grads(*qkv, weights))


@pytest.mark.parametrize("storage", list(STORAGES))
@each_strategy
def test_b88_the_incoming_gradient_has_strides_of_its_own(strategy: str, storage: str) -> None:
    """Backward asserted, because the merged output and the incoming gradient had different strides.

    Source: https://github.com/pytorch/pytorch/issues/176915
    """
    cells = [
        Cell(s, heads, strategy, is_causal, 2, layout, grad_storage=storage)
        for s, heads, is_causal, layout in [
            (16, (8, 8), False, "uneven"),
            (19, (12, 3), True, "padded"),
            (9, (2, 1), True, "uneven"),
        ]
    ]
    for world in (1, 2, 3):
        assert_right(cells, ua.run_ranks(lambda rank, group: run_cells(rank, group, cells), world))
