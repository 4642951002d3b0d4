"""softcap is accepted and not used."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return scores


attention = attention_with_options(Wrong)
