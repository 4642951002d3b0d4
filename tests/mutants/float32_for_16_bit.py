"""16-bit inputs get a float32 output."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = super().finish(out, lse)
        return out.to(self.dtype), lse


attention = attention_of(Wrong)
