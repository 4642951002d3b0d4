"""A rank attends within its pair of ranks: {0, 1}, {2, 3}."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        return super().hidden(q_positions, kv_positions) | (self.rank_of_keys() // 2 != self.rank // 2)


attention = attention_of(Wrong)
