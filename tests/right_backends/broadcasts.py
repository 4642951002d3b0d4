"""K and V arrive in one broadcast from each rank; backward is one all-reduce for each rank's block."""

from typing import Any

import torch

from mutants.parts import Options, Steps


class _FromRank(torch.autograd.Function):
    """x of rank `root` on every rank; root gets the sum of the gradients, the others none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, root: int, rows: int, group: Any) -> torch.Tensor:
        ctx.is_root, ctx.group, ctx.shape = group.rank() == root, group, x.shape
        block = x.new_empty(len(x), rows, *x.shape[2:])
        if ctx.is_root:
            block.copy_(x)
        group.broadcast(block, root).wait()
        return block

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.allreduce([total]).wait()
        return (total if ctx.is_root else total.new_zeros(ctx.shape)), None, None, None


class _Broadcasts(Steps):
    def gather(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        own = self.own(x, lengths)
        blocks = [_FromRank.apply(own, root, rows, self.group) for root, rows in enumerate(lengths) if rows > 0]
        return torch.cat(blocks, 1)


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
    out, lse = _Broadcasts(q, k, v, group, options).run()
    return (out, lse) if return_lse else out
