"""Every rank adds the sinks to its part of one softmax."""

import math

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def sinks(self) -> torch.Tensor | None:
        sinks = super().sinks()
        return None if sinks is None else sinks + math.log(self.world)


attention = attention_with_options(Wrong)
