"""Random calls across the whole capability table, by the doctor's path against float64; each cell is drawn by name.

Hypothesis draws, the doctor asks and judges, and what fails is shrunk and printed as one `ulysses repro` line.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from backend_cases import TESTS
from ulysses_attention import _C, SequenceLayout
from ulysses_attention.doctor import run
from ulysses_attention.doctor.run import case_line, ranks_of
from ulysses_attention.doctor.targets import strategies_of

Fields = dict[str, Any]
Draw = Callable[[Any], Any]
Cell = tuple[str, str]  # strategy, feature

OURS = "ulysses"
DRAWS = int(os.environ.get("ULYSSES_TEST_DRAWS", "300"))  # at most, over the whole table; more for a wider run
AT_LEAST = 3  # executed calls of each supported cell, forward and with backward; draws of each refused one
FEATURES = list(_C.capabilities("ulysses"))
SETTINGS = settings(
    derandomize=True,  # and a seed for each cell: the same draws in every run
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def _lengths(draw: Draw, ranks: int, least: int = 0) -> list[int]:
    lengths = draw(st.lists(st.integers(least, 6), min_size=ranks, max_size=ranks))
    return lengths if any(lengths) else [1, *lengths[1:]]


def _set_shards(draw: Draw, case: Fields, kind: str) -> None:
    ranks = case["cp_size"]
    if kind == "equal_shards":
        case["lengths"] = [draw(st.integers(1, 6))] * ranks
    elif kind == "padded_shards":
        layout = SequenceLayout(draw(st.integers(1, 8 * ranks - 1)), ranks)
        case["lengths"], case["padded_lengths"] = list(layout.lengths), list(layout.padded_lengths)
    else:
        case["lengths"] = _lengths(draw, ranks, least=int(kind == "uneven_shards"))
        if kind == "uneven_shards" and len(set(case["lengths"])) == 1:
            case["lengths"][0] += 1
        if kind == "empty_shards":
            case["lengths"][draw(st.integers(0, ranks - 1))] = 0
            case["lengths"] = case["lengths"] if any(case["lengths"]) else [*[0] * (ranks - 1), 3]
    case.setdefault("padded_lengths", case["lengths"])
    case["kv_lengths"] = case["lengths"]


def _set_heads(draw: Draw, case: Fields, feature: str) -> None:
    ranks = case["cp_size"]
    kv_heads, group = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    if feature == "grouped_kv":
        group = draw(st.integers(2, 3))
    elif feature == "fewer_kv_heads_than_ranks":
        kv_heads = draw(st.integers(1, ranks - 1))
    elif feature == "fewer_heads_than_ranks":
        kv_heads, group = draw(st.integers(1, ranks - 1)), 1
    elif feature == "uneven_heads" and kv_heads * group % ranks == 0:
        kv_heads, group = draw(st.integers(1, 2)) * ranks + 1, 1
    elif feature == "head_mask":
        group = max(group, 2)
    case["num_heads"], case["num_kv_heads"] = kv_heads * group, kv_heads
    case["head_dim"] = draw(st.sampled_from([8, 16, 4, 24]))
    case["value_head_dim"] = draw(st.sampled_from([case["head_dim"]] * 3 + [8, 20]))
    if feature == "value_head_dim" and case["value_head_dim"] == case["head_dim"]:
        case["value_head_dim"] += 4


#: What a row of the table asks for, beside shards and heads.
FORCED: dict[str, Callable[[Draw, Fields], Fields]] = {
    "is_causal": lambda draw, case: {"is_causal": True},
    "bottom_right_causal": lambda draw, case: {"is_causal": True, "bottom_right": True},
    "softmax_scale": lambda draw, case: {"softmax_scale": draw(st.sampled_from([0.3, 1.0, 0.05]))},
    "return_lse": lambda draw, case: {"return_lse": True},
    "cross_lengths": lambda draw, case: {"kv_lengths": [case["lengths"][0] + 1, *case["kv_lengths"][1:]]},
    "window": lambda draw, case: {"window": draw(st.integers(1, 4))},
    "attn_mask": lambda draw, case: {"mask": draw(st.sampled_from(["key", "key_4d"]))},
    "query_mask": lambda draw, case: {"mask": draw(st.sampled_from(["query", "full"]))},
    "head_mask": lambda draw, case: {"mask": draw(st.sampled_from(["head", "full"]))},
    "additive_mask": lambda draw, case: {"mask": _any_mask(draw), "additive_mask": True},
    "sharded_mask": lambda draw, case: draw(
        st.sampled_from([{"mask": "full", "local_axis": "q"}, {"mask": "key", "local_axis": "kv"}])
    ),
    "mask_gradient": lambda draw, case: {"mask": _any_mask(draw), "additive_mask": True, "mask_grad": True},
    "replicated_kv": lambda draw, case: {"replicated_kv": True},
    "joint_tokens": lambda draw, case: {"text_len": draw(st.integers(1, 5))},
    "joint_suffix": lambda draw, case: {"text_len": draw(st.integers(1, 5)), "text_suffix": True},
    "joint_valid_lens": lambda draw, case: {"batch": 2, "text_len": 4, "text_lens": [draw(st.integers(0, 2)), 3]},
    "packed_sequences": lambda draw, case: {"lengths": case["lengths"], "num_documents": 2},
    "dropout": lambda draw, case: {"dropout_p": 0.5},
    "qkv_format": lambda draw, case: {"qkv_format": draw(st.sampled_from(["bhsd", "sbhd"]))},
    "sinks": lambda draw, case: {"sinks": True},
    "softcap": lambda draw, case: {"softcap": draw(st.sampled_from([2.0, 0.5, 30.0]))},
    "lse_gradient": lambda draw, case: {"return_lse": True, "lse_grad": True, "grad_of": "qkv"},
    "hybrid_degree": lambda draw, case: {"ulysses_degree": 1},
    "head_tail_order": lambda draw, case: {"order": "head_tail"},
}
SHARDS = ("equal_shards", "uneven_shards", "empty_shards", "padded_shards")
SEVERAL_RANKS = {
    "uneven_shards",
    "empty_shards",
    "uneven_heads",
    "fewer_kv_heads_than_ranks",
    "fewer_heads_than_ranks",
    "sharded_mask",
}


def _any_mask(draw: Draw) -> str:
    return draw(st.sampled_from(["full", "key", "key_4d", "query", "head"]))


def _sometimes(draw: Draw, one_of: int = 3) -> bool:
    return draw(st.sampled_from([False] * (one_of - 1) + [True]))


def _set_options(draw: Draw, case: Fields) -> None:
    """Options that nobody asked for, each now and then."""
    case.update(
        is_causal=_sometimes(draw, 2),
        return_lse=_sometimes(draw, 2),
        strided=_sometimes(draw),
        sinks=_sometimes(draw),
        replicated_kv=_sometimes(draw, 4),
        qkv_format=draw(st.sampled_from(["bshd"] * 3 + ["bhsd", "sbhd"])),
        softcap=draw(st.sampled_from([0.0] * 2 + [2.0])),
        softmax_scale=draw(st.sampled_from([0.0] * 2 + [0.4])),
        grad_of=draw(st.sampled_from(["qkv"] * 4 + ["q", "k", "v", "qv"])),
    )
    case["lse_grad"] = case["return_lse"] and _sometimes(draw, 2)
    if _sometimes(draw):
        case["kv_lengths"] = _lengths(draw, case["cp_size"])
    if _sometimes(draw):
        case["text_len"], case["text_suffix"] = draw(st.integers(1, 5)), _sometimes(draw, 2)
        if _sometimes(draw, 2):
            case["text_lens"] = draw(
                st.lists(st.integers(0, case["text_len"]), min_size=case["batch"], max_size=case["batch"])
            )
    if _sometimes(draw, 2):
        case.update(mask=_any_mask(draw), additive_mask=_sometimes(draw, 2), blind_rows=_sometimes(draw))
        case["mask_grad"] = case["additive_mask"] and _sometimes(draw, 2)
        axes = ["kv", "q"] if case["mask"] in ("query", "full") else ["kv"]
        case["local_axis"] = draw(st.sampled_from(["", *axes]))


def _make_legal(case: Fields, asked: Fields) -> None:
    """Takes back what contradicts the rest, and of two contradictions the one that was not asked for."""
    if case.get("text_len") and case["replicated_kv"]:  # CP043
        case.update({"replicated_kv": False} if "text_len" in asked else {"text_len": 0})
    if case.get("text_lens") and len(case["text_lens"]) != case["batch"]:
        case["text_lens"] = []
    if not case.get("text_len"):
        case.update(text_suffix=False, text_lens=[])
    case["text_lens"] = [min(valid, case["text_len"]) for valid in case.get("text_lens", [])]
    if case.get("local_axis") and (case.get("text_len") or (case["replicated_kv"] and case["local_axis"] == "kv")):
        if "local_axis" in asked:
            case.update(text_len=0, text_suffix=False, text_lens=[], replicated_kv=False)
        else:
            case["local_axis"] = ""
    if case.get("local_axis") and case.get("mask_grad"):  # CP040
        case.update({"mask_grad": False} if "local_axis" in asked else {"local_axis": ""})
    if case.get("local_axis") == "q" and case["mask"] not in ("query", "full"):
        case["local_axis"] = ""
    if case.get("num_documents", 1) > 1:
        case.update(text_len=0, text_suffix=False, text_lens=[])
    if not any(case["kv_lengths"]):
        case["kv_lengths"] = [1, *case["kv_lengths"][1:]]
    case["num_documents"] = min(case.get("num_documents", 1), sum(case["lengths"]))


@st.composite
def cases(draw: Draw, strategy: str, feature: str) -> Any:
    """A legal call that uses a row of the capability table, and much else."""
    ranks = draw(st.integers(2 if feature in SEVERAL_RANKS else 1, 4))
    case: Fields = {"feature": feature, "strategy": strategy, "cp_size": ranks, "batch": draw(st.integers(1, 3))}
    case["dtype"] = draw(st.sampled_from(["float32", "float32", "float32", "float64", "bfloat16", "float16"]))
    kinds = SHARDS if ranks > 1 else ("equal_shards", "padded_shards")
    _set_shards(draw, case, feature if feature in SHARDS else draw(st.sampled_from(kinds)))
    _set_heads(draw, case, feature)
    _set_options(draw, case)
    asked = FORCED[feature](draw, case) if feature in FORCED else {}
    case.update(asked)
    if feature == "cross_lengths":
        case["replicated_kv"] = False
    if feature == "packed_sequences" and sum(case["lengths"]) < 2:
        case["lengths"] = case["padded_lengths"] = case["kv_lengths"] = [2] * ranks
    _make_legal(case, asked)
    case["backward"] = feature in FORCED or not _sometimes(draw)  # shards and heads come with every draw
    return _C.Case(case)


def check(ranks: Any, target: str | Callable[..., Any], case: Any) -> None:
    """Raises AssertionError with the line that asks again, unless the case is right or refused as the table says."""
    result = _C.judge_case(ranks, case)
    refused_by = _C.capabilities(case.strategy or OURS)[case.feature]
    if refused_by:
        as_wanted = result["verdict"] == "refused" and f"[{refused_by}]" in result["message"]
    else:
        as_wanted = result["verdict"] == "ok"
    if not as_wanted:
        line = case_line(target, "threads", result["fields"])
        raise AssertionError(f"{result['id']}: {result['verdict']} {result['message']}\n{line}")


def draw_cell(target: str | Callable[..., Any], strategy: str, feature: str, max_examples: int) -> int:
    """Checks so many draws of a cell, in an order of its own; how many it drew."""
    ranks, drawn = ranks_of(target, "threads"), 0

    @seed(f"{strategy} {feature}")
    @settings(SETTINGS, max_examples=max_examples)
    @given(case=cases(strategy, feature))
    def ask(case: Any) -> None:
        nonlocal drawn
        drawn += 1
        check(ranks, target, case)

    ask()
    return drawn


def draw_table(draws: int) -> dict[Cell, int]:
    """Checks at most so many draws, spread evenly over all cells; how many each cell got."""
    cells = [(strategy, feature) for strategy in strategies_of(OURS) for feature in FEATURES]
    return {cell: draw_cell(OURS, *cell, max_examples=draws // len(cells)) for cell in cells}


def too_few(drawn: dict[Cell, int], executed: dict[Cell, tuple[int, int]]) -> list[str]:
    """The cells that were executed, or refused, less often than AT_LEAST, each with its counts."""
    lines = []
    for (strategy, feature), times in drawn.items():
        forward, backward = executed.get((strategy, feature), (0, 0))
        if _C.capabilities(strategy)[feature]:  # check() has seen each draw refused by its id
            assert forward == 0, (strategy, feature)
            short = times < AT_LEAST
        else:
            short = min(forward, backward) < AT_LEAST
        if short:
            lines.append(f"{strategy} {feature}: drawn {times}, executed {forward}, with backward {backward}")
    return lines


@pytest.fixture
def executed() -> Iterator[Callable[[], dict[Cell, tuple[int, int]]]]:
    """What our operation has executed in this test, counted at its entry: cell -> (calls, calls that train)."""
    _C.record_executed(True)
    yield _C.executed
    _C.record_executed(False)


def test_every_supported_cell_is_executed_and_right_and_every_other_is_refused(executed: Any) -> None:
    drawn = draw_table(DRAWS)
    assert sum(drawn.values()) <= DRAWS
    short = too_few(drawn, executed())
    assert not short, "\n".join([f"{DRAWS} draws leave cells with fewer than {AT_LEAST}:", *short])


def test_a_cell_with_too_few_draws_is_named(executed: Any) -> None:
    drawn = draw_table(len(strategies_of(OURS)) * len(FEATURES))  # one each, the simplest call that has the feature
    assert set(drawn.values()) == {1}
    short = too_few(drawn, executed())
    assert "ulysses window: drawn 1, executed 0, with backward 0" in short
    assert "allgather_kv sinks: drawn 1, executed 1, with backward 1" in short
    assert not [line for line in short if " equal_shards:" in line]  # which every one of them has


def test_a_cell_that_is_only_named_is_not_executed(executed: Any) -> None:
    ranks = ranks_of(OURS, "threads")
    case = _C.Case({"strategy": "ulysses", "lengths": [4, 4], "padded_lengths": [4, 4], "kv_lengths": [4, 4]})
    check(ranks, OURS, case)
    assert executed()["ulysses", "equal_shards"] == (1, 1)
    refused = _C.Case({**case.fields(), "feature": "window", "window": 2, "softcap": 2.0})
    check(ranks, OURS, refused)
    assert ("ulysses", "softcap") not in executed() and ("ulysses", "window") not in executed()


#: A wrong backend, the row in which it is found, and what is left of the case: nothing that its fault does not need.
FAULTS = {
    "mask_as_bias": ("attn_mask", {"batch": 1, "cp_size": 1}),
    "sinks_on_rank_0": ("sinks", {"batch": 1, "cp_size": 2, "is_causal": False}),
    "text_counted_per_rank": ("joint_tokens", {"batch": 1, "cp_size": 2, "text_len": 1}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_shrunk_and_asked_again_by_its_line(name: str) -> None:
    feature, wanted = FAULTS[name]
    target = f"{TESTS / 'mutants' / name}.py:attention"
    with pytest.raises(AssertionError) as failure:
        draw_cell(target, "", feature, max_examples=50)
    line = str(failure.value).splitlines()[1]
    assert line.startswith("ulysses repro ")
    (text,) = shlex.split(line)[2:]
    case = _C.Case(json.loads(text)["case"])
    assert {name: getattr(case, name) for name in wanted} == wanted
    assert sum(case.lengths) + sum(case.kv_lengths) <= 6
    ((result, finding), *_) = run.reproduce(text)
    assert result["verdict"] == "wrong" and finding is not None
