"""Keys that every rank holds are gathered as if they were shards."""

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class Wrong(OptionSteps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        keys, values, places = super().keys_and_values()
        copies = self.world if self.is_replicated() else 1
        return keys.repeat(1, copies, 1, 1), values.repeat(1, copies, 1, 1), places.repeat(copies)


attention = attention_with_options(Wrong)
