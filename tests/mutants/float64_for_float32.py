"""float32 inputs get a float64 output."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = super().finish(out, lse)
        return out.double() if out.dtype == torch.float32 else out, lse


attention = attention_of(Wrong)
