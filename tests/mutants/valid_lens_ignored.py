"""Joint tokens behind their sequence's end are seen like the others."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def invalid(self, places: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, len(places), dtype=torch.bool)


attention = attention_with_options(Wrong)
