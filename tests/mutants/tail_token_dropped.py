"""The last key of the sequence is left out."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        keys, values, positions = super().keys_and_values()
        return keys[:, :-1], values[:, :-1], positions[:-1]


attention = attention_of(Wrong)
