"""Every rank returns rank 0's output rows."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def queries(self) -> tuple[torch.Tensor, ...]:
        rows = self.q_lengths[self.rank]
        return self.gather(self.q, self.q_lengths)[:, :rows], torch.arange(rows)


attention = attention_of(Wrong)
