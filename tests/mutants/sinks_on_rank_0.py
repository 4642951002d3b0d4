"""Only rank 0 adds the sinks."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def sinks(self) -> torch.Tensor | None:
        return super().sinks() if self.rank == 0 else None


attention = attention_with_options(Wrong)
