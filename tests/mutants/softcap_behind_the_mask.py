"""softcap brings hidden keys back: it is applied to scores that are masked already."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def masked(self, scores: torch.Tensor, places: torch.Tensor, key_places: torch.Tensor) -> torch.Tensor:
        return super().capped(super().masked(scores, places, key_places))


attention = attention_with_options(Wrong)
