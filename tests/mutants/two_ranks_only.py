"""Only the keys of the first and of the last rank are attended to, which are all where there are two ranks."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        between = (self.rank_of_keys() > 0) & (self.rank_of_keys() < self.world - 1)
        return super().hidden(q_positions, kv_positions) | between


attention = attention_of(Wrong)
