"""How a loss and its gradients are scaled: what the guide says gives one process's numbers."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ulysses_attention as ua
from guide_training import (
    Model,
    gradient_norm,
    new_data,
    new_model,
    softmax_attention,
    step_of_the_guide,
)
from probes import assert_rows, attend, each_strategy, per_token, uniform
from ulysses_attention import _C


@each_strategy
def test_b59_each_value_gets_an_eighth_of_the_mean(strategy: str) -> None:
    """An extra factor of the context-parallel size made dV 2/8, or 1/16, where it is 1/8.

    Source: https://github.com/NVIDIA/Megatron-LM/issues/673
    """
    eighth = torch.full((1, 8, 4, 8), 1 / 8)  # the loss is the sum of all outputs, divided by 8 tokens
    assert_rows(attend(2, uniform(per_token(range(8))), eighth, strategy=strategy)["dv"], [1 / 8] * 8)


def test_b59_the_guide_says_who_reduces_and_by_what() -> None:
    (section,) = [part for part in _C.render_guide().split("\n## ") if part.startswith("Gradients")]
    assert "dq, dk and dv of the local tokens are complete when backward returns" in section
    assert "*Sum* them over the group" in section
    assert "`local_sum / S`" in section and "`local_sum * cp_size / S`" in section


# --- micro-batches ----------------------------------------------------------------------------------------------------

VALID = (3, 7)  # tokens of each micro-batch that have a label


def _micro_batches() -> list[torch.Tensor]:
    """tokens and labels [2, 1, 8] of each; −100 where there is no label."""
    data = new_data(8)
    batches = [data[:, index : index + 1].clone() for index in range(2)]
    for batch, valid in zip(batches, VALID, strict=True):
        batch[1, :, valid:] = -100
    return batches


def _accumulate(model: nn.Module, batches: list[torch.Tensor]) -> float:
    """The mean over all labels by the guide's rule: local_sum / S, backward for each; returns this rank's part."""
    parts = []
    for tokens, labels in batches:
        sums = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = sums / sum(VALID)
        loss.backward()
        parts.append(loss.item())
    return sum(parts)


def _accumulate_on_rank(rank: int, group: Any, strategy: str) -> tuple[float, float]:
    layout = ua.SequenceLayout(8, group.size(), ua.UlyssesContextParallelPolicy(pad_multiple=1))
    model = new_model(lambda q, k, v: ua.ulysses_attention(q, k, v, group, layout=layout, strategy=strategy))
    loss = _accumulate(model, [layout.shard(batch, rank, dim=2) for batch in _micro_batches()])
    for parameter in model.parameters():
        group.allreduce([parameter.grad]).wait()
    return loss, gradient_norm(model)


@pytest.mark.parametrize("world", [1, 2, 8])
@each_strategy
def test_b61_loss_and_gradient_norm_do_not_depend_on_the_degree(strategy: str, world: int) -> None:
    """Loss and gradient norm changed with the degree, 1, 2 or 8, under gradient accumulation of the same data.

    Source: https://github.com/verl-project/verl/issues/2857
    """
    alone = new_model(softmax_attention)
    loss = _accumulate(alone, _micro_batches())
    results = ua.run_ranks(lambda rank, group: _accumulate_on_rank(rank, group, strategy), world)
    assert abs(sum(part for part, _ in results) - loss) < 1e-5
    for _, norm in results:
        assert abs(norm - gradient_norm(alone)) < 1e-5


# --- a loss of the whole sequence -------------------------------------------------------------------------------------


def _loss_of_the_whole(model: Model, tokens: torch.Tensor, whole: Any) -> torch.Tensor:
    """No sum over tokens: the log-sum-exp over the sequence, class by class."""
    return whole(model(tokens)).logsumexp(1).square().sum()


@pytest.mark.parametrize("grad", ["sum", "slice"])
@pytest.mark.parametrize("world", [2, 3])
def test_b64_a_loss_of_the_whole_sequence_gives_the_gradient_norm_of_one_process(world: int, grad: str) -> None:
    """The wrapper averaged partial gradients that must be summed, and the norm was off by a factor of about three.

    Source: https://github.com/deepspeedai/DeepSpeed/issues/6841
    """
    tokens = new_data()[0]
    alone = new_model(softmax_attention)
    _loss_of_the_whole(alone, tokens, lambda logits: logits).backward()

    def on_rank(rank: int, group: Any) -> float:
        layout = ua.SequenceLayout(tokens.size(1), group.size())
        model = new_model(lambda q, k, v: ua.ulysses_attention(q, k, v, group, layout=layout))
        loss = _loss_of_the_whole(
            model, layout.shard(tokens, rank), lambda logits: layout.gather(logits, group, grad=grad)
        )
        # The same loss on every rank is one loss for "slice"; for "sum" each rank brings its share.
        (loss if grad == "slice" else loss / world).backward()
        for parameter in model.parameters():
            group.allreduce([parameter.grad]).wait()
        return gradient_norm(model)

    for norm in ua.run_ranks(on_rank, world):
        assert abs(norm / gradient_norm(alone) - 1.0) < 1e-5


@pytest.mark.parametrize("world", [2, 4])
def test_b64_the_guides_step_leaves_the_gradients_of_one_process(world: int) -> None:
    tokens, labels = new_data()
    alone = new_model(softmax_attention)
    cross_entropy(alone(tokens).flatten(0, 1), labels.flatten()).backward()

    def on_rank(rank: int, group: Any) -> float:
        layout = ua.SequenceLayout(tokens.size(1), group.size())
        model = new_model(lambda q, k, v: ua.ulysses_attention(q, k, v, group, layout=layout))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step_of_the_guide()(model, optimizer, tokens, labels, layout, group)
        return gradient_norm(model)

    for norm in ua.run_ranks(on_rank, world):
        assert abs(norm / gradient_norm(alone) - 1.0) < 1e-5


# --- ranks with few valid tokens --------------------------------------------------------------------------------------


class _LossesByToken(nn.Module):
    """Logits of two classes whose cross-entropy with class 0 is `losses[token]`. No parameters."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        other = [math.log(math.expm1(loss)) if loss > 0.0 else -math.inf for loss in losses]
        self.logits = torch.tensor([[0.0, max(x, -1e3)] for x in other], requires_grad=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits[tokens]


def test_b65_the_loss_is_the_mean_over_tokens_not_over_ranks() -> None:
    """The mean of per-rank means weighed a rank with one token like one with three: 3 came out where 1.5 is right.

    Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/1957
    """
    layout = ua.SequenceLayout.from_lengths([1, 3])
    tokens = torch.tensor([[0, 1, 1, 1]])  # losses 6 and 0, 0, 0
    optimizer = types.SimpleNamespace(zero_grad=lambda: None, step=lambda: None)

    def on_rank(rank: int, group: Any) -> float:
        step = step_of_the_guide()
        labels = torch.zeros_like(tokens)
        return step(_LossesByToken([6.0, 0.0]), optimizer, tokens, labels, layout, group).item()

    assert ua.run_ranks(on_rank, 2) == pytest.approx([6 / 4, 6 / 4], abs=1e-6)
