"""A causal call goes backward as if it had not been causal."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> tuple:
        out, lse = super().attend(q, keys, values, hidden)
        other, _ = super().attend(q, keys, values, torch.zeros_like(hidden))
        return out.detach() + (other - other.detach()), lse


attention = attention_of(Wrong)
