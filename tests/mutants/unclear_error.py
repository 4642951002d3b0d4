"""Where the ranks do not divide the heads, every rank raises an error that does not say so."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def kv_heads(self) -> torch.Tensor:
        if self.q.size(2) % self.world != 0:
            raise RuntimeError("unexpected")
        return super().kv_heads()


attention = attention_of(Wrong)
