"""The guide's training step on padded shards ends with the parameters of a single process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from oracle import max_error
from ulysses_attention import _C, SequenceLayout, ulysses_attention
from ulysses_attention.launch import ProcessRanks

BATCH, SEQ_LEN, CLASSES, WIDTH, STEPS = 2, 13, 7, 16, 3  # 13 tokens: the last shard is padded
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


def start(attention: Attention) -> tuple[Model, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    model = Model(attention).double()
    tokens, labels = torch.randint(CLASSES, (2, BATCH, SEQ_LEN))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), tokens, labels


def train_by_the_guide(rank: int, group: Any) -> tuple[list[torch.Tensor], list[float]]:
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", _C.render_guide(), re.S) if "def train_step" in b]
    names: dict[str, Any] = {}
    exec(compile(code, "the guide", "exec"), names)
    layout = SequenceLayout(SEQ_LEN, group.size())
    assert layout.padded_lengths[-1] > layout.lengths[-1]
    model, optimizer, tokens, labels = start(lambda q, k, v: ulysses_attention(q, k, v, group, layout=layout))
    losses = [names["train_step"](model, optimizer, tokens, labels, layout, group).item() for _ in range(STEPS)]
    return [parameter.detach() for parameter in model.parameters()], losses


@pytest.mark.parametrize("world", [2, 4])
def test_the_guides_training_step_equals_a_single_process(world: int, gloo: Callable[[int], ProcessRanks]) -> None:
    model, optimizer, tokens, labels = start(softmax_attention)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    results = gloo(world).run(train_by_the_guide)
    for parameters, _ in results:
        for got, expected in zip(parameters, model.parameters(), strict=True):
            assert max_error(got, expected.detach()) < 1e-10
    for step, expected_loss in enumerate(losses):
        assert abs(sum(part[step] for _, part in results) - expected_loss) < 1e-10
