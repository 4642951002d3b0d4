"""Ranks as threads of this process, for tests and notebooks."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ulysses_attention import _C

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["run_ranks"]


def run_ranks(fn: Callable[[int, ProcessGroup], Any], world: int, *, timeout_s: float = 20.0) -> list[Any]:
    """Run fn(rank, group) on `world` threads of this process and return the results in rank order.

    The group serves this library and the methods of ProcessGroup, on CPU tensors. torch.distributed's functions,
    DeviceMesh and torch.compile look groups up per process and need processes: see run_processes.
    The ranks share the caller's intra-op threads, at least one each.
    Units:  timeout_s, seconds that a rank waits for another.
    Errors: what the first failing rank raised; the others are unblocked. A wait beyond timeout_s: CP062.
    """
    ranks = _C.ThreadWorld(world, datetime.timedelta(seconds=timeout_s))
    results: list[Any] = [None] * world
    failures: list[BaseException] = []
    threads_before = torch.get_num_threads()
    threads_per_rank = max(1, threads_before // world)

    def work(rank: int) -> None:
        torch.set_num_threads(threads_per_rank)
        try:
            results[rank] = fn(rank, ranks.group(rank))
        except BaseException as error:
            failures.append(error)
            ranks.abort(rank, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(rank,), name=f"ulysses rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        ranks.abort(0, "KeyboardInterrupt")
        for thread in threads:
            thread.join()
        raise
    finally:
        torch.set_num_threads(threads_before)
    if failures:
        raise failures[0]
    return results
