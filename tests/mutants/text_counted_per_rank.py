"""The text's keys and values arrive once from every rank."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        keys, values, places = super().keys_and_values()
        for _ in range(self.world - 1 if self.text() is not None else 0):
            _, text_k, text_v = self.text()
            keys, values = torch.cat([keys, text_k.to(self.dtype)], 1), torch.cat([values, text_v.to(self.dtype)], 1)
            places = torch.cat([places, self.text_key_places()])
        return keys, values, places


attention = attention_with_options(Wrong)
