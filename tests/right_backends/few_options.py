"""Plain attention over equal shards: q, k, v, group, and nothing else that a caller may set."""

from typing import Any

import torch


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        shards = [torch.empty(x.shape, dtype=x.dtype) for _ in range(group.size())]
        group.allgather([shards], [x.contiguous()]).wait()
        return torch.cat(shards, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), 1)]
        ctx.group.reduce_scatter([own := torch.empty_like(parts[0])], [parts]).wait()
        return own, None


def _refuse_unequal(rows: tuple[int, int], group: Any) -> None:
    """What this backend cannot do is said on every rank, before the rows travel."""
    all_rows = [torch.empty(2, dtype=torch.long) for _ in range(group.size())]
    group.allgather([all_rows], [torch.tensor(rows)]).wait()
    lengths = [tuple(pair.tolist()) for pair in all_rows]
    if len(set(lengths)) > 1:
        raise ValueError(f"every rank must bring the same number of tokens of q and k, not {lengths} over the ranks")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
    _refuse_unequal((q.size(1), k.size(1)), group)
    dtype, per_kv = torch.promote_types(q.dtype, torch.float32), q.size(2) // k.size(2)
    keys, values = (_Gather.apply(x.to(dtype), group).repeat_interleave(per_kv, 2).transpose(1, 2) for x in (k, v))
    scores = q.to(dtype).transpose(1, 2) @ keys.transpose(2, 3) / q.size(3) ** 0.5
    return (scores.softmax(-1) @ values).transpose(1, 2).to(q.dtype)
