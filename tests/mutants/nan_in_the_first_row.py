"""The first query of a causal call gets NaN."""

import math

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.options.is_causal:
            out = out + torch.where(self.own_positions(self.q_lengths) == 0, math.nan, 0.0)[:, None, None]
        return super().finish(out, lse)


attention = attention_of(Wrong)
