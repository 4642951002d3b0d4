"""A masked call goes backward as if it had had no mask."""

import math

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def weigh(self, scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values)
        other, _ = super().weigh(self.without, values)
        return out.detach() + (other - other.detach()), lse

    def masked(self, scores: torch.Tensor, places: torch.Tensor, key_places: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(places, key_places) | self.invalid(key_places).unsqueeze(1)
        self.without = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
        return super().masked(scores, places, key_places)


attention = attention_with_options(Wrong)
