"""Backward is a reduce-scatter: every rank sends each other rank its part of dK and dV, the receiver adds up."""

from typing import Any

import torch

from mutants.parts import Options, Steps


class _Gather(torch.autograd.Function):
    """x [rows of this rank, ..] → [rows of all ranks, ..], by an all-to-all of equal messages."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: list[int], group: Any) -> torch.Tensor:
        ctx.rows, ctx.group = rows, group
        whole = x.new_empty(sum(rows), *x.shape[1:])
        send = x.repeat(group.size(), *[1] * (x.dim() - 1))
        group.alltoall_base(whole, send, rows, [len(x)] * group.size()).wait()
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        world, own = ctx.group.size(), ctx.rows[ctx.group.rank()]
        parts = grad.new_empty(world * own, *grad.shape[1:])
        ctx.group.alltoall_base(parts, grad.contiguous(), [own] * world, ctx.rows).wait()
        return parts.unflatten(0, (world, own)).sum(0), None, None


class _ReduceScatter(Steps):
    def gather(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        return _Gather.apply(self.own(x, lengths).transpose(0, 1), lengths, self.group).transpose(0, 1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    layout: Any = None,
    kv_layout: Any = None,
    return_lse: bool = False,
) -> Any:
    options = Options(is_causal, "top_left", softmax_scale, layout, kv_layout)
    out, lse = _ReduceScatter(q, k, v, group, options).run()
    return (out, lse) if return_lse else out
