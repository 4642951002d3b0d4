"""What a running examination shows."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from sample_report import sample
from ulysses_attention.doctor import terminal


def test_progress_without_a_terminal_is_a_line_per_strategy_and_ranks() -> None:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    cases: Any = sorted(sample()["cases"], key=lambda case: (case["strategy"], case["cp_size"]))
    with terminal.Progress(console) as progress:
        for done, case in enumerate(cases):
            progress.update({key: case[key] for key in ("id", "strategy", "cp_size")}, done, len(cases))  # it begins
            progress.update(case, done + 1, len(cases))
    assert console.file.getvalue().splitlines() == [
        "allgather_kv W=2: 1 refused, 3 ok",
        "allgather_kv W=4: 2 WRONG, 1 hung, 1 refused, 1 ok",
        "ulysses W=2: 1 unclear, 1 refused, 2 ok",
        "ulysses W=4: 1 crashed, 1 on one rank only, 1 refused, 1 ok",
    ]


def test_progress_on_a_terminal_shows_case_counts_and_seconds() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with terminal.Progress(console) as progress:
        for done, case in enumerate(sample()["cases"][:4], 1):
            progress.update(case, done, 17)
    shown = console.file.getvalue()
    assert re.search(r"4/17  0 s  1 WRONG, 3 ok  equal_shards/allgather_kv/W4", shown)
    assert "\n\n" not in shown
