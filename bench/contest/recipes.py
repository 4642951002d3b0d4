"""What one writes without a library: three recipes in plain torch.distributed, for equal shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

__all__ = ["four_all_to_alls", "gather_keys", "two_all_to_alls"]

Tensor = torch.Tensor


class _AllToAll(torch.autograd.Function):
    """Part r of dim 0 goes to rank r; its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllToAll.apply(grad.contiguous(), ctx.group), None


class _Gather(torch.autograd.Function):
    """The tokens of every rank; in backward each rank gets the sum of its tokens' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent = torch.stack(grad.chunk(ctx.group.size(), dim=1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received.sum(dim=0), None


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, mask: Tensor | None = None) -> Tensor:
    """[B, S, H, D] → [B, S, H, D]"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.size(1) != k.size(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def _by_destination(x: Tensor, world: int) -> Tensor:
    """[B, S_local, H, D] → [W, S_local, B, H / W, D]"""
    batch, rows, heads, dim = x.shape
    return x.reshape(batch, rows, world, heads // world, dim).permute(2, 1, 0, 3, 4)


def _from_sources(x: Tensor) -> Tensor:
    """[W, S_local, B, H / W, D] → [B, S, H / W, D], a view"""
    return x.flatten(0, 1).transpose(0, 1)


def _back(out: Tensor, group: Any) -> Tensor:
    """[B, S, H / W, D] → [B, S_local, H, D]"""
    batch, seq_len, heads, dim = out.shape
    world = group.size()
    sent = out.transpose(0, 1).reshape(world, seq_len // world, batch, heads, dim)
    received = _AllToAll.apply(sent.contiguous(), group)
    return received.permute(2, 1, 0, 3, 4).reshape(batch, seq_len // world, world * heads, dim)


def four_all_to_alls(q: Tensor, k: Tensor, v: Tensor, group: Any, *, is_causal: bool = False) -> Tensor:
    """One exchange each for q, k, v and out."""
    q, k, v = (_from_sources(_AllToAll.apply(_by_destination(x, group.size()).contiguous(), group)) for x in (q, k, v))
    return _back(_attend(q, k, v, is_causal), group)


def two_all_to_alls(q: Tensor, k: Tensor, v: Tensor, group: Any, *, is_causal: bool = False) -> Tensor:
    """One exchange for q, k and v together, one for out."""
    parts = [_by_destination(x, group.size()) for x in (q, k, v)]
    received = _from_sources(_AllToAll.apply(torch.cat(parts, dim=3), group))
    q, k, v = received.split([part.size(3) for part in parts], dim=2)
    return _back(_attend(q, k, v, is_causal), group)


def gather_keys(q: Tensor, k: Tensor, v: Tensor, group: Any, *, is_causal: bool = False) -> Tensor:
    """K and V of all ranks, the rank's own queries; a mask where causal: torch's flag counts from the first row."""
    k, v = _Gather.apply(k, group), _Gather.apply(v, group)
    mask = None
    if is_causal:
        mask = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(group.rank() * q.size(1))
    return _attend(q, k, v, mask=mask)
