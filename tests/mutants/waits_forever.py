"""Rank 1 does not come to the collective where the number of tokens is odd, for longer than anyone waits."""

import threading

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        if self.rank == 1 and sum(self.q_lengths) % 2 == 1:
            threading.Event().wait(30.0)
        return super().keys_and_values()


attention = attention_of(Wrong)
