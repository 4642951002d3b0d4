"""run_ranks: ranks as threads of this process."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from refusals import assert_text
from ulysses_attention import run_ranks


def _all_reduce(group: Any, value: float) -> float:
    x = torch.tensor([value])
    group.allreduce([x]).wait()
    return float(x)


def test_results_come_in_rank_order_whoever_finishes_first() -> None:
    def on_rank(rank: int, group: Any) -> tuple[int, int, float]:
        total = _all_reduce(group, float(rank))
        time.sleep(0.02 * (3 - rank))
        return rank, group.size(), total

    assert run_ranks(on_rank, 4) == [(rank, 4, 6.0) for rank in range(4)]


def test_a_world_of_one() -> None:
    assert run_ranks(lambda rank, group: (rank, group.size(), _all_reduce(group, 5.0)), 1) == [(0, 1, 5.0)]


def test_the_first_failure_is_raised_and_the_others_are_unblocked() -> None:
    seen: dict[int, str] = {}

    def on_rank(rank: int, group: Any) -> None:
        if rank == 2:
            raise KeyError("the reason")
        try:
            _all_reduce(group, 1.0)
        except RuntimeError as error:
            seen[rank] = str(error)
            raise

    start = time.monotonic()
    with pytest.raises(KeyError, match="the reason"):
        run_ranks(on_rank, 4)
    assert time.monotonic() - start < 5 and sorted(seen) == [0, 1, 3]
    for text in seen.values():
        assert_text(text, "CP062", "rank 2", "KeyError", "the reason")


def test_a_rank_that_never_comes_is_a_timeout() -> None:
    done = threading.Event()

    def on_rank(rank: int, group: Any) -> None:
        if rank == 0:
            try:
                _all_reduce(group, 1.0)
            finally:
                done.set()
        else:
            done.wait(10)

    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        run_ranks(on_rank, 2, timeout_s=0.3)
    assert time.monotonic() - start < 5
    assert_text(str(caught.value), "CP062", "rank 1")


def test_different_collectives_are_named() -> None:
    def on_rank(rank: int, group: Any) -> None:
        if rank == 0:
            _all_reduce(group, 1.0)
        else:
            group.barrier().wait()

    with pytest.raises(RuntimeError) as caught:
        run_ranks(on_rank, 2, timeout_s=5.0)
    assert_text(str(caught.value), "CP062", "barrier")


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_count_is_restored(fails: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        counts: list[int] = []

        def on_rank(rank: int, group: Any) -> None:
            counts.append(torch.get_num_threads())
            if fails:
                raise ValueError("x")

        if fails:
            with pytest.raises(ValueError, match="x"):
                run_ranks(on_rank, 64)
        else:
            run_ranks(on_rank, 64)
        later: list[int] = []  # a thread that starts now takes the process's count
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 3 and later == [3]
        assert set(counts) == {1}
        counts.clear()
        fails = False
        run_ranks(on_rank, 1)
        assert counts == [3]  # the caller's, whatever the number of cores
    finally:
        torch.set_num_threads(before)


def test_no_thread_is_left_behind_and_worlds_are_independent() -> None:
    before = threading.active_count()
    for world in (2, 3, 2):
        assert run_ranks(lambda rank, group: _all_reduce(group, 1.0), world) == [float(world)] * world
    assert threading.active_count() == before


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_needs_a_rank(world: int) -> None:
    with pytest.raises(ValueError) as caught:
        run_ranks(lambda rank, group: None, world)
    assert_text(str(caught.value), "CP006", f"world_size={world}")


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError) as caught:
        run_ranks(lambda rank, group: None, 2, timeout_s=0.0)
    assert_text(str(caught.value), "CP062", "timeout=0 ms")
