"""Ranks that disagree: every rank gets an error that names rank, field and both values, and the group stays usable."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oracle import max_error, oracle
from refusals import arguments, assert_text
from ulysses_attention import SequenceLayout, UlyssesContextParallelPolicy, run_ranks, ulysses_attention

SECONDS = 5.0
WAYS = ["threads", "gloo", "gloo-always"]
_heads = itertools.count(16)  # a new number of heads is a new signature, so that Gloo's first use is a first use


def _layout(lengths: list[int]) -> SequenceLayout:
    return SequenceLayout.from_lengths(lengths)


# What the odd rank does differently: its options, the field in the message, its value and that of the others.
DIFFERENCES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "heads": ({"more_heads": 8}, "num_heads", "+8", "+0"),
    "dtype": ({"dtype": torch.float64}, "dtype", "float64", "float32"),
    "is_causal": ({"is_causal": True}, "is_causal", "True", "False"),
    "softmax_scale": ({"softmax_scale": 0.5}, "softmax_scale", "0.5", "None"),
    "layout": ({"layout": True}, "layout", "lengths [", "None"),
    "requires_grad": ({"trains": "k"}, "requires_grad", "k", "none"),
    "strategy": ({"strategy": "allgather_kv"}, "strategy", "allgather_kv", "ulysses"),
    "return_lse": ({"return_lse": True}, "return_lse", "True", "False"),
    "policy": ({"pad_multiple": 4}, "policy.pad_multiple", "4", "8"),
}


def _options(difference: str, heads: int, world: int) -> dict[str, Any]:
    options = dict(DIFFERENCES[difference][0])
    options["heads"] = heads + options.pop("more_heads", 0)
    if options.pop("layout", False):
        options["layout"] = _layout([8] * world)
    trains = options.pop("trains", "")
    return options | {name: lambda x: x.requires_grad_() for name in trains}


def _disagree(rank: int, group: Any, difference: str, heads: int, agreement: str) -> tuple[str, float, float]:
    """(message, seconds it took, error of a right call afterwards); the last rank is the odd one."""
    world = group.size()
    options = _options(difference, heads, world) if rank == world - 1 else {"heads": heads}
    start = time.monotonic()
    message = ""
    try:
        ulysses_attention(cp_group=group, agreement=agreement, **arguments(**options))
    except RuntimeError as error:
        message = str(error)
    seconds = time.monotonic() - start
    return message, seconds, _right_call(rank, group, heads)


def _right_call(rank: int, group: Any, heads: int = 4) -> float:
    generator = torch.Generator().manual_seed(heads)
    inputs = [torch.randn(1, 8 * group.size(), heads, 8, generator=generator) for _ in range(3)]
    rows = slice(8 * rank, 8 * rank + 8)
    return max_error(ulysses_attention(*(x[:, rows] for x in inputs), group), oracle(*inputs)[0][:, rows])


def _run(way: str, gloo: Any, world: int, fn: Any, *args: Any) -> list[Any]:
    """fn(rank, group, *args) on thread ranks or on Gloo processes."""
    if way == "threads":
        return run_ranks(lambda rank, group: fn(rank, group, *args), world, timeout_s=SECONDS)
    return gloo(world).run(fn, *args, timeout_s=30.0)


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_cp060_names_rank_field_and_both_values(way: str, world: int, difference: str, gloo: Any) -> None:
    heads = next(_heads)
    agreement = "always" if way == "gloo-always" else "auto"
    _, field, odd, usual = DIFFERENCES[difference]
    if difference == "heads":
        odd, usual = str(heads + 8), str(heads)
    for message, seconds, error_after in _run(way, gloo, world, _disagree, difference, heads, agreement):
        assert_text(message, "CP060", f"ranks disagree on {field}: ", f"rank 0 has {usual}")
        assert f"rank {world - 1} has {odd}" in message and f"the same {field} on every rank" in message
        assert seconds < SECONDS and error_after < 1e-5


def _later_difference(rank: int, group: Any) -> tuple[float, str, float]:
    before = _right_call(rank, group)
    try:
        options = {"is_causal": True} if rank == 1 else {}
        ulysses_attention(cp_group=group, agreement="always", **arguments(**options))
        message = ""
    except RuntimeError as error:
        message = str(error)
    return before, message, _right_call(rank, group)


@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_always_sees_a_rank_that_leaves_an_agreed_signature(way: str, gloo: Any) -> None:
    for before, message, after in _run(way, gloo, 2, _later_difference):
        assert before < 1e-5 and after < 1e-5
        assert_text(message, "CP060", "is_causal", "rank 0 has False", "rank 1 has True")


def _count_collectives(rank: int, group: Any, agreement: str, calls: int) -> list[int]:
    from ulysses_attention import _C

    recorder = _C.Recorder()
    recorded = _C.record_group(group, recorder)
    counts = []
    for _ in range(calls):
        recorder.clear()
        ulysses_attention(cp_group=recorded, agreement=agreement, **arguments(heads=14))
        counts.append(len(recorder.records()))
    return counts


def test_how_often_each_word_compares(gloo: Any) -> None:
    # Two collectives move the data. "always" adds one before, of the options, and one behind attend(), of how it ended.
    for word, counts in (("auto", [3, 2, 2]), ("always", [4, 4, 4]), ("off", [2, 2, 2])):
        assert gloo(2).run(_count_collectives, word, 3) == [counts, counts], word


def _count_under_environment(rank: int, group: Any) -> list[int]:
    os.environ["ULYSSES_AGREEMENT"] = "always"
    try:
        return _count_collectives(rank, group, "auto", 3)
    finally:
        del os.environ["ULYSSES_AGREEMENT"]


def test_the_environment_turns_auto_into_always(gloo: Any) -> None:
    assert gloo(2).run(_count_under_environment) == [[4, 4, 4]] * 2


def test_off_is_right_on_a_legal_call_and_refuses_a_bad_one() -> None:
    def on_rank(rank: int, group: Any) -> tuple[float, str]:
        inputs = [torch.randn(1, 16, 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        rows = slice(8 * rank, 8 * rank + 8)
        out = ulysses_attention(*(x[:, rows] for x in inputs), group, agreement="off")
        error = max_error(out, oracle(*inputs)[0][:, rows])
        try:
            ulysses_attention(cp_group=group, agreement="off", strategy="x", **arguments())
        except ValueError as refused:
            return error, str(refused)
        return error, ""

    for error, message in run_ranks(on_rank, 2):
        assert error < 1e-5
        assert_text(message, "CP030")


# --- lengths, failing ranks, groups ---------------------------------------------------------------------------------


def _unequal(rank: int, group: Any, lengths: list[int], heads: int) -> tuple[str, float]:
    try:
        ulysses_attention(cp_group=group, **arguments(rows=lengths[rank], heads=heads))
    except RuntimeError as error:
        return str(error), _right_call(rank, group)
    return "", 0.0


@pytest.mark.parametrize("lengths", [[8, 7], [8, 8, 8, 5], [751, 750, 750, 749]])
@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_cp013_lists_all_lengths_on_every_rank(way: str, lengths: list[int], gloo: Any) -> None:
    for message, after in _run(way, gloo, len(lengths), _unequal, lengths, next(_heads)):
        assert_text(message, "CP013", str(lengths), f"layout=SequenceLayout.from_lengths({lengths})")
        assert after < 1e-5


def _one_is_wrong(rank: int, group: Any, heads: int) -> tuple[str, str, float]:
    options: dict[str, Any] = {"softmax_scale": float("nan")} if rank == 1 else {}
    try:
        ulysses_attention(cp_group=group, **arguments(heads=heads, **options))
    except Exception as error:
        return type(error).__name__, str(error), _right_call(rank, group)
    return "", "", 0.0


@pytest.mark.parametrize("way", ["threads", "gloo"])
@pytest.mark.parametrize("world", [2, 4])
def test_one_rank_that_is_refused_stops_every_rank_and_is_named(way: str, world: int, gloo: Any) -> None:
    for rank, (name, message, after) in enumerate(_run(way, gloo, world, _one_is_wrong, next(_heads))):
        assert name == "ValueError", (rank, message)
        assert_text(message, "CP025", "softmax_scale=nan", "rank 1", f"rank {rank} of cp_size {world}")
        assert after < 1e-5


def _wrong_mesh_dimension(rank: int, group: Any) -> tuple[str, str, float, str]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    layout = SequenceLayout(16, 2, cp_rank=mesh["cp"].get_local_rank())
    call = arguments()
    try:
        ulysses_attention(cp_group=mesh["dp"], layout=layout, **call)
        wrong = ""
    except ValueError as error:
        wrong = str(error)
    try:
        ulysses_attention(cp_group=mesh, layout=layout, **call)
        two_d = ""
    except NotImplementedError as error:
        two_d = str(error)
    cp = mesh["cp"].get_group()
    right = ulysses_attention(cp_group=mesh["cp"], layout=layout, **call)
    same = ulysses_attention(cp_group=cp, layout=layout, **call)
    whole = [layout.gather(call[name], cp, grad="slice") for name in "qkv"]
    expected = layout.shard(oracle(*whole)[0].float(), cp.rank())
    dist.barrier()
    return wrong, two_d, max_error(right, expected), str(max_error(right, same))


def test_cp015_a_mesh_with_the_data_parallel_dimension_passed(gloo: Any) -> None:
    results = gloo(4).run(_wrong_mesh_dimension, timeout_s=60.0)
    for rank, (wrong, two_d, error, difference) in enumerate(results):
        # Of each data-parallel pair one process has the wrong cp_rank; both ranks learn of it.
        pair = f"layout.cp_rank={rank % 2} but the caller is rank {1 - rank % 2} of the group, cp_size=2"
        assert_text(wrong, "CP015", pair, f"(rank {rank // 2} of cp_size 2)")
        assert f"rank {1 - rank % 2}" in wrong
        assert_text(two_d, "CP047", "hybrid_degree", "1-D group")
        assert error < 1e-5 and difference == "0.0"


def _lengths_change(rank: int, group: Any) -> list[float]:
    errors = []
    for seq_len in (30, 31, 30, 7):
        inputs = [torch.randn(1, seq_len, 4, 8, generator=torch.Generator().manual_seed(seq_len)) for _ in range(3)]
        layout = SequenceLayout(seq_len, group.size(), UlyssesContextParallelPolicy(require_seq_divisible=False))
        shards = [layout.shard(x, rank) for x in inputs]
        expected = layout.shard(oracle(*inputs)[0].float(), rank)
        policy = UlyssesContextParallelPolicy(require_seq_divisible=False)
        errors.append(max_error(ulysses_attention(*shards, group, policy=policy), expected))
        errors.append(max_error(ulysses_attention(*shards, group, layout=layout), expected))
    return errors


def test_lengths_that_change_from_call_to_call_need_no_agreement(gloo: Any) -> None:
    for errors in gloo(4).run(_lengths_change):
        assert max(errors) < 1e-5
