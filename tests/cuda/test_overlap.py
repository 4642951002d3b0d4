"""Calls beside other work of the GPU, with no synchronisation in between: bit for bit the numbers of a quiet one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ulysses_attention import SequenceLayout, ulysses_attention
from ulysses_attention.launch import run_processes

REPEATS = 200


def differing_repeats(rank: int, group: Any, strategy: str) -> int:
    """How many of REPEATS calls differ from the first, while a second stream keeps the device and its memory busy."""
    layout = SequenceLayout(1025, group.size())
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 1025, 8, 64, generator=generator).bfloat16() for _ in range(3)]
    shards = [layout.shard(x, rank).cuda() for x in whole]
    quiet = ulysses_attention(*shards, group, layout=layout, strategy=strategy)
    busy, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    inputs = [torch.empty_like(x) for x in shards]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        with torch.cuda.stream(stream):
            busy = (busy @ busy).tanh()
        for into, shard in zip(inputs, shards, strict=True):
            into.fill_(math.nan)  # what a send that does not wait for the copy would carry
            into.copy_(shard)
        out = ulysses_attention(*inputs, group, layout=layout, strategy=strategy)
        differing += (out != quiet).any()
    return int(differing)


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
def test_calls_beside_other_work_are_equal_bit_for_bit(strategy: str) -> None:
    """Video on two GPUs showed horizontal lines, fewer when the exchange was forced to be synchronous."""
    world = torch.cuda.device_count()
    assert run_processes(differing_repeats, world, strategy, backend="nccl") == [0] * world
