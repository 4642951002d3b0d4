"""dK and dV are the mean over the ranks, not the sum."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def reduce(self, grad: torch.Tensor) -> torch.Tensor:
        return super().reduce(grad) / self.world


attention = attention_of(Wrong)
