"""Numbers from samples: ratios within a round, the control, what failed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contest.cells import Cell
from contest.contestants import CONTROL, KERNEL

__all__ = [
    "CONTROL_AGAIN", "CONTROL_RANGE", "EVEN", "Row", "cell_of", "control_of", "faults", "holds", "lead", "rows_of",
    "worst_of_ranks",
]  # fmt: skip

Record = Mapping[str, Any]  # a measured cell as it is stored; see measure.py

CONTROL_AGAIN = f"{CONTROL.name}, again"
CONTROL_RANGE = (0.97, 1.03)
EVEN = ", even"  # behind the name of who is timed on the even neighbour


class Row(NamedTuple):
    """What a table shows of one contestant in one cell: times, or why there are none.

    Units: milliseconds, the median of rounds; ratios are medians of the ratio within a round.
    """

    label: str
    failed: str = ""
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    wall_ratio: float = 0.0
    cpu_ratio: float = 0.0
    to_even: float | None = None  # wall, against itself on the even neighbour
    rounds: int = 0


def worst_of_ranks(samples: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """The largest over ranks, call by call."""
    return {
        label: [max(times) for times in zip(*(rank[label] for rank in samples), strict=True)] for label in samples[0]
    }


def cell_of(record: Record) -> Cell:
    return Cell(**record["cell"])


def rows_of(record: Record, order: Sequence[str]) -> list[Row]:
    """One row for each contestant of a cell, in the given order. The control's second turn is no row.

    Errors: ValueError for times whose output nobody checked.
    """
    unchecked = [label for label in record["wall_s"] if label not in record["error"]]
    if unchecked:
        raise ValueError(f"[bench] {cell_of(record).name}: no check of the output of {', '.join(unchecked)}")
    return [_row(record, label) for label in order if label in record["wall_s"] or label in record["failed"]]


def _row(record: Record, label: str) -> Row:
    if label in record["failed"]:
        return Row(label, failed=record["failed"][label])
    error = max(record["error"][label], record["error"].get(label + EVEN, 0.0))
    if error > 1.0:
        return Row(label, failed=f"WRONG: {error:.3g} times the allowed error")
    wall, cpu = record["wall_s"], record["cpu_s"]
    even = wall.get(label + EVEN)
    return Row(
        label,
        "",
        statistics.median(wall[label]) * 1e3,
        statistics.median(cpu[label]) * 1e3,
        _ratio(wall[label], wall[KERNEL]),
        _ratio(cpu[label], cpu[KERNEL]),
        None if even is None else _ratio(wall[label], even),
        len(wall[label]),
    )


def _ratio(times: Sequence[float], to: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, to, strict=True))


def control_of(record: Record) -> float | None:
    """The control's second turn against its first, wall; None where it could not run."""
    wall = record["wall_s"]
    if CONTROL.name not in wall or CONTROL_AGAIN not in wall:
        return None
    return _ratio(wall[CONTROL_AGAIN], wall[CONTROL.name])


def holds(record: Record) -> bool:
    """Whether the same contestant twice took the same time, so that differences of others mean something."""
    control = control_of(record)
    return control is not None and CONTROL_RANGE[0] <= control <= CONTROL_RANGE[1]


def lead(record: Record, order: Sequence[str]) -> tuple[str, str, float] | None:
    """The fastest of ours, the fastest of the others that do the whole work, and the ratio of their times within a
    round; None where one side has nobody."""
    done = [row for row in rows_of(record, order) if not row.failed and row.label != KERNEL]
    ours = [row for row in done if row.label.startswith("ours: ")]
    others = [row for row in done if row not in ours]
    if not ours or not others:
        return None
    first, second = (min(rows, key=lambda row: row.wall_ratio).label for rows in (ours, others))
    return first, second, _ratio(record["wall_s"][first], record["wall_s"][second])


def faults(records: Sequence[Record]) -> list[str]:
    """Why a run is no good, as text: a control out of range, an output of ours that is wrong or missing.

    What ours refuses by an error id is no fault: cpu_flash needs AVX2, or for bfloat16 AVX512_BF16.
    """
    found = []
    for record in records:
        name, control = cell_of(record).name, control_of(record)
        if control is None:
            found.append(f"{name}: the control did not run: {record['failed'].get(CONTROL.name, 'no reason known')}")
        elif not holds(record):
            found.append(f"{name}: the control is {control:.3f}, outside {CONTROL_RANGE[0]} to {CONTROL_RANGE[1]}")
        for row in rows_of(record, list(dict.fromkeys([*record["wall_s"], *record["failed"]]))):
            if row.failed and row.label.startswith(("ours: ", KERNEL)) and "[CP0" not in row.failed:
                found.append(f"{name}: {row.label}: {row.failed}")
    return found
