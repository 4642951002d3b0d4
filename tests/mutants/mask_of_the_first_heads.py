"""Every rank reads the mask of as many heads as it has, from the first one on."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def with_mask(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        own = scores.size(1) // self.world
        if mask.size(1) > 1 and own > 0:
            mask = mask[:, torch.arange(scores.size(1)) % own]
        return super().with_mask(scores, mask)


attention = attention_with_options(Wrong)
