"""The causal mask takes the image's queries for the first of the joined sequence."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        own = self.q_lengths[self.rank]
        q_positions = torch.cat([q_positions[:own] - self.in_front(), q_positions[own:]])
        return super().hidden(q_positions, kv_positions)


attention = attention_with_options(Wrong)
