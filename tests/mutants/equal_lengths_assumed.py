"""Every rank is taken to hold as many keys as rank 0: tokens are lost, or rows of zeros stand for them."""

import torch
from torch.nn import functional

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        rows = [self.kv_lengths[0]] * self.world

        def whole(x: torch.Tensor) -> torch.Tensor:
            x = x[:, : self.kv_lengths[self.rank]]
            return self.gather(functional.pad(x, (0, 0, 0, 0, 0, rows[0] - x.size(1))), rows)

        return whole(self.k), whole(self.v), torch.arange(sum(rows))


attention = attention_of(Wrong)
