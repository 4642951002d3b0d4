"""Training on four ranks follows one process: the same losses at every step, the same parameters at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from oracle import one_thread
from training_cases import (
    causal_attention,
    dropout_of,
    layouts_of,
    loss_of_one_process,
    new_batch,
    new_decoder,
    own_sum_and_count,
    sharded_attention,
    whole_dropout,
)
from ulysses_attention.launch import ProcessRanks

SEQ_LEN, BATCH, STEPS, WORLD, DROPOUT = 27, 2, 50, 4, 0.1
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=3e-3),
}


@functools.cache
def _alone(optimizer: str) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """Losses, and the parameters before and after."""
    model = new_decoder(causal_attention, whole_dropout(SEQ_LEN), p=DROPOUT)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    update, losses = OPTIMIZERS[optimizer](model.parameters()), []
    with one_thread():
        for step in range(STEPS):
            loss = loss_of_one_process(model, *new_batch(SEQ_LEN, BATCH, step), seed=(7, step))
            update.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            losses.append(loss.item())
    return losses, before, [parameter.detach() for parameter in model.parameters()]


def train_on_rank(rank: int, group: Any, optimizer: str, policy: str) -> tuple[list[float], list[torch.Tensor]]:
    layout = layouts_of(SEQ_LEN, group.size())[policy]
    model = new_decoder(sharded_attention(group, layout), dropout_of(layout, rank), p=DROPOUT)
    update, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(STEPS):
        batch = new_batch(SEQ_LEN, BATCH, step)
        loss = ua.token_mean_loss(*own_sum_and_count(model, batch, layout, rank, seed=(7, step)), group)
        update.zero_grad()
        loss.backward()
        ua.sum_gradients(model.parameters(), group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def _assert_follows(ranks: list[Any], optimizer: str) -> None:
    losses, before, after = _alone(optimizer)
    assert losses[-1] < losses[0] - 0.3  # it learns
    for got, parameters in ranks:
        assert max(abs(a - b) for a, b in zip(got, losses, strict=True)) < 1e-4
        assert got == ranks[0][0]  # one value on every rank, bit for bit
        for mine, same, wanted, start in zip(parameters, ranks[0][1], after, before, strict=True):
            assert torch.equal(mine, same)
            if optimizer == "sgd":  # AdamW turns rounding into steps where a gradient is nearly 0
                assert (mine - wanted).abs().max() < 1e-4 < (wanted - start).abs().max()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["padded", "uneven"])
def test_fifty_steps_on_four_ranks_follow_one_process(policy: str, optimizer: str) -> None:
    layout = layouts_of(SEQ_LEN, WORLD)[policy]
    assert (layout.padded_lengths != layout.lengths) == (policy == "padded") and len(set(layout.lengths)) > 1
    ranks = ua.run_ranks(lambda rank, group: train_on_rank(rank, group, optimizer, policy), WORLD)
    _assert_follows(ranks, optimizer)


def test_fifty_steps_on_four_processes_follow_one_process(gloo: Callable[[int], ProcessRanks]) -> None:
    _assert_follows(gloo(WORLD).run(train_on_rank, "sgd", "uneven"), "sgd")
