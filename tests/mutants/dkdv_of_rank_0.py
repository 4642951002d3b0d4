"""dK and dV hold what rank 0's queries ask for."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def reduce(self, grad: torch.Tensor) -> torch.Tensor:
        return super().reduce(grad if self.rank == 0 else torch.zeros_like(grad))


attention = attention_of(Wrong)
