"""Where a rank's heads begin inside a KV group, the first of them reads the next KV head."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def kv_heads(self) -> torch.Tensor:
        heads = super().kv_heads()
        fewest, more = divmod(len(heads), self.world)
        for rank in range(1, self.world):
            first = rank * fewest + min(rank, more)
            if first < len(heads) and heads[first] == heads[first - 1]:
                heads[first] = (heads[first] + 1) % self.k.size(2)
                break
        return heads


attention = attention_of(Wrong)
