"""The gate: the doctor finds nothing wrong with a backend on several ranks, and nothing refused that it must serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ulysses_attention as ua
from ulysses_attention import _C
from ulysses_attention.doctor.process_ranks import WorkerRanks
from ulysses_attention.launch import ProcessRanks

BUILT_IN = "ulysses"


def _may_refuse(case: dict[str, Any], backend: str) -> bool:
    """By the table's id, or because the backend's `supports` does not name what the case needs."""
    refused_by_all = _C.capabilities(case["strategy"])[case["feature"]]
    if refused_by_all and f"[{refused_by_all}]" in case["message"]:
        return True
    return backend != BUILT_IN and case["feature"] != "equal_shards" and "[CP050]" in case["message"]


def assert_matches_single_card(
    ranks: ProcessRanks, backend: str, strategy: str, *, worlds: Callable[[int], ProcessRanks] | None = None
) -> None:
    """Ask a registered backend every float32 case of the doctor on this world: forward and backward against float64.

    The backend's class is sent to the ranks, so it must lie in a module. worlds: for a diagnosis on other numbers of
    ranks; without it they are started here.
    Raises AssertionError with the doctor's sentences, or with the case that is refused and must not be.
    """

    def world_of(size: int) -> ProcessRanks | None:
        return ranks if size == ranks.world else worlds(size) if worlds else None

    selection = _C.CaseSelection()
    selection.worlds, selection.strategies, selection.dtypes = [ranks.world], [strategy], ["float32"]
    target = BUILT_IN if backend == BUILT_IN else type(ua.backends()[backend])
    with WorkerRanks(target, worlds=world_of) as asked:
        report = _C.examine(asked, selection, probes=False)
    wrong = [f"{finding['sentence']} ({', '.join(finding['cases'][:3])}, …)" for finding in report["findings"]]
    wrong += [
        f"{case['id']} is refused: {case['message']}"
        for case in report["cases"]
        if case["verdict"] == "refused" and not _may_refuse(case, backend)
    ]
    summary = "\n".join(wrong[:12])
    assert not wrong, f'backend "{backend}", strategy "{strategy}" on {ranks.world} ranks differs from one:\n{summary}'
