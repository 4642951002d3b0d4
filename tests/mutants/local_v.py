"""The keys of every rank weigh this rank's own values, repeated."""

import torch
from torch.nn import functional

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        own = self.own(self.v, self.kv_lengths)
        own = functional.pad(own, (0, 0, 0, 0, 0, max(0, 1 - own.size(1))))
        positions = torch.arange(sum(self.kv_lengths))
        return self.gather(self.k, self.kv_lengths), own[:, positions % own.size(1)], positions


attention = attention_of(Wrong)
