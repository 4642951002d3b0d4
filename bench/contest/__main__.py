"""`make bench`: measures what is not measured yet and writes the page. See --help."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from contest import page, picture, results
from contest.cells import QUICK, SECTIONS, Cell, all_cells
from contest.contestants import CONTESTANTS
from contest.machine import describe
from contest.measure import Field, measure
from contest.ranks import Limits

LONG = 4096  # tokens from which a call takes so long that few rounds say enough and need no warming up
SECONDS, QUICK_SECONDS = 20.0, 8.0
CROWDED_FACTOR = 3  # more seconds below LONG where ranks take turns on the cores: times scatter by a third there


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    sections = _chosen(QUICK if options.quick else SECTIONS, options.only)
    if not all_cells(sections):
        print(f"bench: no cell matches {options.only!r}. Fix: --only '*' or a name such as w2-s256-*", file=sys.stderr)
        return 2
    folder = options.out / ("quick" if options.quick else "full")
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    records = _measure_all(sections, folder, options)
    run = {
        "machine": describe(),
        "date": datetime.date.today().isoformat(),
        "sections": {title: [records[cell.name] for cell in cells] for title, cells in sections.items()},
    }
    found = results.faults(list(records.values()))
    text = page.render(run)
    (folder / "performance.md").write_text(text)
    (folder / "performance.json").write_text(json.dumps(run, indent=1) + "\n")
    (folder / "images").mkdir(exist_ok=True)
    picture.draw(run, folder / "images" / "performance.png")
    console = Console()
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    for fault in found:
        console.print(f"FAILS: {fault}", style="bold red", markup=False, soft_wrap=True)
    if found and not options.go_on:
        console.print("Run it again to measure these cells anew on a quieter machine, or --go-on.", soft_wrap=True)
        return 1
    if options.page:
        options.page.write_text(text)
        (options.page.parent / "images").mkdir(exist_ok=True)
        shutil.copy(folder / "images" / "performance.png", options.page.parent / "images" / "performance.png")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description="Times context-parallel attention of several libraries.")
    parser.add_argument("--quick", action="store_true", help="a few cells, under two minutes")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cells by name, such as 'w2-s1024-*'")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"of timed rounds for each cell (default {SECONDS:.0f}, with --quick {QUICK_SECONDS:.0f}); "
        f"{CROWDED_FACTOR} times that with more ranks than cores, below {LONG} tokens",
    )
    parser.add_argument(
        "--tries", type=int, default=2, help="how often a cell is measured while it has a fault, such as its control"
    )
    parser.add_argument("--go-on", action="store_true", help="write the page and succeed though the control fails")
    parser.add_argument("--fresh", action="store_true", help="forget the cells of earlier runs")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where cells and results are kept")
    parser.add_argument("--page", type=Path, help="a copy of the page, its picture in images/ beside it")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = QUICK_SECONDS if options.quick else SECONDS
    return options


def _chosen(sections: dict[str, list[Cell]], pattern: str) -> dict[str, list[Cell]]:
    kept = {title: [c for c in cells if fnmatch.fnmatch(c.name, pattern)] for title, cells in sections.items()}
    return {title: cells for title, cells in kept.items() if cells}


def _measure_all(sections: dict[str, list[Cell]], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The records of all cells by name; those of an earlier run on the same machine, with the same versions and without
    a fault, are taken as they are."""
    cells, records = all_cells(sections), {}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("cells", total=len(cells))
        for world in dict.fromkeys(cell.world for cell in cells):
            with Field(world, folder) as field:
                for cell in (cell for cell in cells if cell.world == world):
                    records[cell.name] = _record(field, cell, folder, options, progress, bar)
                    progress.advance(bar)
    return records


def _record(
    field: Field, cell: Cell, folder: Path, options: argparse.Namespace, progress: Progress, bar: Any
) -> dict[str, Any]:
    file = folder / "cells" / f"{cell.name}.json"
    before = json.loads(file.read_text()) if file.exists() else None
    machine = describe()
    if before is not None and before["machine"] != machine:
        before = None
    tries = before["tries"] if before is not None else 0
    if before is not None and not results.faults([before]):
        return before
    limits = _limits(cell, options, machine["cores"])
    for _ in range(options.tries):
        tries, start = tries + 1, time.monotonic()
        progress.update(bar, description=f"{cell.name}: who can")
        record = measure(
            field,
            cell,
            CONTESTANTS,
            folder,
            limits,
            lambda rounds: progress.update(bar, description=f"{cell.name}: round {rounds}"),
        )
        record |= {"machine": machine, "tries": tries, "seconds": round(time.monotonic() - start, 1)}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record) + "\n")
        control = results.control_of(record)
        progress.console.print(f"{cell.name}: {record['seconds']} s, control {control or float('nan'):.3f}")
        if not results.faults([record]):
            break
    return record


def _limits(cell: Cell, options: argparse.Namespace, cores: int) -> Limits:
    if cell.seq_len >= LONG:
        return Limits(options.seconds, least=3, most=10, warm_up=False)
    return Limits(options.seconds * (CROWDED_FACTOR if cell.world > cores else 1), least=7, most=5000)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
