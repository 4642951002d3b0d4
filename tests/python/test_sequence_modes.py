"""The three sequence modes, lengths that change from call to call, padding rows, and shards of a layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES, UNEVEN, Cell, assert_right, run_cells
from oracle import max_error, oracle, tolerance
from ulysses_attention.launch import ProcessRanks

WORLD = 4
PAD = ua.UlyssesContextParallelPolicy()
STRICT = PAD.replace(auto_pad=False)


@functools.lru_cache(maxsize=2)
def _whole(seq_len: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """One head of size 8: q, k, v and the float64 output."""
    generator = torch.Generator().manual_seed(seq_len)
    qkv = tuple(torch.randn(1, seq_len, 1, 8, generator=generator) for _ in range(3))
    return qkv, oracle(*qkv)[0]


def _forward(policy: ua.UlyssesContextParallelPolicy, seq_len: int, with_layout: bool, strategy: str) -> torch.Tensor:
    """The ranks' outputs side by side, padding left out."""
    qkv, _ = _whole(seq_len)
    layout = ua.SequenceLayout(seq_len, WORLD, policy if with_layout else UNEVEN)

    def attend(rank: int, group: Any) -> torch.Tensor:
        local = [layout.shard(x, rank) for x in qkv]
        given = layout if with_layout else None
        out = ua.ulysses_attention(*local, group, policy=policy, layout=given, strategy=strategy)
        assert isinstance(out, torch.Tensor) and out.size(1) == layout.padded_lengths[rank]
        return out[:, : layout.lengths[rank]]

    return torch.cat(ua.run_ranks(attend, WORLD), 1)


@pytest.mark.parametrize("seq_len", [3000, 32760])  # 4 · 750 and 4 · 8190: 4 divides them, 4 · 8 does not
@pytest.mark.parametrize(
    ("policy", "with_layout", "strategy"),
    [
        pytest.param(PAD, True, "ulysses", id="pad-layout"),
        pytest.param(PAD, False, "allgather_kv", id="pad-alone"),
        pytest.param(UNEVEN, True, "allgather_kv", id="uneven-layout"),
        pytest.param(UNEVEN, False, "ulysses", id="uneven-alone"),
    ],
)
def test_pad_and_uneven_give_the_numbers_of_one_process(
    seq_len: int, policy: ua.UlyssesContextParallelPolicy, with_layout: bool, strategy: str
) -> None:
    _, reference = _whole(seq_len)
    error = max_error(_forward(policy, seq_len, with_layout, strategy), reference)
    assert error <= tolerance(torch.float32, reference)


def test_pad_makes_equal_shards_and_uneven_exact_ones() -> None:
    for seq_len, rows in ((3000, 752), (32760, 8192)):
        padded, exact = ua.SequenceLayout(seq_len, WORLD), ua.SequenceLayout(seq_len, WORLD, UNEVEN)
        assert padded.padded_lengths == (rows,) * WORLD
        assert exact.lengths == exact.padded_lengths == (seq_len // WORLD,) * WORLD
        assert sum(padded.lengths) == sum(exact.lengths) == seq_len


@pytest.mark.parametrize(("seq_len", "legal", "rows"), [(3000, 3008, 750), (32760, 32768, 8190)])
def test_strict_refuses_with_cp011_and_a_length_that_works(seq_len: int, legal: int, rows: int) -> None:
    with pytest.raises(ValueError, match=rf"seq_len={seq_len} .*pad to {legal} .*\[CP011\]"):
        ua.SequenceLayout(seq_len, WORLD, STRICT)
    with pytest.raises(ValueError, match=rf"{rows}.*\[CP011\]"):  # without a layout, by the local rows
        _forward(STRICT, seq_len, False, "ulysses")
    assert ua.SequenceLayout(legal, WORLD, STRICT).lengths == (legal // WORLD,) * WORLD


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("with_layout", [True, False])
def test_strict_runs_what_divides(strategy: str, with_layout: bool) -> None:
    _, reference = _whole(3008)
    error = max_error(_forward(STRICT, 3008, with_layout, strategy), reference)
    assert error <= tolerance(torch.float32, reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["padded", "uneven", "exchanged"])
def test_lengths_that_change_from_call_to_call(gloo: Callable[[int], ProcessRanks], layout: str, strategy: str) -> None:
    cells = [Cell(seq_len, (2, 1), strategy, layout=layout) for seq_len in (3000, 3001, 3000, 7)]
    assert_right(cells, gloo(WORLD).run(run_cells, cells))


def _attend_with_loud_padding(rank: int, group: Any, seq_len: int, strategy: str) -> tuple[torch.Tensor, ...]:
    layout = ua.SequenceLayout(seq_len, group.size())
    real = layout.lengths[rank]
    q = torch.zeros(1, layout.padded_lengths[rank], 2, 8)  # every key of a token has the same weight
    v = torch.ones_like(q)
    v[:, real:] = 1e9
    leaves = [x.requires_grad_() for x in (q, v.clone(), v)]
    out = ua.ulysses_attention(*leaves, group, layout=layout, strategy=strategy)
    assert isinstance(out, torch.Tensor)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return (out.detach(), *grads)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seq_len", [3, 33])
def test_padding_rows_take_no_weight_and_come_back_zero(
    gloo: Callable[[int], ProcessRanks], seq_len: int, strategy: str
) -> None:
    layout = ua.SequenceLayout(seq_len, WORLD)
    assert sum(layout.padded_lengths) > seq_len
    for rank, (out, dq, dk, dv) in enumerate(gloo(WORLD).run(_attend_with_loud_padding, seq_len, strategy)):
        real = layout.lengths[rank]
        assert torch.allclose(out[:, :real], torch.ones(1, real, 2, 8), atol=1e-6)  # the mean of ones
        assert torch.allclose(dv[:, :real], torch.ones(1, real, 2, 8), atol=1e-6)  # seq_len queries at 1 / seq_len
        assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4  # equal values: no key is better than another
        for x in (out, dq, dk, dv):
            assert x.size(1) == layout.padded_lengths[rank] and torch.all(x[:, real:] == 0)


LAYOUTS = [
    ua.SequenceLayout(13, WORLD),
    ua.SequenceLayout(13, WORLD, UNEVEN),
    ua.SequenceLayout(3, WORLD),
    ua.SequenceLayout.from_lengths([0, 6, 0, 1]),
]


def _round_trip(rank: int, group: Any, layout: ua.SequenceLayout, dim: int) -> dict[str, torch.Tensor]:
    shape = [2, 3, 4]
    shape[dim] = layout.seq_len
    x = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
    numbers = {}
    for grad in ("sum", "slice"):
        local = layout.shard(x, rank, dim).detach().requires_grad_()
        gathered = layout.gather(local, group, dim, grad=grad)  # type: ignore[arg-type]
        numbers[f"gathered_{grad}"] = gathered.detach()
        (numbers[grad],) = torch.autograd.grad((gathered * (x.detach() + rank)).sum(), local)
    shard = layout.shard(x, rank, dim)
    (numbers["shard"],) = torch.autograd.grad(shard, x, torch.ones_like(shard))
    return numbers


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.padded_lengths))
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_shard_and_gather_and_their_gradients(
    gloo: Callable[[int], ProcessRanks], layout: ua.SequenceLayout, dim: int
) -> None:
    shape = [2, 3, 4]
    shape[dim] = layout.seq_len
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    begin = 0
    for rank, got in enumerate(gloo(WORLD).run(_round_trip, layout, dim)):
        length, rows = layout.lengths[rank], layout.padded_lengths[rank]
        assert layout.positions(rank) == (*range(begin, begin + length), *(-1,) * (rows - length))
        assert torch.equal(got["gathered_sum"], x) and torch.equal(got["gathered_slice"], x)
        own = x.narrow(dim, begin, length)
        # Rank r weighs the gathered sequence with x + r: the sum over the ranks, and this rank's own.
        for name, wanted in (("sum", WORLD * own + sum(range(WORLD))), ("slice", own + rank)):
            assert torch.equal(got[name].narrow(dim, 0, length), wanted), name
            assert got[name].size(dim) == rows and torch.all(got[name].narrow(dim, length, rows - length) == 0)
        inside = torch.zeros(shape)
        inside.narrow(dim, begin, length).fill_(1.0)
        assert torch.equal(got["shard"], inside)
        begin += length


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.int64, 0.5), (torch.int64, float("nan")), (torch.uint8, -100), (torch.int8, 128), (torch.bool, 2)],
)
def test_cp012_a_fill_that_the_dtype_cannot_hold_is_refused_on_every_rank(dtype: torch.dtype, fill: float) -> None:
    layout = ua.SequenceLayout(5, 2, policy=PAD)
    for rank in range(2):
        with pytest.raises(ValueError, match=rf"fill={fill} is no value of {dtype}.*\[CP012\]"):
            layout.shard(torch.zeros(1, 5, dtype=dtype), rank, fill=fill)


def test_a_fill_stands_behind_the_rows_of_a_padded_shard() -> None:
    layout = ua.SequenceLayout(5, 2, policy=PAD)  # 8 rows on each of the ranks
    assert layout.shard(torch.arange(5)[None], 0, fill=-100).tolist() == [[0, 1, 2, 3, 4, -100, -100, -100]]
    assert layout.shard(torch.arange(5)[None], 1, fill=-100).tolist() == [[-100] * 8]
    assert layout.shard(torch.ones(1, 5, dtype=torch.bool), 0, fill=0).sum() == 5
    assert layout.shard(torch.zeros(1, 5), 0, fill=float("-inf"))[0, 5:].tolist() == [float("-inf")] * 3
