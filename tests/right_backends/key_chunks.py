"""An online softmax over chunks of two keys, with running maximum and sum, on token-major gathered K and V."""

import math
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
    return_lse: bool = False,
) -> Any:
    q_rows, kv_rows = lengths_of(q, k, group, layout, kv_layout)
    own, begin, dtype = q_rows[group.rank()], sum(q_rows[: group.rank()]), torch.promote_types(q.dtype, torch.float32)
    both = torch.cat([k, v], 3)[:, : kv_rows[group.rank()]].to(dtype)
    both = GatherRows.apply(both, kv_rows, group, lambda grad: sum_over_ranks(grad, group))
    queries = q[:, :own].to(dtype) * (q.size(3) ** -0.5 if softmax_scale is None else softmax_scale)
    rows = torch.arange(begin, begin + own).unsqueeze(1)
    peak = queries.new_full((q.size(0), q.size(2), own, 1), -1e30)
    total, out = torch.zeros_like(peak), queries.new_zeros(q.size(0), q.size(2), own, v.size(3))
    for start in range(0, both.size(1), 2):
        chunk = both[:, start : start + 2].repeat_interleave(q.size(2) // k.size(2), 2)
        keys, values = chunk.split([k.size(3), v.size(3)], 3)
        scores = torch.matmul(queries.transpose(1, 2), keys.permute(0, 2, 3, 1))
        if is_causal:
            scores = scores.masked_fill(torch.arange(start, start + keys.size(1)) > rows, -math.inf)
        higher = torch.maximum(peak, scores.detach().amax(-1, keepdim=True))
        shrink, weights = (peak - higher).exp(), (scores - higher).exp()
        total, out = total * shrink + weights.sum(-1, keepdim=True), out * shrink + weights @ values.transpose(1, 2)
        peak = higher
    behind = q.size(1) - own
    out = functional.pad((out / total).transpose(1, 2).to(q.dtype), (0, 0, 0, 0, 0, behind))
    lse = functional.pad((peak + total.log()).squeeze(-1).detach(), (0, behind), value=-math.inf)
    return (out, lse) if return_lse else out
