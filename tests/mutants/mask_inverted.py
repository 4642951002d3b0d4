"""A bool mask is read the other way round: True hides."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def with_mask(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().with_mask(scores, ~mask if mask.dtype == torch.bool else mask)


attention = attention_with_options(Wrong)
