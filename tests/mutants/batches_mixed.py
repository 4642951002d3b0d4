"""Every batch attends to the keys of batch 0."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        keys, values, positions = super().keys_and_values()
        return keys[:1].expand_as(keys), values, positions


attention = attention_of(Wrong)
