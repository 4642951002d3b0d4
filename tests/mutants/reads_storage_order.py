"""q is read in the order of its memory, whatever its strides."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def queries(self) -> tuple[torch.Tensor, ...]:
        q = self.q
        elements = q.untyped_storage().nbytes() // q.element_size()
        if q.storage_offset() + q.numel() <= elements:  # else q repeats elements, and is read as it should be
            contiguous = torch.empty(q.shape, device="meta").stride()
            self.q = torch.as_strided(q, q.shape, contiguous, q.storage_offset())
        return super().queries()


attention = attention_of(Wrong)
