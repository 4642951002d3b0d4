"""A causal query counts its position from the start of its shard."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        return super().hidden(q_positions - sum(self.q_lengths[: self.rank]), kv_positions)


attention = attention_of(Wrong)
