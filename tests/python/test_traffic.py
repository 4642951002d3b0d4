"""Bytes and collectives, counted from the buffers that a process group is handed, against the formula from sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import HEADS, STRATEGIES, UNEVEN
from ulysses_attention import _C
from ulysses_attention.launch import ProcessRanks

HEAD_DIM = 8
Count = tuple[int, int]  # collectives, bytes to other ranks


@dataclasses.dataclass(frozen=True)
class Call:
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    strategy: str
    kv_lengths: tuple[int, ...] | None = None  # None: those of q
    batch: int = 1
    dtype: torch.dtype = torch.float32
    padded: bool = False  # rows behind the tokens, which must not travel
    with_layout: bool = True

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.kv_lengths is None else self.kv_lengths

    def formula(self, direction: str, rank: int) -> Count:
        function = getattr(_C, f"{self.strategy}_{direction}_traffic")
        size = torch.empty(0, dtype=self.dtype).element_size()
        return function(self.lengths, self.key_lengths, self.batch, *self.heads, HEAD_DIM, size, rank)


def _count(recorder: Any) -> Count:
    records = recorder.records()
    recorder.clear()
    return len(records), sum(record.bytes_sent for record in records)


def record_call(rank: int, group: Any, call: Call) -> tuple[Count, Count]:
    """What this rank hands to its group in forward, and in backward."""
    recorder = _C.Recorder()
    recorded = _C.record_group(group, recorder)
    policy = ua.UlyssesContextParallelPolicy() if call.with_layout else UNEVEN
    if call.padded:
        layout = ua.SequenceLayout(sum(call.lengths), group.size())
        assert layout.lengths == call.lengths and layout.padded_lengths != call.lengths
        kv_layout = layout
    else:
        layout, kv_layout = (ua.SequenceLayout.from_lengths(x) for x in (call.lengths, call.key_lengths))
    rows, kv_rows = layout.padded_lengths[rank], kv_layout.padded_lengths[rank]
    (heads, kv_heads), keys = call.heads, (call.batch, kv_rows)
    leaves = [
        torch.ones(shape, dtype=call.dtype, requires_grad=True)
        for shape in [(call.batch, rows, heads, HEAD_DIM), (*keys, kv_heads, HEAD_DIM), (*keys, kv_heads, HEAD_DIM)]
    ]
    options: dict[str, Any] = {"layout": layout, "kv_layout": kv_layout} if call.with_layout else {}
    out = ua.ulysses_attention(*leaves, recorded, policy=policy, strategy=call.strategy, agreement="off", **options)
    forward = _count(recorder)
    torch.autograd.grad(out, leaves, torch.ones_like(out))  # type: ignore[arg-type]
    return forward, _count(recorder)


def record_calls(rank: int, group: Any, calls: Sequence[Call]) -> list[tuple[Count, Count]]:
    return [record_call(rank, group, call) for call in calls]


def _calls(strategy: str, world: int) -> list[Call]:
    """Even and uneven tokens, padding, empty shards; heads that divide or not, GQA, MQA, fewer heads than ranks."""
    even, uneven = (6,) * world, tuple(range(5, 5 + world))
    padded = ua.SequenceLayout(8 * world - 3, world).lengths
    empty = (0,) * (world - 1) + (5,)
    calls = [
        Call(lengths, heads, strategy, batch=batch)
        for lengths, heads, batch in itertools.product((even, uneven, empty), HEADS, (1, 2))
    ]
    calls += [Call(padded, heads, strategy, padded=True) for heads in HEADS]
    calls += [Call(uneven, (12, 3), strategy, dtype=dtype) for dtype in (torch.bfloat16, torch.float64)]
    calls += [Call(uneven, heads, strategy, kv_lengths=even) for heads in HEADS]
    return calls


def _assert_formula(calls: Sequence[Call], ranks: Sequence[Sequence[tuple[Count, Count]]]) -> None:
    for rank, counts in enumerate(ranks):
        for call, (forward, backward) in zip(calls, counts, strict=True):
            assert forward == call.formula("forward", rank), f"forward, rank {rank} of {len(ranks)}, {call}"
            assert backward == call.formula("backward", rank), f"backward, rank {rank} of {len(ranks)}, {call}"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_and_collectives_on_threads(world: int, strategy: str) -> None:
    calls = _calls(strategy, world)
    _assert_formula(calls, ua.run_ranks(lambda rank, group: record_calls(rank, group, calls), world))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_and_collectives_on_gloo(gloo: Callable[[int], ProcessRanks], world: int, strategy: str) -> None:
    calls = _calls(strategy, world)
    _assert_formula(calls, gloo(world).run(record_calls, calls))


def test_bytes_of_a_call_by_hand() -> None:
    """S = 2 + 3, H = 3 as 2 + 1, H_kv = 3, D = 8, float32: worked out here, not by the formula of the library."""
    head = 8 * 4
    rank_0, rank_1 = ua.run_ranks(lambda rank, group: record_call(rank, group, Call((2, 3), (3, 3), "ulysses")), 2)
    # Rank 0 sends 2 tokens of q, k, v of 1 head, and gives back 3 tokens of 2 heads; backward the other way round.
    assert rank_0 == ((2, (2 * 3 * 1 + 3 * 2) * head), (2, (2 * 1 + 3 * 3 * 2) * head))
    assert rank_1 == ((2, (3 * 3 * 2 + 2 * 1) * head), (2, (3 * 2 + 2 * 3 * 1) * head))
    call = Call((2, 3), (6, 2), "allgather_kv")
    rank_0, rank_1 = ua.run_ranks(lambda rank, group: record_call(rank, group, call), 2)
    # Forward the own k and v of both KV heads; backward the partial dk and dv of the other's tokens.
    assert rank_0 == ((1, 2 * 2 * 2 * head), (1, 3 * 2 * 2 * head))
    assert rank_1 == ((1, 3 * 2 * 2 * head), (1, 2 * 2 * 2 * head))


def _collectives(call: Call, world: int) -> set[tuple[int, int]]:
    ranks = ua.run_ranks(lambda rank, group: record_call(rank, group, call), world)
    return {(forward[0], backward[0]) for forward, backward in ranks}


def test_number_of_collectives() -> None:
    even, uneven = (4, 4, 4), (4, 5, 3)
    assert _collectives(Call(even, (6, 3), "ulysses"), 3) == {(2, 2)}
    assert _collectives(Call(uneven, (6, 3), "ulysses"), 3) == {(2, 2)}
    assert _collectives(Call(even, (6, 3), "allgather_kv"), 3) == {(1, 1)}
    assert _collectives(Call(even, (6, 3), "ulysses", kv_lengths=uneven), 3) == {(3, 3)}
    assert _collectives(Call(even, (6, 3), "allgather_kv", kv_lengths=uneven), 3) == {(1, 1)}
    assert _collectives(Call((12,), (6, 3), "ulysses"), 1) == {(0, 0)}
    # The uneven policy without a layout: one more in forward, which tells the lengths to everybody.
    assert _collectives(Call(uneven, (6, 3), "ulysses", with_layout=False), 3) == {(3, 2)}
    assert _collectives(Call(uneven, (6, 3), "allgather_kv", with_layout=False), 3) == {(2, 1)}


class SendsAgain(ua.UlyssesAttentionProcessor):
    """Ulysses for even tokens and heads, its exchange by hand and `times` over."""

    times = 1

    def exchange(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, group: Any) -> Any:
        (_, rows, _, head_dim), world = q.shape, group.size()
        packed = torch.cat([x.unflatten(2, (world, -1)).permute(2, 1, 0, 3, 4) for x in (q, k, v)], 3).contiguous()
        received = torch.empty_like(packed)  # [source, token, batch, q | k | v heads, D]
        for _ in range(self.times):
            group.alltoall_base(received, packed, [], []).wait()
        return received.view(world * rows, -1, packed.size(3), head_dim).transpose(0, 1).chunk(3, 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: ua.AttendCall) -> torch.Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)


class SendsTwice(SendsAgain):
    times = 2


@pytest.mark.parametrize(("backend", "equal"), [(SendsAgain, True), (SendsTwice, False)])
def test_a_doubled_send_is_counted(backend: type[SendsAgain], equal: bool) -> None:
    world, call = 2, Call((3, 3), (4, 4), "ulysses")
    processor = backend()
    x = torch.randn(1, 3, 4, HEAD_DIM)

    def count(rank: int, group: Any) -> Count:
        recorder = _C.Recorder()
        processor.forward(x + rank, x - rank, x * (rank + 1), _C.record_group(group, recorder), agreement="off")
        # What checks that K/V was global moves a few numbers besides, by all-gather.
        sends = [record for record in recorder.records() if record.name == "all_to_all"]
        return len(sends), sum(record.bytes_sent for record in sends)

    for rank, counted in enumerate(ua.run_ranks(count, world)):
        assert (counted == call.formula("forward", rank)) is equal
