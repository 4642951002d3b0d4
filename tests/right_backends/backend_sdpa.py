"""A backend around torch's scaled_dot_product_attention that declares no lse and no queries inside the sequence."""

from typing import Any

import torch
from torch.nn import functional

from ulysses_attention import UlyssesAttentionProcessor


class Backend(UlyssesAttentionProcessor):
    supports = frozenset({"is_causal", "softmax_scale"})

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=call.is_causal, scale=call.softmax_scale, enable_gqa=q.size(1) != k.size(1)
        ).transpose(1, 2)
