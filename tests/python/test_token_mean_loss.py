"""token_mean_loss, total_tokens and loss_scale: one mean over the tokens of all ranks, however they are spread."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from ulysses_attention import _C

SUMS, COUNTS = (6.0, 0.0, 1.0), (1, 0, 3)  # one rank with no token, and one with most


def _value_and_grad(rank: int, group: Any, **options: Any) -> tuple[torch.Tensor, float]:
    loss_sum = torch.tensor(SUMS[rank], requires_grad=True)
    loss = ua.token_mean_loss(loss_sum, torch.tensor(COUNTS[rank]), group, **options)
    loss.backward()
    return loss.detach(), loss_sum.grad.item()


def test_every_rank_gets_the_mean_over_all_tokens_and_its_own_share_of_the_gradient() -> None:
    """7 over 4 tokens. The mean of the ranks' means would be (6 + 1/3) / 2 or, with the empty rank, NaN."""
    for loss, grad in ua.run_ranks(_value_and_grad, 3):
        assert loss.shape == () and loss.item() == 7 / 4 and grad == 1 / 4


def test_a_wrapper_that_averages_is_made_up_for_in_the_gradient_alone() -> None:
    for loss, grad in ua.run_ranks(lambda rank, group: _value_and_grad(rank, group, averaged_over=3), 3):
        assert loss.item() == 7 / 4 and grad == 3 / 4


def test_a_total_known_beforehand_makes_micro_batches_add_up() -> None:
    def on_rank(rank: int, group: Any) -> tuple[int, list[tuple[torch.Tensor, float]]]:
        total = ua.total_tokens(2 * COUNTS[rank], group)
        return total, [_value_and_grad(rank, group, total=total) for _ in range(2)]

    for total, parts in ua.run_ranks(on_rank, 3):
        assert total == 8
        assert sum(loss.item() for loss, _ in parts) == 14 / 8 and [grad for _, grad in parts] == [1 / 8] * 2


def test_a_micro_batch_without_tokens_is_zero_where_the_total_is_known() -> None:
    def on_rank(rank: int, group: Any) -> float:
        return ua.token_mean_loss(torch.zeros((), requires_grad=True), 0, group, total=4).item()

    assert ua.run_ranks(on_rank, 2) == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_loss_is_float32_at_least_and_has_the_same_bits_on_every_rank(dtype: torch.dtype) -> None:
    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum = torch.tensor([0.1 * (rank + 1)], dtype=dtype, requires_grad=True)
        loss = ua.token_mean_loss(loss_sum, 3, group)
        loss.backward()
        return loss.detach(), loss_sum.grad

    results = ua.run_ranks(on_rank, 4)
    wanted = sum(torch.tensor(0.1 * (rank + 1), dtype=dtype).double() for rank in range(4)) / 12
    for loss, grad in results:
        assert loss.dtype == torch.promote_types(dtype, torch.float32) and torch.equal(loss, wanted.to(loss.dtype))
        assert grad.dtype == dtype and abs(grad.double().item() - 1 / 12) < 1e-3


def test_it_takes_one_collective_and_backward_none() -> None:
    def on_rank(rank: int, group: Any) -> int:
        recorder = _C.Recorder()
        recorded = _C.record_group(group, recorder)
        ua.token_mean_loss(torch.ones((), requires_grad=True), 2, recorded).backward()
        return len(recorder.records())

    assert ua.run_ranks(on_rank, 2) == [1, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_on_one_rank_is_not_finite_on_all(bad: float) -> None:
    def on_rank(rank: int, group: Any) -> float:
        return ua.token_mean_loss(torch.tensor(bad if rank == 1 else 1.0), 2, group).item()

    assert [str(value) for value in ua.run_ranks(on_rank, 3)] == [str(bad)] * 3


def _errors(call: Any, world: int = 3) -> list[str]:
    def on_rank(rank: int, group: Any) -> str:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call(rank, group)
        assert ua.token_mean_loss(torch.tensor(2.0), 1, group).item() == 2.0  # the group is usable
        return str(raised.value)

    return ua.run_ranks(on_rank, world)


@pytest.mark.parametrize(
    ("loss_sum", "count", "options", "text"),
    [
        (torch.ones(2), 1, {}, 'on rank 1: loss_sum is not one number. Fix: reduction="sum". [CP069]'),
        (1.5, 1, {}, "on rank 1: loss_sum is not one number"),
        (torch.ones(()), -1, {}, "on rank 1: token_count is not a count. Fix: (targets != -100).sum(). [CP069]"),
        (torch.ones(()), 0.5, {}, "on rank 1: token_count is not a count"),
        (torch.ones(()), torch.ones(3), {}, "on rank 1: token_count is not a count"),
        (torch.ones(()), 1, {"total": 0}, "on rank 1: total, averaged_over = 0, 1. Fix: total=None or total_tokens("),
        (torch.ones(()), 1, {"total": -1}, "on rank 1: total, averaged_over = 0, 1. Fix: total=None or total_tokens("),
        (torch.ones(()), 1, {"total": 6.5}, "on rank 1: total, averaged_over = 0, 1. Fix: total=None or total_tokens("),
        (torch.ones(()), float("inf"), {}, "on rank 1: token_count is not a count"),
        (torch.ones(()), 1, {"averaged_over": float("nan")}, "on rank 1: total, averaged_over = None, 0. Fix: "),
        (torch.ones(()), 1, {"averaged_over": 0}, "on rank 1: total, averaged_over = None, 0. Fix: "),
        (torch.ones(()), 1, {"total": 7}, "rank 0 has total, averaged_over = None, 1 and rank 1 7, 1. Fix: the same"),
        (torch.ones(()), 1, {"averaged_over": 2}, "= None, 1 and rank 1 None, 2. Fix: the same on every rank"),
    ],
)
def test_cp069_cp060_what_one_rank_does_wrong_is_refused_on_all(
    loss_sum: Any, count: Any, options: dict[str, int], text: str
) -> None:
    def call(rank: int, group: Any) -> None:
        if rank == 1:
            ua.token_mean_loss(loss_sum, count, group, **options)
        else:
            ua.token_mean_loss(torch.ones(()), 1, group)

    errors = _errors(call)
    assert len(set(errors)) == 1 and text in errors[0], errors[0]
    assert ("[CP060]" if "the same" in text else "[CP069]") in errors[0]


def test_cp069_a_total_below_what_one_call_counts() -> None:
    """The total of one rank, or of another micro-batch."""
    for error in _errors(lambda rank, group: ua.token_mean_loss(torch.ones(()), 4, group, total=11)):
        assert "total=11, and the ranks count 12 tokens in this call alone. Fix: total=total_tokens(" in error


def test_cp069_no_token_on_any_rank() -> None:
    for error in _errors(lambda rank, group: ua.token_mean_loss(torch.zeros(()), 0, group)):
        assert "no rank has a token to average over. Fix: leave this batch out on every rank" in error


def test_cp069_a_wrong_count_of_one_rank_is_refused_by_total_tokens_on_all() -> None:
    for error in _errors(lambda rank, group: ua.total_tokens(-1 if rank == 2 else 1, group)):
        assert error.startswith("[total_tokens] on rank 2: token_count is not a count")


# --- loss_scale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("exact", [False, True])
def test_scaled_local_means_add_up_to_the_mean(world: int, exact: bool) -> None:
    policy = ua.UlyssesContextParallelPolicy(require_seq_divisible=not exact, pad_multiple=1)
    layout, losses = ua.SequenceLayout(19, world, policy), torch.arange(19.0)[None] ** 2
    parts = []
    for rank in range(world):
        own = layout.shard(losses, rank)[:, : layout.lengths[rank]]
        parts.append(own.mean().item() * ua.loss_scale(layout, rank))
        assert ua.loss_scale(layout, rank, averaged_over=5) == pytest.approx(5 * ua.loss_scale(layout, rank))
    assert sum(parts) == pytest.approx(losses.mean().item(), rel=1e-6)


def test_a_rank_without_tokens_has_scale_0() -> None:
    layout = ua.SequenceLayout.from_lengths([3, 0])
    assert [ua.loss_scale(layout, rank) for rank in range(2)] == [1.0, 0.0]


def test_cp015_cp069_a_rank_or_a_size_that_is_none() -> None:
    layout = ua.SequenceLayout.from_lengths([3, 1])
    with pytest.raises(ValueError, match=r"rank=2 of cp_size=2. Fix: 0 to 1. \[CP015\]"):
        ua.loss_scale(layout, 2)
    with pytest.raises(ValueError, match=r"averaged_over=0. Fix: 1, .*\[CP069\]"):
        ua.loss_scale(layout, 0, averaged_over=0)
    with pytest.raises(ValueError, match=r"averaged_over=nan. Fix: 1, .*\[CP069\]"):
        ua.loss_scale(layout, 0, averaged_over=float("nan"))  # type: ignore[arg-type]
