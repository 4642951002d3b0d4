"""Time of one all-to-all over Gloo and over shared memory, in turns: trust the ratio, not the microseconds.

Usage: python bench/transports.py [ranks]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ulysses_attention import run_processes

BACKENDS = ("gloo", "ulysses_shm")
SIZES = {64: 50, 1 << 20: 20, 16 << 20: 3}  # bytes a rank sends: calls in one turn
TURNS = 15


def _turn(group: Any, size: int, calls: int) -> float:
    """Microseconds a call."""
    sent = torch.zeros(size // 4 // group.size() * group.size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_to_all_single(received, sent, group=group)
    return (time.perf_counter() - start) / calls * 1e6


def measure(rank: int, world: Any) -> list[tuple[int, list[float]]]:
    """(bytes, median microseconds of each backend)"""
    groups = [dist.new_group(backend=backend) for backend in BACKENDS]
    found = []
    for size, calls in SIZES.items():
        turns = [[_turn(group, size, calls) for group in groups] for _ in range(TURNS)]
        found.append((size, [statistics.median(times) for times in zip(*turns, strict=True)]))
    return found


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(f"{ranks} ranks, torch {torch.__version__}; bytes, {' us, '.join(BACKENDS)} us, ratio")
    for size, (gloo, shm) in run_processes(measure, ranks)[0]:
        print(f"{size:9d} {gloo:10.1f} {shm:10.1f} {gloo / shm:8.1f}")
