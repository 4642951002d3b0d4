"""Every rank reads the rows of a whole mask as if its queries were the first."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def mask_of(self, places: torch.Tensor, key_places: torch.Tensor) -> torch.Tensor | None:
        is_plain = self.text() is None and self.options.mask_layout[0] != "local"
        return super().mask_of(torch.arange(len(places)) if is_plain else places, key_places)


attention = attention_with_options(Wrong)
