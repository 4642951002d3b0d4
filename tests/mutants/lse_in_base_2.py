"""lse is a logarithm to base 2."""

import math

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().finish(out, lse / math.log(2.0))


attention = attention_of(Wrong)
