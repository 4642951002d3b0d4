"""The doctor as tests of a backend author's own suite, one pytest item per case and per probe:
test_my_backend = ulysses_conformance(MyProcessor).
"""

from __future__ import annotations

import atexit
import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from ulysses_attention import _C
from ulysses_attention.doctor import stuck
from ulysses_attention.doctor.run import TRANSPORTS, case_line, ranks_of, release, select
from ulysses_attention.doctor.summary import SEVERITY
from ulysses_pytest import ITEM, matches

__all__ = ["ulysses_conformance"]

TestFunction = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Probe:
    name: str
    strategy: str
    cp_size: int

    @property
    def id(self) -> str:
        return "/".join(filter(None, ("probe", self.name, self.strategy, f"W{self.cp_size}")))


@dataclasses.dataclass(frozen=True)
class Item:
    """What one test asks."""

    id: str
    asked: Any  # a case of the doctor, or a Probe


@dataclasses.dataclass
class Answer:
    id: str
    verdict: str
    message: str
    finding: dict[str, Any] | None
    again: str  # the shell line that asks this alone


class Examination:
    """The ranks of one target: started by the first question, ended by close(), started again if need be."""

    def __init__(self, target: str | Callable[..., Any], transport: str) -> None:
        self._target = target
        self._transport = transport
        self._ranks: Any = None
        self._probed: dict[tuple[str, int], dict[str, Any]] = {}

    @property
    def is_closed(self) -> bool:
        return self._ranks is None

    def close(self, session: pytest.Session) -> None:
        """A target that hung on threads still has them when pytest has said all: then the process leaves as it is."""
        if release(self._ranks):
            atexit.register(lambda: stuck.leave(int(session.exitstatus)))
        self._ranks = None

    def ask(self, item: Item, node_id: str) -> Answer:
        if self._ranks is None:
            self._ranks = ranks_of(self._target, self._transport)
        if isinstance(item.asked, Probe):
            return self._probe(item.asked, f"pytest {shlex.quote(node_id)}")
        examined = _C.examine_case(self._ranks, item.asked)  # its forward too, where backward is refused
        result, finding = min(examined, key=lambda pair: SEVERITY.index(pair[0]["verdict"]))
        again = case_line(self._target, self._transport, result["fields"])
        return Answer(result["id"], result["verdict"], result["message"], finding, again)

    def _probe(self, probe: Probe, again: str) -> Answer:
        """All probes of a strategy and a number of ranks run together, because a fault shows in several of them."""
        key = (probe.strategy, probe.cp_size)
        if key not in self._probed:
            selection = _C.CaseSelection()
            selection.strategies, selection.worlds, selection.dtypes = [probe.strategy], [probe.cp_size], []
            self._probed[key] = _C.examine(self._ranks, selection)
        report = self._probed[key]
        (result,) = [found for found in report["probes"] if found["name"] == probe.name]
        finding = None if result["finding"] is None else report["findings"][result["finding"]]
        return Answer(probe.id, result["verdict"], result["detail"], finding, again)


def _items(selection: Any) -> Iterator[Item]:
    """Probes, then cases, whose id matches the selection's glob."""
    for cp_size in selection.worlds:
        for strategy in selection.strategies:
            for name in _C.probe_names():
                probe = Probe(name, strategy, cp_size)
                if matches(probe.id, selection.glob or "*"):
                    yield Item(probe.id, probe)
    for case in _C.make_cases(selection):
        yield Item(case.id(), case)


def _failure(answer: Answer) -> str:
    """The diagnosis first, then where it shows, what to read and what to type."""
    finding = answer.finding or {"sentence": answer.message, "point": "", "anchor": ""}
    where = "" if answer.message == finding["sentence"] else answer.message
    lines = {
        "": finding["sentence"],
        "case": f"{answer.id}: {answer.verdict}",
        "where": where,
        "checklist": finding["point"],
        "guide": finding["anchor"],
        "again": answer.again,
    }
    return "\n".join(f"{name}: {text}" if name else text for name, text in lines.items() if text)


def _check(item: Item, answer: Answer, strict: Sequence[str], node: pytest.Item) -> None:
    must_run = not isinstance(item.asked, Probe) and item.asked.feature in strict
    if answer.verdict == "refused" and must_run:
        answer.message = f"refused, and strict asks for {item.asked.feature}: {answer.message}"
    elif answer.verdict in ("ok", "refused", "not_applicable"):
        if answer.verdict != "ok":
            node.user_properties.append((f"ulysses_{answer.verdict}", answer.message))
            node.add_report_section("call", "ulysses", f"{answer.verdict}: {answer.message}")
        return
    pytest.fail(_failure(answer), pytrace=False)


def _refuse_unknown(strict: Iterable[str], transport: str) -> None:
    known = list(_C.capabilities(_C.known_strategies()[0]))
    unknown = [feature for feature in strict if feature not in known]
    if unknown:
        raise ValueError(f"[ulysses_conformance] strict={unknown} names no feature. Fix: some of {', '.join(known)}")
    if transport not in TRANSPORTS:
        raise ValueError(f"[ulysses_conformance] transport={transport!r} is unknown. Fix: {' or '.join(TRANSPORTS)}")


def ulysses_conformance(
    target: str | Callable[..., Any],
    *,
    worlds: Sequence[int] = (2, 4),
    quick: bool = False,
    transport: str = "threads",
    cases: str = "",
    strict: Sequence[str] = (),
) -> TestFunction:
    """A test function with one item per probe and per case of the doctor; bind it to a name that pytest collects.

    An item fails with the diagnosis, where it shows, and the line that asks it again. A refusal passes and is kept in
    the item's user_properties ("ulysses_refused"; -rA shows it). `pytest --ulysses-cases=GLOB` narrows by id.
    target:    a registered backend's name, a UlyssesAttentionProcessor subclass, or a function (q, k, v, group,
               **options); "module:NAME" or "path.py:NAME" for one of these.
    worlds:    numbers of ranks.
    quick:     one shape per feature, float32 and some bfloat16.
    transport: "threads", or "gloo" or "shm" for processes, which survive a target that hangs or dies; they import the
               target by its name and end with the module's tests.
    cases:     a glob of item ids ("is_causal/*", "probe/reach/*"); "" takes all.
    strict:    features (first part of a case's id) that must work: there a refusal fails.
    Errors:    ValueError for an unknown feature or transport and for a glob that matches nothing; TargetError.
    """
    strict = (strict,) if isinstance(strict, str) else tuple(strict)
    _refuse_unknown(strict, transport)
    items = list(_items(select(target, worlds=worlds, cases=cases, quick=quick)))
    if not items:
        raise ValueError(f"[ulysses_conformance] cases={cases!r} matches no id. Fix: 'is_causal/*', or 'probe/*'")
    examination = Examination(target, transport)

    @pytest.mark.parametrize(ITEM, items, ids=lambda item: item.id)
    def test(ulysses_item: Item, request: pytest.FixtureRequest) -> None:
        if examination.is_closed:
            request.node.getparent(pytest.Module).addfinalizer(lambda: examination.close(request.session))
        _check(ulysses_item, examination.ask(ulysses_item, request.node.nodeid), strict, request.node)

    return test
