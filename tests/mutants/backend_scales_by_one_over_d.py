"""A backend whose attend() scales by 1 / D where the caller gives no scale."""

from typing import Any

import torch

from ulysses_attention import UlyssesAttentionProcessor


class Backend(UlyssesAttentionProcessor):
    supports = frozenset({"softmax_scale"})

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2) for x in (k, v))
        scale = 1.0 / q.size(3) if call.softmax_scale is None else call.softmax_scale
        weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(scale).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)
