"""attn_mask is accepted and not used."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def whole_mask(self) -> torch.Tensor | None:
        return None


attention = attention_with_options(Wrong)
