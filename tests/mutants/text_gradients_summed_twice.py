"""The text's gradients are summed over the ranks, on each of which the caller sums them again."""

from typing import Any

import torch

from mutants.option_parts import OptionSteps, Tensors, attention_with_options
from mutants.parts import sum_over_ranks


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_over_ranks(grad, ctx.group), None


class Wrong(OptionSteps):
    def text(self) -> Tensors | None:
        text = super().text()
        return None if text is None else tuple(_Summed.apply(x, self.group) for x in text)


attention = attention_with_options(Wrong)
