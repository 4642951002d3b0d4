"""Ranks as processes: results, failures, timeouts, reuse, nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ulysses_attention.launch import ProcessRanks, RankError, post


def _sum_of_ranks(rank: int, group: Any, scale: float) -> tuple[int, float, int]:
    x = torch.tensor([scale * rank])
    dist.all_reduce(x, group=group)
    return rank, float(x), torch.get_num_threads()


def _fail_on(rank: int, group: Any, bad: int) -> None:
    if rank == bad:
        raise KeyError("the reason")
    dist.barrier(group)  # never completes: the failing rank does not come


def _die_on(rank: int, group: Any, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier(group)


def _fail_in_turn(rank: int, group: Any) -> None:
    time.sleep(rank)
    raise KeyError(f"reason {rank}")


def _sleep(rank: int, group: Any) -> None:
    time.sleep(60 if rank == 1 else 0)


def _pid(rank: int, group: Any) -> int:
    return os.getpid()


def _post_rank(rank: int, group: Any) -> None:
    post({"rank": rank})


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_rank_order_and_a_world_is_reused(gloo: Any) -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert gloo(4).run(_sum_of_ranks, 2.0) == [(rank, 12.0, threads) for rank in range(4)]
    assert gloo(4).run(_pid) == gloo(4).run(_pid)


def test_posted_values_arrive(gloo: Any) -> None:
    got: list[Any] = []
    gloo(2).run(_post_rank, on_post=lambda rank, value: got.append((rank, value)))
    assert sorted(got, key=lambda item: item[0]) == [(0, {"rank": 0}), (1, {"rank": 1})]


def test_a_failing_rank_ends_the_others_and_the_world_restarts() -> None:
    with ProcessRanks(2) as ranks:
        pids = ranks.run(_pid)
        assert ranks.pids == tuple(pids)
        start = time.monotonic()
        with pytest.raises(RankError, match=r"(?s)rank 1 failed.*_fail_on.*the reason") as caught:
            ranks.run(_fail_on, 1)
        assert caught.value.rank == 1 and time.monotonic() - start < 5
        assert not any(_is_running(pid) for pid in pids) and ranks.pids == ()
        with pytest.raises(RankError, match="exit code 7"):  # also a restart
            ranks.run(_die_on, 0)
        with pytest.raises(RankError, match=r"rank 0 failed \(ranks \[1\] failed too\)") as late:
            ranks.run(_fail_in_turn, grace_s=10.0)
        assert "reason 1" in late.value.reports[1]
        with pytest.raises(TimeoutError, match=r"no answer from ranks \[1\] within 1"):
            ranks.run(_sleep, timeout_s=1.0)
        pids = ranks.run(_pid)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 failed:\nthe process ended"):
            while True:  # the signal takes a moment
                ranks.run(_pid)
    assert not any(_is_running(pid) for pid in pids)


def test_a_world_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="world=0"):
        ProcessRanks(0)


@pytest.mark.multi_gpu(2)
def test_multi_gpu_mark_gives_ranks_on_any_machine(ranks: Any) -> None:
    assert ranks().world == 2 and len(ranks().run(_pid)) == 2
