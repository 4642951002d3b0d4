"""dK and dV hold what this rank's own queries ask for and nothing of the other ranks'."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def reduce(self, grad: torch.Tensor) -> torch.Tensor:
        return grad


attention = attention_of(Wrong)
