"""The caller's k is multiplied by the scale, after its values have been read."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.k.detach().mul_(self.scale())
        return super().finish(out, lse)


attention = attention_of(Wrong)
