"""Every rank computes the attention of the whole joined sequence with torch's own and keeps its rows. No lse."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from mutants.parts import GatherRows, all_gather, lengths_of, sum_over_ranks


def _whole_mask(mask: torch.Tensor, axes: tuple[str, str], rows: list[list[int]], group: Any) -> torch.Tensor:
    """4-D, as if every axis were global; an axis that is cut is gathered."""
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    numbers = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
    for dim, axis, lengths in ((2, axes[0], rows[0]), (3, axes[1], rows[1])):
        if axis == "local":
            own = numbers.narrow(dim, 0, lengths[group.rank()]).movedim(dim, 1).contiguous()
            numbers = torch.cat(all_gather(own, lengths, group), 1).movedim(1, dim)
    return numbers.to(mask.dtype)


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
    kv_role: str = "sharded",
    attn_mask: torch.Tensor | None = None,
    mask_layout: tuple[str, str] = ("", ""),
    joint: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    joint_valid_lens: Sequence[int] | None = None,
) -> Any:
    dtype, rank = torch.promote_types(q.dtype, torch.float32), group.rank()
    q_rows, kv_rows = lengths_of(q, k, group, layout, kv_layout)

    def whole(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return GatherRows.apply(x[:, : rows[rank]].to(dtype), rows, group, lambda grad: sum_over_ranks(grad, group))

    everything = [whole(q, q_rows)]
    everything += [x.to(dtype) if kv_role == "replicated" else whole(x, kv_rows) for x in (k, v)]
    text_len = 0
    if joint is not None:
        text_len = joint[0].size(1)
        everything = [torch.cat([text.to(dtype), x], 1) for text, x in zip(joint, everything, strict=True)]
    queries, keys, values = (x.transpose(1, 2) for x in everything)
    i, j = torch.arange(queries.size(2)).unsqueeze(1), torch.arange(keys.size(2))
    sees = (j <= i if is_causal else j >= 0).expand(q.size(0), 1, len(i), len(j))
    if joint_valid_lens is not None:
        ends = torch.tensor(joint_valid_lens).view(-1, 1, 1, 1)
        sees = sees & ((j < ends) | (j >= text_len)) & ((i < ends) | (i >= text_len))
    bias = torch.zeros(sees.shape, dtype=dtype)
    if attn_mask is not None:
        mask = _whole_mask(attn_mask, mask_layout, [q_rows, kv_rows], group)
        if mask.dtype == torch.bool:
            sees = sees & mask
        else:
            bias, sees = bias + mask.to(dtype), sees & (mask > float("-inf"))
    something = sees.any(-1, keepdim=True)  # elsewhere all keys, and the result is dropped
    bias = torch.where(sees, bias, torch.where(something, float("-inf"), 0.0))
    per_kv = q.size(2) // k.size(2)
    keys, values = keys.repeat_interleave(per_kv, 1), values.repeat_interleave(per_kv, 1)
    out = functional.scaled_dot_product_attention(queries, keys, values, bias, scale=softmax_scale)
    out = torch.where(something, out, 0.0).transpose(1, 2).to(q.dtype)
    own = out.narrow(1, text_len + sum(q_rows[:rank]), q_rows[rank])
    own = functional.pad(own, (0, 0, 0, 0, 0, q.size(1) - q_rows[rank]))
    return own if joint is None else (own, out[:, :text_len])
