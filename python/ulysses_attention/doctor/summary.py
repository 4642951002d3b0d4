"""What every rendering of a report says in the same words: the matrix, the text of its cells, the verdict."""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata

from .schema import CLEAN, Case, Report

# From the worst to the best: a cell shows the first that one of its cases has.
SEVERITY = ("wrong", "crashed", "hung", "one_rank_only", "unclear_message", "refused", "ok")
# Words differ, so that nothing depends on colour.
WORDS = {
    "ok": "ok",
    "refused": "refused",
    "wrong": "WRONG",
    "crashed": "crashed",
    "hung": "hung",
    "one_rank_only": "1 rank",
    "unclear_message": "unclear",
}
# The words behind a number of cases.
COUNTED = WORDS | {"one_rank_only": "on one rank only", "unclear_message": "unclear"}
_ERROR_ID = re.compile(r"\bCP\d{3}\b")
_SECONDS = re.compile(r"\b(\d+(?:\.\d+)?) ?s\b")


def plain(text: str) -> str:
    """Text of strangers made harmless to look at: control and direction characters become visible."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text)


def number(value: float) -> str:
    """Two digits: 2e-07, 0.013, 1.1."""
    return f"{value:.1g}" if abs(value) < 1e-3 else f"{value:.2g}"


@dataclasses.dataclass(frozen=True)
class Cell:
    """The cases of one feature on one strategy and number of ranks; never empty."""

    feature: str
    strategy: str
    cp_size: int
    cases: tuple[Case, ...]

    @property
    def verdict(self) -> str:
        """The worst of its cases."""
        return min((case["verdict"] for case in self.cases), key=SEVERITY.index)

    @property
    def worst(self) -> list[Case]:
        """The cases with that verdict, the largest error first; no number at all is worse than a large one."""
        found = [case for case in self.cases if case["verdict"] == self.verdict]
        missing = math.inf if self.verdict == "wrong" else 0.0
        return sorted(found, key=lambda case: missing if case["error"] is None else case["error"], reverse=True)

    @property
    def detail(self) -> str:
        """The number, error id or time that says more than the verdict; may be empty."""
        first = self.worst[0]
        if self.verdict in ("ok", "wrong"):
            return "" if first["error"] is None else number(first["error"])
        if self.verdict == "refused":
            ids = sorted({match for case in self.worst for match in _ERROR_ID.findall(case["message"])})
            return "" if not ids else ids[0] if len(ids) == 1 else f"{ids[0]} +{len(ids) - 1}"
        seconds = _SECONDS.search(first["message"]) if self.verdict == "hung" else None
        return f"{seconds.group(1)} s" if seconds else ""

    @property
    def share(self) -> str:
        """ "2/5" if only two of five cases have the verdict, empty if all have it."""
        return "" if len(self.worst) == len(self.cases) else f"{len(self.worst)}/{len(self.cases)}"

    @property
    def text(self) -> str:
        """The cell in words: "refused CP041 2/5"."""
        return " ".join(part for part in (WORDS[self.verdict], self.detail, self.share) if part)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows are features, columns are (strategy, cp_size); what was not run has no cell."""

    features: tuple[str, ...]
    columns: tuple[tuple[str, int], ...]
    cells: dict[tuple[str, str, int], Cell]

    def bad(self) -> list[Cell]:
        """Cells that are neither ok nor refused, in reading order."""
        return [cell for cell in self.cells.values() if cell.verdict not in CLEAN]

    def refused(self) -> list[Cell]:
        """Cells with a refusal and nothing worse."""
        return [cell for cell in self.cells.values() if cell.verdict == "refused"]


def make_matrix(report: Report) -> Matrix:
    """Features in the order of the cases; strategies and worlds in the order of the report."""
    grouped: dict[tuple[str, str, int], list[Case]] = {}
    for case in report["cases"]:
        grouped.setdefault((case["feature"], case["strategy"], case["cp_size"]), []).append(case)
    features = tuple(dict.fromkeys(case["feature"] for case in report["cases"]))
    every = [(strategy, cp_size) for strategy in report["strategies"] for cp_size in report["worlds"]]
    columns = tuple(column for column in every if any(key[1:] == column for key in grouped))
    keys = [(feature, *column) for feature in features for column in columns]
    return Matrix(features, columns, {key: Cell(*key, tuple(grouped[key])) for key in keys if key in grouped})


def column_name(strategy: str, cp_size: int) -> str:
    """ "ulysses W=4"."""
    return f"{strategy} W={cp_size}".strip()


def where(case: Case) -> str:
    """Where it is wrong: "dk, tokens 8-31, heads 0-3, ranks 1-3"."""
    places = [f"{name} {case[name]}" for name in ("tokens", "heads", "ranks") if case[name]]
    return ", ".join([case["tensor"], *places] if case["tensor"] and case["verdict"] != "ok" else places)


def counts(summary: dict[str, int]) -> str:
    """ "1 WRONG, 2 refused, 9 ok", the worst first, without what is 0."""
    return ", ".join(f"{summary[verdict]} {COUNTED[verdict]}" for verdict in SEVERITY if summary.get(verdict))


def verdict_line(report: Report) -> str:
    """The run in one line."""
    probes = sum(probe["verdict"] == "wrong" for probe in report["probes"])
    said = (
        "NOT RIGHT"
        if report["exit_status"]
        else "right, or refused clearly"
        if report["summary"]["refused"]
        else "right"
    )
    parts = [counts(dict(report["summary"])) or "no cases"]  # type: ignore[arg-type]
    if probes:
        parts.append(f"{probes} probe{'s' if probes > 1 else ''} WRONG")
    return f"{said}: {'; '.join(parts)}"
