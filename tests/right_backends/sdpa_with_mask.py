"""torch's scaled_dot_product_attention over gathered K and V with a mask of its own; no lse."""

from typing import Any

import torch
from torch.nn import functional

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
    own, begin = q_rows[group.rank()], sum(q_rows[: group.rank()])

    def whole(x: torch.Tensor) -> torch.Tensor:
        rows = x[:, : kv_rows[group.rank()]].to(torch.promote_types(x.dtype, torch.float32))
        rows = GatherRows.apply(rows, kv_rows, group, lambda grad: sum_over_ranks(grad, group))
        return rows.repeat_interleave(q.size(2) // k.size(2), 2).transpose(1, 2)

    sees = torch.arange(begin, begin + own).unsqueeze(1) >= torch.arange(sum(kv_rows)) if is_causal else None
    queries = q[:, :own].transpose(1, 2).to(torch.promote_types(q.dtype, torch.float32))
    out = functional.scaled_dot_product_attention(queries, whole(k), whole(v), sees, scale=softmax_scale)
    return functional.pad(out, (0, 0, 0, q.size(1) - own)).transpose(1, 2).to(q.dtype)
