"""A causal query sees the key behind its own position, too."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        return super().hidden(q_positions + 1, kv_positions)


attention = attention_of(Wrong)
