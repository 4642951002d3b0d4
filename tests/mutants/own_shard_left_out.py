"""A rank attends to the other ranks' keys and not to its own."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        return super().hidden(q_positions, kv_positions) | (self.rank_of_keys() == self.rank)


attention = attention_of(Wrong)
