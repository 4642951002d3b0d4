"""sinks are accepted and not used."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def sinks(self) -> torch.Tensor | None:
        return None


attention = attention_with_options(Wrong)
