"""Rank 1 raises while the others go on into a collective."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        if self.rank == 1:
            raise ValueError(f"rank 1 has no buffer for {self.k.size(1)} keys")
        return super().keys_and_values()


attention = attention_of(Wrong)
