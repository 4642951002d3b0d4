"""lse counts this rank's keys only."""

import math

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def softmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, _ = super().softmax(scores)
        return weights, scores.detach().masked_fill(self.rank_of_keys() != self.rank, -math.inf).logsumexp(-1)


attention = attention_of(Wrong)
