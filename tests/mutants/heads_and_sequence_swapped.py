"""The output lies as [B, H, S, D] in memory and is read as [B, S, H, D]."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().finish(out.transpose(1, 2).reshape(out.shape), lse)


attention = attention_of(Wrong)
