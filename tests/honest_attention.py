"""A local attention for kernel= that honours every field of AttendCall."""

from __future__ import annotations

import math
from typing import Any

import torch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse. Shapes: q [B, S, H, D], k, v [B, S_kv, H_kv, ·] → [B, S, H, D_v], [B, H, S]."""
    assert call.attn_mask is None or call.attn_mask.dim() == 4
    per_kv = q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(per_kv, 2) for x in (k, v))
    scale = q.size(3) ** -0.5 if call.softmax_scale is None else call.softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    hidden = torch.zeros(1, 1, q.size(1), k.size(1), dtype=torch.bool)
    if call.is_causal:
        hidden = hidden | (call.kv_positions > call.q_positions.view(-1, 1))
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + mask.masked_fill(mask == -math.inf, 0.0)
        hidden = hidden | (mask == -math.inf)
    scores = scores.masked_fill(hidden, -math.inf)
    logits = scores
    if call.sinks is not None:
        assert call.sinks.shape == (q.size(2),)
        logits = torch.cat([scores, call.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    lse = logits.logsumexp(3)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(3)).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse
