"""The results as a picture: time against the bare kernel, by length, a panel for each section of lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker
from matplotlib.axes import Axes

from contest import results
from contest.contestants import CONTESTANTS, KERNEL

__all__ = ["draw"]

COLUMNS = 4
LABELS = [KERNEL, *(contestant.name for contestant in CONTESTANTS)]


def draw(run: Mapping[str, Any], file: Path) -> None:
    """One panel per section; sections of other shapes have their shapes side by side instead of a line."""
    sections = run["sections"]
    rows = -(-len(sections) // COLUMNS)
    width = min(COLUMNS, len(sections))
    figure, panels = pyplot.subplots(rows, width, figsize=(4.6 * width, 3.6 * rows + 1.2), squeeze=False)
    for panel in panels.flat[len(sections) :]:
        panel.set_axis_off()
    for panel, (title, records) in zip(panels.flat, sections.items(), strict=False):
        _draw_section(panel, title, records)
    drawn = {
        label: line
        for panel in reversed(list(panels.flat))
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    names = [label for label in LABELS if label in drawn]
    figure.legend(
        [drawn[n] for n in names], names, loc="lower center", ncols=min(5, 2 * width), fontsize=8, frameon=False
    )
    figure.tight_layout(rect=(0, 0.9 / figure.get_figheight() + 0.02, 1, 1))
    figure.savefig(file, dpi=90)
    pyplot.close(figure)


def _draw_section(panel: Axes, title: str, records: list[Mapping[str, Any]]) -> None:
    rows = [{row.label: row for row in results.rows_of(record, LABELS) if not row.failed} for record in records]
    places = list(range(len(records)))
    only_lengths_differ = len({results.cell_of(record)._replace(seq_len=0) for record in records}) == 1
    for number, label in enumerate(LABELS):
        points = [(place, each[label].wall_ratio) for place, each in zip(places, rows, strict=True) if label in each]
        if points and label != KERNEL:
            is_ours = _line_of(label) == "-"
            panel.plot(
                *zip(*points, strict=True),
                label=label,
                color=pyplot.get_cmap("tab20")(number % 20),
                marker="o" if is_ours else ".",
                linewidth=2.0 if is_ours else 0.9,
                linestyle=_line_of(label) if only_lengths_differ else "",
            )
    panel.axhline(1.0, color="black", linewidth=1.0, label=KERNEL)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.3g"))
    panel.yaxis.set_minor_formatter(ticker.NullFormatter())
    panel.set_title(title, fontsize=8)
    panel.set_xticks(places, [_name(results.cell_of(record)) for record in records], fontsize=7)
    panel.margins(x=0.1)
    panel.grid(axis="y", which="both", linewidth=0.3)
    panel.set_ylabel("wall time / bare kernel", fontsize=7)
    panel.tick_params(axis="y", which="both", labelsize=7)


def _line_of(label: str) -> str:
    return "-" if label.startswith("ours: ") else "--" if label.startswith("recipe: ") else ":"


def _name(cell: Any) -> str:
    return f"S{cell.seq_len}" + ("" if cell.num_heads == 8 else f" H{cell.num_heads}") + f"\nW{cell.world}"
