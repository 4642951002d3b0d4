"""Each rank sees its own chunk of the text's keys."""

import math

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def masked(self, scores: torch.Tensor, places: torch.Tensor, key_places: torch.Tensor) -> torch.Tensor:
        scores = super().masked(scores, places, key_places)
        if self.text() is None:
            return scores
        chunk = -(-self.text_len() // self.world)
        number = key_places - self.text_key_places()[0]
        others = (number >= 0) & (number < self.text_len()) & (number // chunk != self.rank)
        return scores.masked_fill(others, -math.inf)


attention = attention_with_options(Wrong)
