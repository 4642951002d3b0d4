"""One head and one batch entry after the other, each a small matrix product."""

import math
from typing import Any

import torch

from mutants.parts import GatherRows, lengths_of, sum_over_ranks


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
) -> torch.Tensor:
    q_rows, kv_rows = lengths_of(q, k, group, layout, kv_layout)
    rank, dtype = group.rank(), torch.promote_types(q.dtype, torch.float32)

    def whole(x: torch.Tensor) -> torch.Tensor:
        rows = x[:, : kv_rows[rank]].to(dtype)
        return GatherRows.apply(rows, kv_rows, group, lambda grad: sum_over_ranks(grad, group))

    keys, values, own = whole(k), whole(v), q[:, : q_rows[rank]].to(dtype)
    scale = 1.0 / math.sqrt(q.size(3)) if softmax_scale is None else softmax_scale
    mask = torch.zeros(own.size(1), keys.size(1), dtype=dtype)
    if is_causal:
        mask = mask.fill_(-math.inf).triu(1 + sum(q_rows[:rank]))
    batches = []
    for one_q, one_k, one_v in zip(own, keys, values, strict=True):
        heads = []
        for head in range(q.size(2)):
            kv_head = head * k.size(2) // q.size(2)
            weights = (one_q[:, head] @ one_k[:, kv_head].T * scale + mask).softmax(-1)
            heads.append(weights @ one_v[:, kv_head])
        batches.append(torch.stack(heads, 1))
    out = q.new_zeros(*q.shape[:3], v.size(3))
    out[:, : own.size(1)] = torch.stack(batches).to(q.dtype)
    return out
