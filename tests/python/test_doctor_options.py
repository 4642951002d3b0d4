"""One case of the doctor, asked for in C++ and in Python: both ways say the same to the operation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ulysses_attention import _C, _request
from ulysses_attention.doctor import targets


class _Recorded(Exception):
    """Ends a call whose options are known."""


def _table(dtype: str = "float32") -> list[Any]:
    selection = _C.CaseSelection()
    selection.worlds, selection.dtypes, selection.strategies = [2, 4], [dtype], list(_C.known_strategies())
    return _C.make_cases(selection)


@pytest.fixture
def options_of_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[dict[str, Any]]]:
    """What each rank's call of ulysses_attention hands to the core for a case."""
    make_request = _request.make_request

    def record(**options: Any) -> None:
        raise _Recorded(make_request(**options))

    monkeypatch.setattr(_request, "make_request", record)
    attend = targets.as_target("ulysses")

    def asked(case: Any) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}

        def target(q: Any, k: Any, v: Any, group: Any, call: Any) -> Any:
            try:
                attend(q, k, v, group, call)
            except _Recorded as recorded:
                found[group.rank()] = _C.options_of_request(*recorded.args[0])
            raise NotImplementedError("head: recorded")

        _C.judge_case(_C.ThreadRanks(target), case)
        return [found[rank] for rank in sorted(found)]

    return asked


def test_both_ways_of_asking_say_the_same_over_the_whole_table(options_of_python: Any) -> None:
    compared = set()
    for case in _table():
        if case.order != "contiguous":
            continue  # SequenceLayout refuses it before there is a call
        wanted = _C.options_of(case)
        if len(set(case.text_lens)) == 1 and not case.mask:  # the same end everywhere: Python cuts the text there
            wanted.update(joint_len=case.text_lens[0], joint_valid_lens=[])
        asked = options_of_python(case)
        assert asked == [wanted] * case.cp_size, case.id()
        compared.add(case.feature)
    assert compared == set(_C.capabilities("ulysses")) - {"head_tail_order"}


#: Keywords of ulysses_attention of which the doctor's cases say nothing.
NOT_ASKED = {"cp_group", "cp_size", "policy", "outer", "dropout_seed", "kernel", "agreement"}


def test_every_keyword_of_the_call_is_asked_for_by_some_case() -> None:
    """An option that the doctor cannot ask for would be examined by nobody."""
    seen: set[str] = set()

    def look(q: Any, k: Any, v: Any, group: Any, call: Any) -> Any:
        if call.case.order == "contiguous":
            seen.update(targets.operation_keywords(call))
        raise NotImplementedError("head: looked")

    ranks = _C.ThreadRanks(look)
    ambiguous = _C.Case({"lengths": [4, 0], "padded_lengths": [4, 0], "kv_lengths": [4, 0], "mask": "key"})
    for case in [*_table(), ambiguous]:
        _C.judge_case(ranks, case)
    parameters = set(targets.ulysses_attention.__annotations__) - {"return", "q", "k", "v"}
    assert seen == parameters - NOT_ASKED


@pytest.mark.parametrize(
    ("fields", "keywords"),
    [
        ({"mask": "key"}, {"attn_mask"}),
        ({"mask": "full", "local_axis": "q"}, {"attn_mask", "mask_layout"}),
        ({"text_len": 3}, {"joint"}),
        ({"text_len": 3, "text_suffix": True, "text_lens": [1, 2]}, {"joint", "joint_position", "joint_valid_lens"}),
        ({"sinks": True, "softcap": 2.0}, {"sinks", "softcap"}),
        ({"return_lse": True, "lse_grad": True}, {"return_lse"}),
    ],
)
def test_a_function_is_asked_by_plain_keywords(fields: dict[str, Any], keywords: set[str]) -> None:
    case = _C.Case({"lengths": [4, 4], "padded_lengths": [4, 4], "kv_lengths": [4, 4], **fields})
    call = SimpleNamespace(case=case, mask=None, sinks=None, text=[None] * 3)
    asked = targets.keywords_of(call)
    assert set(asked) == keywords
    assert asked.get("mask_layout", ("local", "global")) == ("local", "global")
    assert asked.get("joint_valid_lens", (1, 2)) == (1, 2)


def test_the_axes_of_a_mask_are_named_to_every_rank_alike(options_of_python: Any) -> None:
    case = _C.Case({"lengths": [4, 1], "padded_lengths": [4, 1], "kv_lengths": [4, 1], "mask": "key_4d", "batch": 1})
    assert [options["mask_layout"] for options in options_of_python(case)] == [("broadcast", "global")] * 2


def test_the_text_goes_to_every_rank_whole() -> None:
    case = _C.Case({"lengths": [2, 2], "padded_lengths": [2, 2], "kv_lengths": [2, 2], "text_len": 3})
    texts: dict[int, list[Any]] = {}

    def look(q: Any, k: Any, v: Any, group: Any, call: Any) -> Any:
        texts[group.rank()] = call.text
        raise NotImplementedError("head: looked")

    _C.judge_case(_C.ThreadRanks(look), case)
    for of_0, of_1 in zip(texts[0], texts[1], strict=True):
        assert of_0.size(1) == 3 and of_0.equal(of_1) and of_0.data_ptr() != of_1.data_ptr()
