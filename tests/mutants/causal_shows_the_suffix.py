"""Under a causal mask text behind the sequence is seen by all of it."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(q_positions, kv_positions)
        if self.text() is not None and self.options.joint_position == "suffix":
            hidden[: self.q_lengths[self.rank], kv_positions >= self.kv_tokens()] = False
        return hidden


attention = attention_with_options(Wrong)
