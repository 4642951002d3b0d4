"""The keys and values of rank 0 are there twice."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        keys, values, positions = super().keys_and_values()
        twice = torch.cat([positions, positions[: self.kv_lengths[0]]])
        return keys[:, twice], values[:, twice], twice


attention = attention_of(Wrong)
