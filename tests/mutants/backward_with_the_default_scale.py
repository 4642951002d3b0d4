"""A call with a softmax_scale goes backward as if it had none."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> tuple:
        out, lse = super().attend(q, keys, values, hidden)
        self.options = self.options._replace(softmax_scale=None)
        other, _ = super().attend(q, keys, values, hidden)
        return out.detach() + (other - other.detach()), lse


attention = attention_of(Wrong)
