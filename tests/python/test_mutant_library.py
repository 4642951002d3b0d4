"""The library of backends: every right one is right, and every mutant is wrong exactly where its fault shows."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
import pickle
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from backend_cases import MUTANTS as ALL_MUTANTS
from backend_cases import RIGHT, Case, function_of, load, problems, run_case, takes, wrong_numbers
from mutants.parts import Steps, attention_of
from oracle import Numbers
from ulysses_attention.launch import ProcessRanks

#: Those of plain attention; the faults of masks, joint tokens and the like are told by the doctor, in test_mutants.py.
MUTANTS = [path for path in ALL_MUTANTS if "option_parts" not in path.read_text()]

CASES = {
    "plain": Case((5, 5), batch=2),
    "four": Case((2, 2, 2, 2), heads=(4, 4)),
    "causal": Case((2, 2, 2, 2), heads=(4, 2), batch=2, is_causal=True, return_lse=True),
    "uneven": Case((5, 3), heads=(3, 3), softmax_scale=0.3),
    "torn": Case((3, 3, 2, 1), heads=(6, 3), is_causal=True, softmax_scale=0.7),
    "padded": Case((4, 3), heads=(4, 1), return_lse=True, padded=4),
    "cross": Case((3, 3), (5, 4), heads=(2, 1), is_causal=True),
    "bottom_right": Case((3, 3), (5, 4), is_causal=True, causal_alignment="bottom_right"),
    "apart": Case((5, 0), (0, 7), return_lse=True),
    "on_rank_0": Case((6, 0), is_causal=True, return_lse=True),
    "some_empty": Case((2, 0, 1, 0)),
    "large": Case((4, 4), q_factor=60.0),
    "bfloat16": Case((4, 4), dtype=torch.bfloat16),
    "float16": Case((4, 4), dtype=torch.float16, is_causal=True),
    "float64": Case((3, 4), heads=(2, 1), dtype=torch.float64, is_causal=True, return_lse=True),
    "strided": Case((4, 4), head_major=True),
    "twice": Case((4, 4), calls=2),
    "one_head": Case((1, 1), heads=(1, 1)),
    "one_rank": Case((6,), heads=(4, 2), is_causal=True),
    "scaled": Case((3, 3), heads=(4, 2), softmax_scale=0.25, trains=False),
}
REFUSED = {  # what a right backend refuses at the call, and a word of its reason
    "four_all_to_alls": {"uneven": "3 heads", "torn": "6 heads", "one_head": "1 heads", "some_empty": "2 heads"},
    "backend_einsum": {"bottom_right": "causal_alignment"},
    "backend_all_fields": {"bottom_right": "causal_alignment"},
    "backend_sdpa": {
        "bottom_right": "causal_alignment",
        **dict.fromkeys(("causal", "padded", "apart", "on_rank_0", "float64"), "need_lse"),
    },
}
INSIDE = ("torn", "cross", "float16")  # causal queries that begin inside the sequence, where K/V is gathered


@dataclasses.dataclass(frozen=True)
class Fault:
    """Where a mutant is wrong, and the tensors that may be: None for all of them, also for an error."""

    shows: Callable[[Case], bool]
    tensors: frozenset[str] | None = None


def _several_hold_keys(case: Case) -> bool:
    return sum(n > 0 for n in case.kv_tokens) > 1 or case.kv_tokens[0] < sum(case.kv_tokens)


def _several_ask(case: Case) -> bool:
    return sum(n > 0 for n in case.lengths) > 1


def _several_ask_or_apart(case: Case) -> bool:
    return _several_ask(case) or case.kv_tokens != case.lengths


def _kv_differ(case: Case) -> bool:
    return 1 < case.heads[1] < case.heads[0]


def _surplus_is_hidden(case: Case) -> bool:
    """Rows that stand for tokens of the last rank lie behind the last token: no causal query sees them."""
    return case.is_causal and case.world == 2 and case.kv_tokens[0] > case.kv_tokens[1]


GRADS, DKDV = frozenset({"dq", "dk", "dv"}), frozenset({"dk", "dv"})
FAULTS = {
    "local_kv": Fault(_several_hold_keys),
    "local_v": Fault(_several_hold_keys),
    "restored_along_the_sequence": Fault(lambda case: case.world > 1 and case.heads[0] % case.world == 0),
    "heads_and_sequence_swapped": Fault(lambda case: case.heads[0] > 1),
    "scale_is_one_over_d": Fault(lambda case: case.softmax_scale is None),
    "softmax_scale_ignored": Fault(lambda case: case.softmax_scale is not None),
    "ranks_reversed": Fault(_several_ask),
    "rank_0_rows_everywhere": Fault(_several_ask),
    "shard_counted_twice": Fault(
        lambda case: case.kv_tokens[0] > 0 and (case.world > 1 or case.return_lse or not case.is_causal)
    ),
    "own_shard_left_out": Fault(lambda case: any(n and m for n, m in zip(case.lengths, case.kv_tokens, strict=True))),
    "tail_token_dropped": Fault(lambda case: case is not CASES["cross"]),  # there no query sees the last key
    "padding_takes_weight": Fault(lambda case: case.padded > 0),
    "causal_by_local_position": Fault(lambda case: case.is_causal and _several_ask(case)),
    "is_causal_ignored": Fault(lambda case: case.is_causal),
    "causal_from_the_end": Fault(lambda case: case is CASES["cross"]),
    "causal_without_itself": Fault(lambda case: case.is_causal),
    "causal_with_the_next": Fault(lambda case: case.is_causal),
    "nan_in_the_first_row": Fault(lambda case: case.is_causal, frozenset({"out"})),
    "kv_heads_interleaved": Fault(_kv_differ),
    "torn_group_reads_its_neighbour": Fault(lambda case: _kv_differ(case) and case.world == 4),
    "lse_in_base_2": Fault(lambda case: case.return_lse, frozenset({"lse"})),
    "lse_of_the_own_keys": Fault(lambda case: case.return_lse and _several_hold_keys(case), frozenset({"lse"})),
    "softmax_without_max": Fault(lambda case: case.q_factor > 1),
    "computes_in_bfloat16": Fault(lambda case: case.dtype == torch.float32),
    "dkdv_not_reduced": Fault(lambda case: case.trains and _several_ask_or_apart(case), DKDV),
    "dkdv_reduced_twice": Fault(lambda case: case.trains and case.world > 1, DKDV),
    "dkdv_averaged": Fault(lambda case: case.trains and case.world > 1, DKDV),
    "dkdv_of_rank_0": Fault(lambda case: case.trains and _several_ask(case), DKDV),
    "dq_none": Fault(lambda case: case.trains, frozenset({"dq"})),
    "dq_zero": Fault(lambda case: case.trains, frozenset({"dq"})),
    "backward_without_the_mask": Fault(lambda case: case.trains and case.is_causal, GRADS),
    "backward_with_the_default_scale": Fault(lambda case: case.trains and case.softmax_scale is not None, GRADS),
    "gradients_times_cp_size": Fault(lambda case: case.trains and case.world > 1, GRADS),
    "detached_output": Fault(lambda case: case.trains, GRADS),
    "float32_for_16_bit": Fault(lambda case: case.dtype.itemsize == 2, frozenset({"out"})),
    "float64_for_float32": Fault(lambda case: case.dtype == torch.float32, frozenset({"out"})),
    "writes_to_k": Fault(lambda case: True, frozenset({"k"})),
    "stale_buffer": Fault(lambda case: case.calls > 1),
    "second_call_scales_twice": Fault(lambda case: case.calls > 1),
    "batches_mixed": Fault(lambda case: case.batch > 1),
    "batches_flipped": Fault(lambda case: case.batch > 1),
    "heads_rotated": Fault(lambda case: case.heads[0] > 1),
    "reads_storage_order": Fault(lambda case: case.head_major),
    "pairs_of_ranks": Fault(lambda case: case.world == 4),
    "two_ranks_only": Fault(lambda case: case.world == 4),
    "equal_lengths_assumed": Fault(lambda case: len(set(case.kv_tokens)) > 1 and not _surplus_is_hidden(case)),
    "one_rank_raises": Fault(lambda case: case.world > 1),
    "one_rank_refuses_uneven_heads": Fault(lambda case: case.heads[0] % case.world != 0),
    "unclear_error": Fault(lambda case: case.heads[0] % case.world != 0),
    "waits_forever": Fault(lambda case: case.world > 1 and sum(case.lengths) % 2 == 1),
}
NEVER_RIGHT = {"writes_to_k"}
STOP = {"one_rank_raises", "one_rank_refuses_uneven_heads", "unclear_error", "waits_forever"}  # no numbers


def _by_name(paths: Sequence[pathlib.Path]) -> dict[str, pathlib.Path]:
    return {path.stem: path for path in paths}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_library_is_complete() -> None:
    backends = {path.stem for path in MUTANTS if path.stem.startswith("backend_")}
    assert {path.stem for path in MUTANTS} == set(FAULTS) | backends
    assert len(MUTANTS) >= 36 and len(backends) == 3 and len(RIGHT) >= 12
    for path in (*ALL_MUTANTS, *RIGHT):
        module = load(path)
        assert module.__doc__, path
        if not hasattr(module, "Backend"):
            kinds = {parameter.kind for parameter in inspect.signature(module.attention).parameters.values()}
            assert inspect.isfunction(module.attention) and inspect.Parameter.VAR_KEYWORD not in kinds, path


@pytest.mark.parametrize("folder", ["mutants", "right_backends"])
def test_a_function_can_be_sent_to_a_process_by_name(folder: str) -> None:
    for path in ALL_MUTANTS if folder == "mutants" else RIGHT:
        module = importlib.import_module(f"{folder}.{path.stem}")
        thing = getattr(module, "attention", None) or module.Backend
        assert pickle.loads(pickle.dumps(thing)) is thing


def test_the_steps_that_mutants_share_are_right() -> None:
    attention = attention_of(Steps)
    assert {name: found for name, case in CASES.items() if (found := problems(attention, case))} == {}


@pytest.mark.parametrize("name", _by_name(RIGHT))
def test_a_right_backend_is_right_in_whatever_it_takes(name: str) -> None:
    module = load(_by_name(RIGHT)[name])
    served = set()
    for strategy in ("ulysses", "allgather_kv") if hasattr(module, "Backend") else ("",):
        attention, refused = function_of(module, strategy), dict(REFUSED.get(name, {}))
        if name == "backend_sdpa" and strategy == "allgather_kv":
            refused.update(dict.fromkeys(INSIDE, "q_positions"))
        for case_name, case in CASES.items():
            if not takes(attention, case):
                continue
            found = problems(attention, case)
            if case_name not in refused:
                assert found == [], (case_name, strategy)
                served.add(case_name)
            else:
                allowed = ("ValueError", "NotImplementedError", "TypeError")
                words = {refused[case_name], "q_positions"} if strategy == "allgather_kv" else {refused[case_name]}
                assert found[0].startswith(allowed) and any(word in found[0] for word in words), (case_name, found)
    assert len(served) >= 6, served


def _until_the_others_give_up(module: Any) -> Callable[..., Any]:
    """The module's attention, whose endless wait ends as soon as another rank has raised."""
    raised = threading.Event()
    module.threading = types.SimpleNamespace(Event=lambda: raised)

    def attention(*args: Any, **options: Any) -> Any:
        try:
            return module.attention(*args, **options)
        except BaseException:
            raised.set()
            raise

    return attention


@pytest.mark.parametrize("name", FAULTS)
def test_a_mutant_is_wrong_where_its_fault_shows_and_right_elsewhere(name: str) -> None:
    fault = FAULTS[name]
    shown = {case_name for case_name, case in CASES.items() if fault.shows(case)}
    wrong = set()
    for case_name, case in CASES.items():
        module = load(_by_name(MUTANTS)[name])  # afresh: some keep state
        waits = name == "waits_forever" and fault.shows(case)
        attention = _until_the_others_give_up(module) if waits else module.attention
        found = problems(attention, case, timeout_s=0.1 if waits else 20.0)
        if found:
            wrong.add(case_name)
            tensors = {finding.split()[0] for finding in found}
            assert fault.tensors is None or tensors <= fault.tensors, (case_name, found)
    assert wrong == shown
    assert wrong and (wrong != set(CASES) or name in NEVER_RIGHT)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("backend_attends_to_own_positions", ("plain", "ulysses"), ("plain", "allgather_kv")),
        ("backend_exchanges_nothing", None, ("plain", "allgather_kv")),
        ("backend_scales_by_one_over_d", ("scaled", "ulysses"), ("four", "ulysses")),
    ],
)
def test_a_mutant_of_the_base_class(name: str, right: tuple[str, str] | None, wrong: tuple[str, str]) -> None:
    module = load(_by_name(MUTANTS)[name])
    if right is not None:
        assert problems(function_of(module, right[1]), CASES[right[0]]) == []
    found = problems(function_of(module, wrong[1]), CASES[wrong[0]])
    expected = "ValueError: [kv_global_gathered]" if name == "backend_exchanges_nothing" else "out is off by"
    assert found and found[0].startswith(expected)


def _on_gloo(rank: int, group: Any, work: Sequence[tuple[pathlib.Path, Case]]) -> list[list[Numbers]]:
    return [run_case(rank, group, function_of(load(path)), case) for path, case in work]


def test_processes_find_the_same(gloo: Callable[[int], ProcessRanks]) -> None:
    work, expected = [], []
    for path in (*RIGHT, *MUTANTS):
        for name in ("plain", "uneven", "padded"):
            fault = FAULTS.get(path.stem)
            refused = name in REFUSED.get(path.stem, {}) or path.stem in STOP or (path in MUTANTS and fault is None)
            if not refused and takes(function_of(load(path)), CASES[name]):
                work.append((path, CASES[name]))
                expected.append((path.stem, name, fault is not None and fault.shows(CASES[name])))
    answers = gloo(2).run(_on_gloo, work)
    got = []
    for index, ((path, case), (_, name, _)) in enumerate(zip(work, expected, strict=True)):
        got.append((path.stem, name, wrong_numbers(case, [rank[index] for rank in answers]) != []))
    assert got == expected
