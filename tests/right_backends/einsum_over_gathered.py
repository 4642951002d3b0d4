"""Gather K and V of every rank, then einsum over batch, head, query and key."""

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
    causal_alignment: str = "top_left",
    softmax_scale: float | None = None,
    layout: Any = None,
    kv_layout: Any = None,
    return_lse: bool = False,
) -> Any:
    q_rows, kv_rows = lengths_of(q, k, group, layout, kv_layout)
    own, before = q_rows[group.rank()], sum(q_rows[: group.rank()])

    def whole(x: torch.Tensor) -> torch.Tensor:
        rows = x[:, : kv_rows[group.rank()]].to(torch.promote_types(x.dtype, torch.float32))
        rows = GatherRows.apply(rows, kv_rows, group, lambda grad: sum_over_ranks(grad, group))
        return rows.unsqueeze(3).expand(-1, -1, -1, q.size(2) // k.size(2), -1)

    keys, values = whole(k), whole(v)
    grouped = q[:, :own].to(keys.dtype).unflatten(2, (k.size(2), -1))
    scale = q.size(3) ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqgnd,bkgnd->bgnqk", grouped, keys) * scale
    if is_causal:
        shift = sum(kv_rows) - sum(q_rows) if causal_alignment == "bottom_right" else 0
        sees = torch.ones(own, keys.size(1), dtype=torch.bool).tril(before + shift)
        scores = torch.where(sees, scores, -1e30)
        weights = torch.where(sees, scores.softmax(-1), 0.0)
        lse = torch.where(sees.any(-1), scores.logsumexp(-1), -math.inf)
    else:
        weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    attended = torch.einsum("bgnqk,bkgnd->bqgnd", weights, values).flatten(2, 3).to(q.dtype)
    out = torch.cat([attended, attended.new_zeros(q.size(0), q.size(1) - own, *attended.shape[2:])], 1)
    if not return_lse:
        return out
    behind = lse.new_full((q.size(0), q.size(2), q.size(1) - own), -math.inf)
    return out, torch.cat([lse.flatten(1, 2).detach(), behind], 2)
