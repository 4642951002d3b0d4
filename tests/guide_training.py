"""What the tests of the guide's training step share: its code, a model, and single-process attention."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ulysses_attention import _C

BATCH, SEQ_LEN, CLASSES, WIDTH = 2, 13, 7, 16  # 13 tokens: the last shard is padded
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def step_of_the_guide() -> Callable[..., torch.Tensor]:
    """train_step as the guide prints it."""
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", _C.render_guide(), re.S) if "def train_step" in b]
    names: dict[str, Any] = {}
    exec(compile(code, "the guide", "exec"), names)
    return names["train_step"]


class Model(nn.Module):
    """Enough to make padding rows non-zero: an embedding, attention, and a biased head with a residual."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (part.unflatten(2, (2, WIDTH // 2)) for part in self.qkv(x).chunk(3, 2))
        return self.head(x + self.attention(q, k, v).flatten(2))


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(q.size(3) ** -0.5).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def new_model(attention: Attention) -> Model:
    """The same float64 parameters in every thread and process, whose global random state stays as it is."""
    generator = torch.Generator().manual_seed(3)
    model = Model(attention).double()
    for parameter in model.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def new_data(seq_len: int = SEQ_LEN) -> torch.Tensor:
    """tokens and labels, [2, B, S]."""
    return torch.randint(CLASSES, (2, BATCH, seq_len), generator=torch.Generator().manual_seed(4))


def gradient_norm(model: nn.Module) -> float:
    return float(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm())
