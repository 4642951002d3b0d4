"""A backend that honours every field of AttendCall, with einsum."""

from typing import Any

import torch

from ulysses_attention import UlyssesAttentionProcessor


class Backend(UlyssesAttentionProcessor):
    supports = frozenset({"is_causal", "softmax_scale", "q_positions", "need_lse"})

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> Any:
        k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2).to(_wide(x)) for x in (k, v))
        scale = q.size(3) ** -0.5 if call.softmax_scale is None else call.softmax_scale
        scores = torch.einsum("bihd,bjhd->bhij", q.to(k.dtype), k) * scale
        if call.is_causal:
            scores = scores.masked_fill(call.kv_positions > call.q_positions.unsqueeze(1), -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).to(q.dtype)
        return (out, scores.logsumexp(-1)) if call.need_lse else out


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
