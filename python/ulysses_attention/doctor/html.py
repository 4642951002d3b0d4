"""The doctor's report as one static page: no script, nothing loaded; for desktop, phone, dark mode and print."""

from __future__ import annotations

import pathlib
from typing import Any

import jinja2

from . import picture
from .schema import VERDICTS, Report
from .summary import SEVERITY, WORDS, make_matrix, number, plain, verdict_line, where


def _plain_tree(value: Any) -> Any:
    """The report with every text made harmless to look at; escaping is the template's."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_plain_tree(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain_tree(item) for name, item in value.items()}
    return value


def render_html(report: Report) -> str:
    """The page. Everything from the report is escaped: messages are the text of strangers' exceptions."""
    report = _plain_tree(report)
    matrix = make_matrix(report)
    drawings = [picture.draw(one) for one in report["pictures"]]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, where=where)
    return environment.get_template("report.html.jinja").render(
        report=report,
        verdict=verdict_line(report),
        matrix=matrix,
        anchors={key: f"cell-{index}" for index, key in enumerate(matrix.cells)},
        wrong_drawings=[drawing for drawing in drawings if drawing.wrong_cells],
        right_drawings=[drawing for drawing in drawings if not drawing.wrong_cells],
        loose_probes=[p for p in report["probes"] if p["verdict"] == "wrong" and p["finding"] is None],
        shades=picture.SHADES,
        words=WORDS,
        legend=[(verdict, WORDS[verdict], VERDICTS[verdict]) for verdict in reversed(SEVERITY)],
    )
