"""q gets no gradient."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def queries(self) -> tuple[torch.Tensor, ...]:
        q, positions = super().queries()
        return q.detach(), positions


attention = attention_of(Wrong)
