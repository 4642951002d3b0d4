"""Query head h reads KV head h % H_kv."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def kv_heads(self) -> torch.Tensor:
        return torch.arange(self.q.size(2)) % self.k.size(2)


attention = attention_of(Wrong)
