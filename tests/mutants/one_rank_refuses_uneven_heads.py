"""Where the ranks do not divide the heads, the last rank alone raises."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        if self.q.size(2) % self.world != 0 and self.rank == self.world - 1:
            raise ValueError(f"rank {self.rank} gets too few of {self.q.size(2)} heads")
        return super().keys_and_values()


attention = attention_of(Wrong)
