"""The results as a page in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contest import results
from contest.cells import Cell
from contest.contestants import CONTESTANTS, CONTROL, KERNEL, STAND_INS
from ulysses_attention.doctor.markdown import Notes, escaped, table

__all__ = ["render"]

ORDER = [KERNEL, *(contestant.name for contestant in CONTESTANTS)]
Record = Mapping[str, Any]


def render(run: Mapping[str, Any]) -> str:
    """The page: machine and control first, then a table for each section, then the reasons."""
    records = [record for section in run["sections"].values() for record in section]
    reasons = Notes()
    tables = [line for title, section in run["sections"].items() for line in _section(title, section, reasons)]
    return "\n".join(
        [
            "# Performance",
            "",
            *_how(run, records),
            "",
            "![time against torch's bare kernel, by length](images/performance.png)",
            "",
            *tables,
            "## Why there is no time",
            "",
            *(f"{number}. {escaped(text)}" for number, text in enumerate(reasons.texts, start=1)),
            "" if reasons.texts else "Every contestant did every cell.\n",
        ]
    )


def _how(run: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    machine = run["machine"]
    kernels = ", ".join(f"{kernel} for {dtype}" for dtype, kernel in machine["auto_kernel"].items())
    libraries = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine["libraries"].items())
    return [
        f"Made by `make bench` on {run['date']}, on one machine: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}.",
        "Nothing here says how other machines or GPUs fare.",
        "",
        "| | |",
        "|---|---|",
        f"| versions | ulysses-attention {machine['ulysses_attention']}, torch {machine['torch']}, {libraries} |",
        f'| our kernel | named in each row; `kernel="auto"` takes {kernels} here; torch\'s is built for '
        f"{machine['capability']} |",
        f"| control | {_control(records)} |",
        f"| load | {_load(records)} |",
        *(f"| {name} | {text} |" for name, text in STAND_INS.items()),
        "",
        "A cell: milliseconds of a call · its wall time against torch's bare kernel · its CPU time against it. One",
        "launch of Gloo processes with one thread each holds every contestant; a round calls each once, in its own",
        "order. A call begins after a barrier and takes what its slowest rank takes; milliseconds are medians over",
        "rounds, ratios medians of the ratio within a round. The bare kernel is torch's `scaled_dot_product_attention`",
        "over the whole sequence and the heads of the busiest rank, contiguous `[B, H, S, D]`, on all ranks at once,",
        "without communication. Every output and gradient of every timed call was compared with attention in float64.",
        f"{machine['cores']} cores serve all ranks: where there are more ranks than that, they take turns. A number in",
        "brackets leads to the reason below.",
    ]


def _control(records: Sequence[Record]) -> str:
    known = [(value, results.cell_of(record).name) for record in records if (value := results.control_of(record))]
    if not known:
        return "**did not run**"
    least, most = min(known), max(known)
    low, high = results.CONTROL_RANGE
    failing = sum(not results.holds(record) for record in records)
    words = f"{CONTROL.name} twice in each round, second over first: {least[0]:.3f} to {most[0]:.3f}"
    if failing:
        count = f"{failing} of {len(records)} cells"
        return f"{words}; **FAILS in {count}, outside {low} to {high}: differences there say little**"
    return f"{words}; holds in all {len(records)} cells ({low} to {high})"


def _load(records: Sequence[Record]) -> str:
    others = [record["load"]["others_cores"] for record in records]
    averages = [record["load"]["load_average"] for record in records]
    return (
        f"other processes took {min(others):.2f} to {max(others):.2f} cores during the rounds of a cell; the system's "
        f"load average, ours included, was {min(averages):.1f} to {max(averages):.1f}"
    )


def _section(title: str, records: Sequence[Record], reasons: Notes) -> list[str]:
    cells = [results.cell_of(record) for record in records]
    rows = [{row.label: row for row in results.rows_of(record, ORDER)} for record in records]
    shown = [label for label in ORDER if any(label in each for each in rows)]
    lines = [[label, *(_entry(each.get(label), reasons) for each in rows)] for label in shown]
    lines.append(["fastest of ours / of the others", *map(_lead, records)])
    lines.append(["control, second / first", *(_own_control(record) for record in records)])
    lines.append(
        [
            "rounds; others' cores; seconds in all",
            *(_rounds(each, rec) for each, rec in zip(rows, records, strict=True)),
        ]
    )
    return [f"## {title}", "", *table(["", *map(_column, cells)], lines), ""]


def _column(cell: Cell) -> str:
    heads = f"H{cell.num_heads}" + (f":{cell.num_kv_heads}" if cell.num_kv_heads != cell.num_heads else "")
    words = f"W{cell.world} S{cell.seq_len} {heads} {cell.dtype}"
    return words + (", causal" if cell.is_causal else "") + (", backward" if cell.backward else "")


def _entry(row: results.Row | None, reasons: Notes) -> str:
    if row is None:
        return ""
    if row.failed:
        word = "**wrong**" if row.failed.startswith("WRONG") else "no time"
        return f"{word} [{reasons.number(row.failed)}]"
    milliseconds = f"{row.wall_ms:.0f}" if row.wall_ms >= 100 else f"{row.wall_ms:.3g}"
    text = f"{milliseconds} · {row.wall_ratio:.2f} · {row.cpu_ratio:.2f}"
    return text if row.to_even is None else f"{text}; {row.to_even:.2f} of its even neighbour"


def _lead(record: Record) -> str:
    lead = results.lead(record, ORDER)
    if lead is None:
        return "only one side has a time"
    ours, other, ratio = lead
    verdict = "ours is faster" if ratio < 1 else "ours is slower"
    return f"{ratio:.2f}, {verdict}: {ours.removeprefix('ours: ')} / {other.removeprefix('recipe: ')}"


def _own_control(record: Record) -> str:
    control = results.control_of(record)
    if control is None:
        return "**did not run**"
    text = f"{control:.3f}" if results.holds(record) else f"**{control:.3f}, fails**"
    return text if record["tries"] == 1 else f"{text}, at try {record['tries']}"


def _rounds(rows: Mapping[str, results.Row], record: Record) -> str:
    rounds = max((row.rounds for row in rows.values()), default=0)
    return f"{rounds}; {record['load']['others_cores']:.2f}; {record['seconds']:.0f}"
