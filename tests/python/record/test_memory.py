"""How much memory a call takes beside what goes in and comes out."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import ulysses_attention as ua
from ulysses_attention.launch import ProcessRanks

SEQ_LEN, HEADS, HEAD_DIM, WORLD = 4096, 8, 128, 4


def _peak(rank: int, group: Any, strategy: str) -> int:
    """The most bytes that one forward without gradients holds at a time, its output among them.

    The attention in the middle allocates nothing, so what remains is the exchange.
    """
    shape = (1, SEQ_LEN // group.size(), HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(3))

    def call() -> torch.Tensor:
        return ua.ulysses_attention(q, k, v, group, strategy=strategy, kernel=lambda q, k, v, call: q)

    with torch.no_grad():
        call()  # the first one compares the options and may start threads
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            out = call()
    assert out.shape == shape
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


def test_b105_ulysses_holds_one_send_and_one_receive_buffer(gloo: Callable[[int], ProcessRanks]) -> None:
    """Every received piece of K and V was kept, so that memory grew to all of them on each rank.

    Source: https://github.com/NVIDIA/TransformerEngine/pull/3411
    """
    shard = SEQ_LEN // WORLD * HEADS * HEAD_DIM * 2  # bytes of one rank's q, k, v or out
    to_heads, back = 3 * shard, shard  # q, k and v in one message, and out
    for peak in gloo(WORLD).run(_peak, "ulysses"):
        # Gloo's thread may let go of a buffer late, so a buffer of the first exchange may still be there in the second.
        assert 2 * to_heads <= peak <= 2 * to_heads + 2 * back + shard, peak / shard
    for peak in gloo(WORLD).run(_peak, "allgather_kv"):  # all of K and V, by its nature: the bound above would show it
        assert peak > 2 * WORLD * shard + shard, peak / shard
