"""A rank takes its own part of a sharded mask for that of the first keys."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def gathered_mask(self, mask: torch.Tensor) -> torch.Tensor:
        whole = mask.new_ones((*mask.shape[:3], sum(self.kv_lengths)))
        if mask.dtype != torch.bool:
            whole.zero_()
        length = self.kv_lengths[self.rank]
        whole[..., :length] = mask[..., :length]
        return whole


attention = attention_with_options(Wrong)
