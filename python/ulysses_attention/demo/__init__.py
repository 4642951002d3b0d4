"""`ulysses demo`: the same small model trained three times; only the attention call differs.

A task that cannot be learned from a rank's own tokens, on four ranks: in one process, with ulysses_attention, and
with the mistake of attending to local keys and values only. The first two curves coincide; the third ends higher,
and nothing fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .report import MAX_DIFFERENCE, MIN_GAP, NAMES, draw, make_report, print_table, verify_report
from .train import RUNS, Settings, run_all

__all__ = ["main", "verify_report"]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ulysses demo", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("demo-out"), help="folder for JSON and picture"
    )
    parser.add_argument("--threads", action="store_true", help="ranks are threads of this process, not Gloo processes")
    parser.add_argument("--steps", type=_positive, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--min-gap", type=float, default=MIN_GAP, help="nats that local K/V must end higher")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every claim holds, 1 if one doesn't, 2 if it can't run."""
    options = build_parser().parse_args(argv)
    console = Console()
    if importlib.util.find_spec("matplotlib") is None:
        console.print("The demo draws a picture with matplotlib. Fix: pip install matplotlib")
        return 2
    settings = Settings(seed=options.seed, steps=options.steps)
    ranks = "threads of one process" if options.threads else "Gloo processes"
    ended = {"start": time.monotonic()}
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as bars:
        tasks = {run: bars.add_task(NAMES[run], total=settings.steps, start=False, loss="–") for run in RUNS}

        def progress(run: str, step: int, loss: float) -> None:
            bars.start_task(tasks[run])
            bars.update(tasks[run], completed=step, loss=f"{loss:.3f}")
            ended[run] = time.monotonic()

        curves = run_all(settings, options.threads, progress)
    before = ("start", *RUNS[:-1])
    seconds = {run: ended[run] - ended[previous] for run, previous in zip(RUNS, before, strict=True)}
    report = make_report(settings, curves, ranks, seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    json_path = options.out / "demo.json"
    json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(json_path, options.out / "demo.png")
    print_table(report, console)
    wrong = verify_report(json.loads(json_path.read_text(encoding="utf-8")), MAX_DIFFERENCE, options.min_gap)
    for claim in wrong:
        console.print(f"FAILED: {claim}", markup=False)
    if not wrong:
        console.print(
            f"ulysses_attention lies on the single-process curve (largest distance {report['max_difference']:.1e}); "
            f"local K/V ends {report['gap']:.2f} nats higher, without any error."
        )
    console.print(f"Written: {json_path}, {options.out / 'demo.png'}", soft_wrap=True)
    return 1 if wrong else 0
