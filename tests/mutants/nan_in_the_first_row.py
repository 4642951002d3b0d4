"""The first query of a causal call gets NaN."""

import math

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.own_positions(self.q_lengths) == 0
        out = out.masked_fill(first[:, None, None], math.nan) if self.options.is_causal else out
        return super().finish(out, lse)


attention = attention_of(Wrong)
