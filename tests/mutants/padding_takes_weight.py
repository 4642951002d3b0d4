"""Padding rows are attended to like tokens."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        layout = self.options.kv_layout or self.options.layout
        rows = self.kv_lengths if layout is None else list(layout.padded_lengths)
        positions, begin = [], 0
        for real, with_padding in zip(self.kv_lengths, rows, strict=True):
            positions += [*range(begin, begin + real), *[-1] * (with_padding - real)]
            begin += real
        return self.gather(self.k, rows), self.gather(self.v, rows), torch.tensor(positions, dtype=torch.int64)


attention = attention_of(Wrong)
