"""Rank r gets the output rows of rank W - 1 - r."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def queries(self) -> tuple[torch.Tensor, ...]:
        def turned(x: torch.Tensor, dim: int) -> torch.Tensor:
            whole = torch.cat(x.split(self.q_lengths, dim)[::-1], dim)
            return whole.narrow(dim, sum(self.q_lengths[: self.rank]), self.q_lengths[self.rank])

        return turned(self.gather(self.q, self.q_lengths), 1), turned(torch.arange(sum(self.q_lengths)), 0)


attention = attention_of(Wrong)
