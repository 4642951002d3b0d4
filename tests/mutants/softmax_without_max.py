"""The softmax takes exp() of the scores as they are, so large ones overflow."""

import torch

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def softmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        return weights / total.clamp_min(torch.finfo(scores.dtype).tiny), total.detach().squeeze(-1).log()


attention = attention_of(Wrong)
