"""What the runs showed: the JSON, the claims recomputed from it, the table, the picture."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from rich.console import Console
from rich.table import Table

from .task import COPIES, PASSAGE, SEQ_LEN
from .train import RUNS, Settings

MAX_DIFFERENCE = 1e-4  # nats, between our curve and the single process's, at any step
MIN_GAP = 0.25  # nats, by which the local recipe ends higher
TAIL = 20  # steps whose mean is "the end of a run": one batch's loss is noisy
NAMES = {"single": "single process", "ulysses": "ulysses_attention", "local_kv": "local K/V"}


def end_of(curve: list[float]) -> float:
    return sum(curve[-TAIL:]) / len(curve[-TAIL:])


def largest_difference(curve: list[float], other: list[float]) -> float:
    """At any step; NaN if a loss is NaN, which max() alone would pass over."""
    differences = [abs(a - b) for a, b in zip(curve, other, strict=True)]
    return math.nan if any(math.isnan(d) for d in differences) else max(differences)


def make_report(
    settings: Settings, curves: dict[str, list[float]], ranks: str, seconds: dict[str, float]
) -> dict[str, Any]:
    """Units: losses in nats per hidden byte; seconds per run; the first on ranks holds their start too."""
    return {
        "task": {"copies": COPIES, "passage_bytes": PASSAGE, "seq_len": SEQ_LEN},
        "settings": {**vars(settings)},
        "ranks": ranks,
        "seconds": seconds,
        "losses": curves,
        "end_loss": {run: end_of(curve) for run, curve in curves.items()},
        "max_difference": largest_difference(curves["single"], curves["ulysses"]),
        "gap": end_of(curves["local_kv"]) - end_of(curves["single"]),
    }


def verify_report(
    report: dict[str, Any], max_difference: float = MAX_DIFFERENCE, min_gap: float = MIN_GAP
) -> list[str]:
    """Recompute the claims from the curves. Every claim that does not hold, as text; empty if all hold."""
    curves = report["losses"]
    steps = report["settings"]["steps"]
    wrong = [
        f"{run}: {len(curves.get(run, []))} losses for {steps} steps"
        for run in RUNS
        if len(curves.get(run, [])) != steps
    ]
    if wrong or steps < 1:
        return wrong or ["no steps were run"]
    difference = largest_difference(curves["single"], curves["ulysses"])
    gap = end_of(curves["local_kv"]) - end_of(curves["single"])
    if not difference < max_difference:  # also true for NaN
        wrong.append(
            f"ulysses_attention leaves the single-process curve by {difference:.2e} nats (limit {max_difference:.0e})"
        )
    if not gap >= min_gap:
        wrong.append(f"local K/V ends only {gap:.3f} nats above the single process (at least {min_gap} expected)")
    for name, value in (("max_difference", difference), ("gap", gap)):
        if not abs(report[name] - value) <= 1e-12:
            wrong.append(f"{name}={report[name]} in the report, {value} from its curves")
    return wrong


def print_table(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"nats per hidden byte, {COPIES} ranks ({report['ranks']})")
    for column in ("run", "first step", f"last {TAIL}", "from single ≤", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    single = report["losses"]["single"]
    for run in RUNS:
        curve = report["losses"][run]
        distance = largest_difference(single, curve)
        table.add_row(
            NAMES[run], f"{curve[0]:.3f}", f"{end_of(curve):.3f}", f"{distance:.1e}", f"{report['seconds'][run]:.1f}"
        )
    console.print(table)


def draw(json_path: pathlib.Path, png_path: pathlib.Path) -> None:
    """The three curves of a demo.json. Lines differ by style and carry their names: readable without colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    report = json.loads(json_path.read_text(encoding="utf-8"))
    styles: dict[str, dict[str, Any]] = {
        "single": {"color": "0.75", "linewidth": 6.0, "linestyle": "-"},
        "ulysses": {"color": "black", "linewidth": 1.6, "linestyle": "--"},
        "local_kv": {"color": "tab:red", "linewidth": 1.6, "linestyle": ":"},
    }
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for run in RUNS:
        curve = report["losses"][run]
        axes.plot(range(1, len(curve) + 1), curve, **styles[run])
    last = report["settings"]["steps"]
    ends = report["end_loss"]
    labels = {
        "single": f"single process (wide, grey)\nand ulysses_attention\n(dashed, on it): {ends['ulysses']:.2f}",
        "local_kv": f"local K/V (dotted):\n{ends['local_kv']:.2f}, and no error",
    }
    for run, label in labels.items():
        end = (last, ends[run])
        axes.annotate(label, end, xytext=(14, 0), textcoords="offset points", va="bottom", fontsize=9)
    axes.set(xlabel="step", ylabel="loss, nats per hidden byte", xlim=(0, last), ylim=(0, None))
    axes.set_title(
        f"Bytes that only other ranks show, {COPIES} ranks × {PASSAGE} tokens.\n"
        f"Largest distance between the two lower curves: {report['max_difference']:.1e} nats",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png_path, dpi=150)
    pyplot.close(figure)
