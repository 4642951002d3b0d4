"""Each cell of the capability table is what it says: docs/capabilities.md links every cell to its test here."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from conftest import REPOSITORY
from ulysses_attention import _C, ulysses_attention
from ulysses_attention.doctor.targets import as_target, operation_keywords

WORLDS = [2, 4]
CELLS = [(strategy, feature) for strategy in _C.known_strategies() for feature in _C.capabilities(strategy)]
DOCS = REPOSITORY / "docs"


def cases_of(strategy: str, feature: str) -> list[Any]:
    """Every shape that the doctor has for a feature, in float32."""
    selection = _C.CaseSelection()
    selection.worlds, selection.strategies, selection.dtypes = WORLDS, [strategy], ["float32"]
    return [case for case in _C.make_cases(selection) if case.feature == feature]


def assert_right(case: Any) -> None:
    """out, lse and gradients are those of float64 attention of one process."""
    for result, finding in _C.examine_case(_C.ThreadRanks(as_target("ulysses")), case):
        assert (result["verdict"], finding) == ("ok", None), f"{result['id']}: {result['message']}"


def assert_refused(case: Any, error_id: str) -> None:
    """Every rank raises the id, and nothing was handed to its group."""
    refusals: list[tuple[int, str, list[Any]]] = []

    def attend(q: Any, k: Any, v: Any, group: Any, call: Any) -> Any:
        recorder = _C.Recorder()
        try:
            # Without the comparison across ranks, which sends a few bytes of its own.
            recorded = _C.record_group(group, recorder)
            return ulysses_attention(q, k, v, recorded, agreement="off", **operation_keywords(call))
        except Exception as error:
            refusals.append((group.rank(), str(error), recorder.records()))
            raise

    _C.examine_case(_C.ThreadRanks(attend), case)
    assert {rank for rank, _, _ in refusals} == set(range(case.cp_size)), f"{case.id()} is refused by {refusals}"
    for rank, text, records in refusals:
        assert f"[{error_id}]" in text and records == [], f"{case.id()}, rank {rank}: {text} after {records}"


@pytest.mark.parametrize(("strategy", "feature"), CELLS)
def test_cell(strategy: str, feature: str) -> None:
    cases = cases_of(strategy, feature)
    assert {case.cp_size for case in cases if case.backward} == set(WORLDS), f"{feature} needs a shape in shapes.cpp"
    error_id = _C.capabilities(strategy)[feature]
    for case in cases:
        if error_id:
            assert_refused(case, error_id)
        else:
            assert_right(case)


def linked_tests(page: str) -> dict[tuple[str, str], list[str]]:
    """(strategy, feature) → the pytest items that the page's cell links to, as paths from the repository's root."""
    files = {name: (DOCS / path).resolve() for name, path in re.findall(r"^\[(\w+)\]: (\S+)$", page, re.M)}
    header, *rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    strategies = [name.strip("`") for name in header[1:-1]]
    return {
        (strategy, row[0].strip("| `")): [
            f"{files[file].relative_to(REPOSITORY)}::test_cell[{name}]"
            for name, file in re.findall(r"\[`([^`]+)`\]\[(\w+)\]", cell)
        ]
        for row in rows
        for strategy, cell in zip(strategies, row[1:], strict=False)
    }


def test_every_cell_of_the_page_links_to_its_test_and_pytest_collects_it() -> None:
    links = linked_tests((DOCS / "capabilities.md").read_text())
    here = "tests/python/test_features.py"
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", here], cwd=REPOSITORY, capture_output=True, text=True
    )
    collected = set(listing.stdout.splitlines())
    assert set(links) == set(CELLS)
    for (strategy, feature), items in links.items():
        assert items == [f"{here}::test_cell[{strategy}-{feature}]"], (strategy, feature)
        assert items[0] in collected, f"{items[0]} is not collected:\n{listing.stdout[-2000:]}{listing.stderr[-2000:]}"
