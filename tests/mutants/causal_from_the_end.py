"""The causal diagonal ends in the bottom right corner although the top left one was asked for."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        self.options = self.options._replace(causal_alignment="bottom_right")
        return super().hidden(q_positions, kv_positions)


attention = attention_of(Wrong)
