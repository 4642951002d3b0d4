"""is_causal is taken and not used."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(super().hidden(q_positions, kv_positions))


attention = attention_of(Wrong)
