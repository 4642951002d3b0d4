"""Each rank attends to its own keys and values alone."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        return self.own(self.k, self.kv_lengths), self.own(self.v, self.kv_lengths), self.own_positions(self.kv_lengths)


attention = attention_of(Wrong)
