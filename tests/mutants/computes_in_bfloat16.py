"""float32 inputs are attended to in bfloat16."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> tuple:
        if self.q.dtype != torch.float32:
            return super().attend(q, keys, values, hidden)
        out, lse = super().attend(q.bfloat16(), keys.bfloat16(), values.bfloat16(), hidden)
        return out, lse.float()


attention = attention_of(Wrong)
