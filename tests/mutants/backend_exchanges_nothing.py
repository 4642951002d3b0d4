"""A backend whose exchange hands the rank's own keys and values on."""

from typing import Any

import torch

from ulysses_attention import UlyssesAttentionProcessor


class Backend(UlyssesAttentionProcessor):
    def exchange(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, group: Any) -> Any:
        return q, k, v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2) for x in (k, v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(q.size(3) ** -0.5).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)
