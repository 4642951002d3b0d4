"""The output carries no gradient."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().finish(out.detach(), lse)


attention = attention_of(Wrong)
