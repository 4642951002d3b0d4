"""A bool mask becomes 1 and 0 on the scores, which hides nothing."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def with_mask(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores + mask.to(self.dtype)


attention = attention_with_options(Wrong)
