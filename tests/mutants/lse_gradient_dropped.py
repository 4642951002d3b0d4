"""lse takes a gradient and drops it."""

from typing import Any

import torch

from mutants.option_parts import OptionSteps, attention_with_options


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lse: torch.Tensor) -> torch.Tensor:
        return lse.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


class Wrong(OptionSteps):
    def weigh(self, scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values)
        return out, _Dropped.apply(lse)


attention = attention_with_options(Wrong)
