"""The output comes back in [B, S, H, D], whatever qkv_format is."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def in_format(self, out: torch.Tensor, dim: int) -> torch.Tensor:
        return out


attention = attention_with_options(Wrong)
