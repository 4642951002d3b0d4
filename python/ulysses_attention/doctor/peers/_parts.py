"""What several adapters do around the library's own call: text before the shard, a mask cut to it, plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ulysses_attention.layout import SequenceLayout

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # out, or with text (out, the text's)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """torch's attention of this process alone.

    Shapes: q [B, S, H, D], k and v [B, S_kv, H_kv, D], attn_mask [B, 1, 1, S_kv] → [B, S, H, D]; GQA by the shapes.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=softmax_scale,
        enable_gqa=grouped(q, k),
    )
    return out.transpose(1, 2)


def grouped(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether several query heads share a KV head: what these libraries want to be told by a flag."""
    return q.size(2) != k.size(2)


def key_mask(attn_mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask [B, S_kv] over keys as [B, 1, 1, S_kv], which broadcasts over heads and queries.

    Errors: NotImplementedError for any other mask: not adapted.
    """
    if attn_mask is None:
        return None
    if attn_mask.dim() != 2 or attn_mask.dtype != torch.bool:
        raise NotImplementedError(
            f"[doctor] attn_mask {list(attn_mask.shape)} of {attn_mask.dtype}: only a bool mask [B, S_kv] is adapted."
        )
    return attn_mask[:, None, None, :]


def own_keys(attn_mask: torch.Tensor | None, k: torch.Tensor, group: ProcessGroup) -> torch.Tensor | None:
    """The columns of a mask [B, S_kv] that belong to this rank's keys k [B, S_local, H_kv, D].

    Comm:   one all-gather of a length per rank, only with a mask.
    """
    if attn_mask is None:
        return None
    key_mask(attn_mask)  # no other
    length = torch.tensor([k.size(1)], device=k.device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    begin = int(sum(lengths[: dist.get_rank(group)]))
    return attn_mask[:, begin : begin + k.size(1)].contiguous()


def with_text(attend: Attend, shard: Tensors, joint: Tensors | None, attn_mask: torch.Tensor | None = None) -> Result:
    """attend(q, k, v) of this rank's shard, text tokens in front of it where there are any.

    Shapes: shard and joint: q, k, v, each [B, S_local or T, H, D]; the text is the same on every rank
            → [B, S_local, H, D], the rows of the shard; with joint (these rows, the text's).
    Errors: NotImplementedError for joint together with attn_mask: a mask of keys says nothing about the text.
    """
    if joint is None:
        return attend(*shard)
    if attn_mask is not None:
        raise NotImplementedError("[doctor] joint and attn_mask together: not adapted. Fix: one of the two.")
    q, k, v = (torch.cat([text, image], dim=1) for text, image in zip(joint, shard, strict=True))
    out, length = attend(q, k, v), joint[0].size(1)
    return out[:, length:], out[:, :length]


def refuse_padding(kv_layout: SequenceLayout | None) -> None:
    """Other lengths of k and v need no argument here, their shapes say them; padding rows cannot be told at all."""
    if kv_layout is not None and kv_layout.padded_lengths != kv_layout.lengths:
        raise NotImplementedError(
            f"[doctor] kv_layout.padded_lengths={list(kv_layout.padded_lengths)} are not its "
            f"lengths={list(kv_layout.lengths)}. The library takes every row for a key. "
            f"Fix: SequenceLayout.from_lengths({list(kv_layout.lengths)})."
        )
