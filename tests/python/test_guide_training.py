"""The guide's training step on padded shards ends with the parameters of a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from guide_training import SEQ_LEN, new_data, new_model, softmax_attention, step_of_the_guide
from oracle import max_error
from ulysses_attention import SequenceLayout, ulysses_attention
from ulysses_attention.launch import ProcessRanks

STEPS = 3


def train_by_the_guide(rank: int, group: Any) -> tuple[list[torch.Tensor], list[float]]:
    layout = SequenceLayout(SEQ_LEN, group.size())
    assert layout.padded_lengths[-1] > layout.lengths[-1]
    model = new_model(lambda q, k, v: ulysses_attention(q, k, v, group, layout=layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step, (tokens, labels) = step_of_the_guide(), new_data()
    losses = [step(model, optimizer, tokens, labels, layout, group).item() for _ in range(STEPS)]
    return [parameter.detach() for parameter in model.parameters()], losses


@pytest.mark.parametrize("world", [2, 4])
def test_b62_the_guides_training_step_equals_a_single_process(world: int, gloo: Callable[[int], ProcessRanks]) -> None:
    """With the whole world used for the sequence the reduction did nothing, and the ranks' weights drifted apart.

    Source: https://github.com/ByteDance-Seed/VeOmni/pull/1115
    """
    model = new_model(softmax_attention)
    optimizer, (tokens, labels) = torch.optim.SGD(model.parameters(), lr=0.5), new_data()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    results = gloo(world).run(train_by_the_guide)
    for parameters, _ in results:
        for got, expected, before in zip(parameters, model.parameters(), start, strict=True):
            assert max_error(got, expected.detach()) < 1e-10
            assert max_error(expected.detach(), before) > 1e-3  # the steps moved every parameter
        assert all(torch.equal(x, y) for x, y in zip(parameters, results[0][0], strict=True))  # bit for bit
    for step, expected_loss in enumerate(losses):
        assert all(abs(part[step] - expected_loss) < 1e-10 for _, part in results)
