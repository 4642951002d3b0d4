"""Four all-to-alls: q, k and v from tokens to heads, the output back. Equal shards and whole heads only."""

from typing import Any

import torch
from torch.nn import functional

from mutants.parts import rows_of_every_rank


class _Swap(torch.autograd.Function):
    """[W, ..]: block r goes to rank r, and the block from rank r comes to place r. Its backward is itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, x = group, x.contiguous()
        group.alltoall_base(received := torch.empty_like(x), x, [], []).wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Swap.apply(grad, ctx.group), None


def _tokens_to_heads(x: torch.Tensor, group: Any) -> torch.Tensor:  # [B, S/W, H, D] → [B, S, H/W, D]
    return _Swap.apply(x.unflatten(2, (group.size(), -1)).movedim(2, 0), group).movedim(0, 1).flatten(1, 2)


def _heads_to_tokens(x: torch.Tensor, group: Any) -> torch.Tensor:  # [B, S, H/W, D] → [B, S/W, H, D]
    return _Swap.apply(x.unflatten(1, (group.size(), -1)).movedim(1, 0), group).movedim(0, 2).flatten(2, 3)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    layout: Any = None,
) -> torch.Tensor:
    world, heads, kv_heads = group.size(), q.size(2), k.size(2)
    if heads % world != 0 or kv_heads % world != 0:
        raise ValueError(f"{heads} heads and {kv_heads} KV heads must both be multiples of the {world} ranks")
    rows = rows_of_every_rank(group, q.size(1))[0] if layout is None else list(layout.lengths)
    if layout is None:
        rows += rows_of_every_rank(group, k.size(1))[0]
    if (
        len(set(rows[:world])) > 1
        or len(set(rows[world:])) > 1
        or (layout is not None and layout.padded_lengths != layout.lengths)
    ):
        raise ValueError(f"shards of {rows} tokens: all {world} ranks must hold equally many, and no padding")
    q, k, v = (_tokens_to_heads(x, group).transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=softmax_scale, enable_gqa=heads != kv_heads
    )
    return _heads_to_tokens(out.transpose(1, 2), group)
