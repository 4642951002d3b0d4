"""A backend that honours every field of its call: mask, sinks and softcap too, and lse with a gradient."""

import math
from typing import Any

import torch

from ulysses_attention import UlyssesAttentionProcessor


class Backend(UlyssesAttentionProcessor):
    supports = frozenset({"is_causal", "softmax_scale", "q_positions", "need_lse", "attn_mask", "sinks", "softcap"})

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> Any:
        dtype, per_kv = torch.promote_types(q.dtype, torch.float32), q.size(2) // k.size(2)
        keys, values = (x.to(dtype).repeat_interleave(per_kv, 2) for x in (k, v))
        scale = q.size(3) ** -0.5 if call.softmax_scale is None else call.softmax_scale
        logits = torch.einsum("bihd,bjhd->bhij", q.to(dtype) * scale, keys)
        if call.softcap is not None:
            logits = call.softcap * (logits / call.softcap).tanh()
        if call.is_causal:
            later = call.kv_positions > call.q_positions.unsqueeze(1)
            logits = logits + torch.zeros(later.shape, dtype=dtype).masked_fill(later, -math.inf)
        if call.attn_mask is not None:
            mask = call.attn_mask
            logits = logits + (torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask.to(dtype))
        if call.sinks is not None:
            logits = torch.cat([call.sinks.to(dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1), logits], 3)
        sees = (logits > -math.inf).any(-1)
        logits = torch.where(sees.unsqueeze(-1), logits, 0.0)
        weights = torch.where(sees.unsqueeze(-1), logits.softmax(-1), 0.0)[..., -keys.size(1) :]
        out = torch.einsum("bhij,bjhd->bihd", weights, values).to(q.dtype)
        return (out, torch.where(sees, logits.logsumexp(-1), -math.inf)) if call.need_lse else out
