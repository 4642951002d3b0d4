"""`ulysses doctor` and `ulysses repro`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ulysses_attention.doctor import run, schema
from ulysses_attention.doctor.faults import FaultResult, run_faults
from ulysses_attention.doctor.html import render_html
from ulysses_attention.doctor.targets import PEER
from ulysses_attention.doctor.terminal import Progress, print_report
from ulysses_attention.processor import backends

__all__ = ["doctor", "repro"]

WORLDS = (2, 4)
USAGE = 2
WRONG_USAGE = (ValueError, ImportError, OSError)  # a TargetError, a library that is not installed, a file


def _worlds(text: str) -> tuple[int, ...]:
    worlds = tuple(int(number) for number in text.split(",") if number.strip().isdigit())
    if not worlds or any(not 1 <= world <= 64 for world in worlds) or len(worlds) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of ranks (1 to 64): 2,4")
    return worlds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ulysses doctor",
        description="What of a context-parallel attention works, what is refused and what is silently wrong.",
        epilog="Exit status: 0 everything is right or refused cleanly, 1 something is wrong, 2 wrong usage.",
    )
    parser.add_argument(
        "target",
        nargs="?",
        help="a registered backend; module:Class or file.py:Class, a UlyssesAttentionProcessor; module:function, "
        "(q, k, v, group, **options); peer:NAME, another library. Default: every registered backend",
    )
    parser.add_argument("--world", type=_worlds, metavar="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument(
        "--transport",
        choices=run.TRANSPORTS,
        help="ranks are threads of this process (default), processes over Gloo, or processes over shared memory (shm: "
        "faster than Gloo, one host, CPU); under torchrun its own ranks",
    )
    parser.add_argument("--cases", default="", metavar="GLOB", help="only cases whose id matches; without probes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON (docs/doctor-report.md)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page")
    parser.add_argument("--quick", action="store_true", help="one shape a feature, float32 and some bfloat16")
    parser.add_argument(
        "--faults", action="store_true", help="instead, without TARGET: kill, stop, slow or confuse a rank of our own"
    )
    return parser


def _transport(asked: str | None, target: str) -> str:
    if run.under_launcher():
        return "torchrun"
    return asked or ("gloo" if target.startswith(PEER) else "threads")


def _refuse_under_launcher(options: argparse.Namespace) -> None:
    """Its ranks are used, so nothing else may be asked of them."""
    if options.transport:
        asked = options.transport
        raise ValueError(f"transport={asked!r} under a launcher, whose ranks are used. Fix: leave --transport out")
    if options.faults:
        raise ValueError("--faults starts ranks of its own. Fix: run it without a launcher")
    size = int(os.environ["WORLD_SIZE"])
    if set(options.world or [size]) != {size}:
        asked = ",".join(map(str, options.world))
        raise ValueError(f"--world {asked} under a launcher that started {size} ranks. Fix: leave --world out")


def _refuse_beside_faults(options: argparse.Namespace) -> None:
    ignored = ("world", "cases", "json", "html", "quick")
    given = [f"--{name}" for name in ignored if getattr(options, name)]
    given = [options.target, *given] if options.target else given
    if given:
        raise ValueError(f"--faults tries ranks of our own and takes no {', '.join(given)}. Fix: leave it out")


def _refuse_unwritable(file: Path) -> None:
    """Before the run, which may take minutes."""
    folder = file.parent
    if not folder.is_dir():
        raise ValueError(f"no folder {folder} for {file.name}. Fix: a file in a folder that exists")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"{file} cannot be written. Fix: a file that can be")


def _file_of(path: Path, target: str, alone: bool) -> Path:
    return path if alone else path.with_name(f"{path.stem}-{target}{path.suffix}")


def _examine(options: argparse.Namespace, target: str, alone: bool) -> int:
    transport = _transport(options.transport, target)
    speaks = os.environ.get("RANK", "0") == "0" or transport != "torchrun"
    with Progress(None if speaks else Console(quiet=True, force_terminal=False)) as progress:
        report = run.examine(
            target,
            worlds=options.world or WORLDS,
            transport=transport,
            cases=options.cases,
            quick=options.quick,
            on_case=progress.update,
        )
    if not report["cases"]:
        raise ValueError(f"--cases {options.cases!r} matches no case. Fix: a glob of ids, such as 'is_causal/*'")
    if speaks:
        print_report(report, Console())
        if options.json:
            schema.dump(report, _file_of(options.json, target, alone))
        if options.html:
            _file_of(options.html, target, alone).write_text(render_html(report), encoding="utf-8")
    return report["exit_status"]


def _faults(options: argparse.Namespace) -> int:
    console = Console()

    def show(result: FaultResult) -> None:
        console.print(f"{result.verdict:6s} {result.transport:8s} {result.scenario}: {result.expected}", markup=False)
        for rank, text in enumerate(result.texts):
            first_line = (text.strip().splitlines() or [""])[0]
            console.print(f"         rank {rank}: {first_line}", markup=False, soft_wrap=True)
        if result.problem:
            console.print(f"         WRONG: {result.problem}", markup=False, soft_wrap=True)

    transports = [_transport(options.transport, "")] if options.transport else list(run.TRANSPORTS)
    results = [result for transport in transports for result in run_faults(transport=transport, on_result=show)]
    return int(any(result.verdict != "ok" for result in results))


def doctor(arguments: Sequence[str]) -> int:
    """Exit status: 0 all right or refused cleanly, 1 something is wrong, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        if run.under_launcher():
            _refuse_under_launcher(options)
        if options.world == (1,):
            raise ValueError("--world 1: one rank alone can show no fault of an exchange. Fix: --world 2, or 1,2")
        if options.faults:
            _refuse_beside_faults(options)
            return _faults(options)
        if options.target == "":
            raise ValueError("the target is an empty text. Fix: a target, or none for every registered backend")
        targets = [options.target] if options.target else list(backends())
        for file in filter(None, (options.json, options.html)):
            _refuse_unwritable(file)
        return max(_examine(options, target, alone=len(targets) == 1) for target in targets)
    except WRONG_USAGE as error:
        print(f"ulysses doctor: {error}", file=sys.stderr)
        return USAGE


def repro(arguments: Sequence[str]) -> int:
    """Ask one case again. Exit status as doctor's."""
    parser = argparse.ArgumentParser(prog="ulysses repro", description="Ask one case of the doctor again.")
    parser.add_argument("case", help="the JSON text that the doctor printed")
    try:
        examined = run.reproduce(parser.parse_args(arguments).case)
    except (*WRONG_USAGE, LookupError, TypeError) as error:  # the last two from a damaged line
        print(f"ulysses repro: {error}", file=sys.stderr)
        return USAGE
    for result, finding in examined:
        numbers = "" if result["error"] is None else f" (error {result['error']:.2e}, allowed {result['allowed']:.2e})"
        print(f"{result['id']}: {result['verdict']}{numbers}")
        if result["message"]:
            print(result["message"])
        if finding:
            print(f"{finding['sentence']}\n  {finding['point']}\n  {finding['anchor']}")
    return int(any(result["verdict"] not in schema.CLEAN for result, _ in examined))
