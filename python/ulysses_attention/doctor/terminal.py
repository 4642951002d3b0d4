"""The doctor in a terminal: what is going on while it runs, and the report."""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .schema import Report
from .summary import Cell, Matrix, column_name, counts, make_matrix, plain, verdict_line, where

STYLES = {
    "ok": "green",
    "refused": "yellow",
    "wrong": "bold red",
    "crashed": "bold red",
    "hung": "bold red",
    "one_rank_only": "bold red",
    "unclear_message": "magenta",
}
MAX_UNEXPLAINED = 8  # cells spelled out below the findings; the HTML and the JSON have all
MAX_MESSAGE = 300  # characters
MAX_REFUSALS = 12


class Progress:
    """Shows a running examination: the case, counts by verdict, seconds.

    Not on a terminal: a line per strategy and number of ranks.

    console: where to; by default stderr, so that stdout holds the report alone.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._counts: collections.Counter[str] = collections.Counter()
        self._column: collections.Counter[str] = collections.Counter()
        self._column_name = ""
        self._case = ""
        self._done = self._total = 0
        self._started = time.monotonic()
        self._live = (
            Live(get_renderable=self._line, console=self._console, transient=True, refresh_per_second=8)
            if self._console.is_terminal
            else None
        )

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        self._end_column()

    def update(self, case: Mapping[str, Any], done: int, total: int) -> None:
        """case: a case of the report; one that only begins has no verdict yet. done of total cases are finished."""
        self._case, self._done, self._total = case["id"], done, total
        name = column_name(case["strategy"], case["cp_size"])
        if name != self._column_name:
            self._end_column()
            self._column_name = name
        if case.get("verdict"):
            self._counts[case["verdict"]] += 1
            self._column[case["verdict"]] += 1

    def _end_column(self) -> None:
        if self._column and not self._live:
            self._console.print(Text(f"{plain(self._column_name)}: {counts(self._column)}"), soft_wrap=True)
        self._column.clear()

    def _line(self) -> Text:
        """Called by the display's own thread, so that the seconds go on while a case hangs."""
        line = Text(f"{self._done}/{self._total}  {time.monotonic() - self._started:.0f} s  ", no_wrap=True)
        line.append(f"{counts(self._counts)}  " if self._counts else "")
        line.append(plain(self._case), style="dim")
        line.truncate(self._console.width, overflow="ellipsis")
        return line


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def _least_width(matrix: Matrix, column: tuple[str, int]) -> int:
    """A cell may break between its words, never inside one."""
    texts = [cell.text for key, cell in matrix.cells.items() if key[1:] == column]
    return _longest_word([plain(column_name(*column)), *texts])


def _column_groups(matrix: Matrix, width: int) -> list[list[tuple[str, int]]]:
    """Columns of each table: all in one if they fit, else a table per strategy, cut further where it must be."""

    def needed(columns: list[tuple[str, int]]) -> int:
        return _longest_word(matrix.features) + sum(2 + _least_width(matrix, column) for column in columns) + 1

    if needed(list(matrix.columns)) <= width:
        return [list(matrix.columns)]
    groups: list[list[tuple[str, int]]] = []
    for column in matrix.columns:
        if groups and groups[-1][0][0] == column[0] and needed([*groups[-1], column]) <= width:
            groups[-1].append(column)
        else:
            groups.append([column])
    return groups


def _table(matrix: Matrix, columns: list[tuple[str, int]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("feature", no_wrap=True)
    for column in columns:
        header = Text(plain(column_name(*column)).replace(" ", "\n"))
        table.add_column(header, min_width=_least_width(matrix, column))
    for feature in matrix.features:
        cells = [matrix.cells.get((feature, *column)) for column in columns]
        if any(cells):
            table.add_row(Text(plain(feature)), *(_cell_text(cell) for cell in cells))
    return table


def _cell_text(cell: Cell | None) -> Text:
    return Text("-", style="dim") if cell is None else Text(cell.text, style=STYLES[cell.verdict])


def _first_line(message: str) -> str:
    """The head of a message, which may be a whole traceback."""
    lines = message.strip().splitlines() or [""]
    return lines[0][:MAX_MESSAGE] + (" …" if len(lines) > 1 or len(lines[0]) > MAX_MESSAGE else "")


def _print_repro(console: Console, repro: str) -> None:
    """On a line of its own and never broken, so that it can be copied."""
    console.print(Text(plain(repro), style="dim"), soft_wrap=True)


def _print_findings(report: Report, console: Console) -> None:
    by_id = {case["id"]: case for case in report["cases"]}
    for index, finding in enumerate(report["findings"], 1):
        console.print()
        console.print(Text(f"Finding {index}: {plain(finding['sentence'])}", style="bold"))
        if finding["point"]:
            console.print(Text(f"  checklist: {plain(finding['point'])}"))
        if finding["anchor"]:
            console.print(Text(f"  explained: {plain(finding['anchor'])}"), soft_wrap=True)
        if finding["cases"]:
            first = finding["cases"][0]
            console.print(Text(f"  in {len(finding['cases'])} cases, first {plain(first)}:"), soft_wrap=True)
            _print_repro(console, by_id[first]["repro"])
    for probe in report["probes"]:
        if probe["verdict"] == "wrong" and probe["finding"] is None:
            console.print()
            name = f"probe {probe['name']}, {column_name(probe['strategy'], probe['cp_size'])}"
            console.print(Text(f"WRONG {plain(name)}: {plain(probe['detail'])}", style=STYLES["wrong"]))


def _print_refusals(report: Report, console: Console) -> None:
    """What each kind of refusal says, once: the matrix shows only its id."""
    said: dict[str, str] = {}
    for case in report["cases"]:
        if case["verdict"] == "refused":
            ids = re.findall(r"\[(CP\d+)\]", case["message"])
            said.setdefault(ids[-1] if ids else case["message"], f"{case['feature']}: {_first_line(case['message'])}")
    if said:
        console.print()
        console.print(Text("refused with these words:", style="dim"))
    for text in list(said.values())[:MAX_REFUSALS]:
        console.print(Text("  " + plain(text), style="dim"), soft_wrap=True)
    if len(said) > MAX_REFUSALS:
        console.print(Text(f"  and {len(said) - MAX_REFUSALS} more: see --html or --json", style="dim"))


def _print_unexplained(matrix: Matrix, console: Console) -> None:
    """Cells that are not right and that no finding explains."""
    cells = [cell for cell in matrix.bad() if any(case["finding"] is None for case in cell.worst)]
    for cell in cells[:MAX_UNEXPLAINED]:
        case = next(case for case in cell.worst if case["finding"] is None)
        console.print()
        title = f"{cell.feature}, {column_name(cell.strategy, cell.cp_size)}: {cell.text}"
        console.print(Text(plain(title), style=STYLES[cell.verdict]))
        place = where(case)
        console.print(Text("  " + plain(_first_line(case["message"]) + (f" ({place})" if place else ""))))
        _print_repro(console, case["repro"])
    if len(cells) > MAX_UNEXPLAINED:
        console.print()
        console.print(f"{len(cells) - MAX_UNEXPLAINED} more such cells: see --html or --json")


def print_report(report: Report, console: Console) -> None:
    """The matrix, then the findings with what reproduces them, then the verdict in the last line."""
    matrix = make_matrix(report)
    console.print(Text(f"ulysses doctor {plain(report['target'])}", style="bold"), soft_wrap=True)
    ran = "a part of the cases" if report["quick"] else "all cases"
    facts = (
        f"{ran}, {report['transport']}, ulysses_attention {report['library_version']}, "
        f"torch {report['torch_version']}, kernels {report['kernels']}"
    )
    console.print(Text(plain(facts), style="dim"))
    for columns in _column_groups(matrix, console.width):
        console.print()
        console.print(_table(matrix, columns))
    console.print(
        Text(
            "W: ranks. A number: largest error against float64, 16-bit cases among them. 2/5: in two of five cases.",
            style="dim",
        )
    )
    _print_refusals(report, console)
    _print_findings(report, console)
    _print_unexplained(matrix, console)
    console.print()
    style = STYLES["wrong"] if report["exit_status"] else STYLES["ok"]
    console.print(Text(f"{verdict_line(report)} ({report['seconds']:.1f} s)", style=style))
