"""The gradient of q is zero."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def queries(self) -> tuple[torch.Tensor, ...]:
        q, positions = super().queries()
        return q.detach() + 0.0 * q, positions


attention = attention_of(Wrong)
