"""One examination, from a target's name to a report."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from ulysses_attention import _C, __version__
from ulysses_attention.doctor import stuck
from ulysses_attention.doctor.process_ranks import GROUP_TIMEOUT_S, WorkerRanks, on_device
from ulysses_attention.doctor.schema import SCHEMA_VERSION, VERDICTS, Report, finite
from ulysses_attention.doctor.targets import PEER, TargetError, as_target, check_target, strategies_of

__all__ = ["PROCESS_BACKENDS", "TRANSPORTS", "case_line", "examine", "ranks_of", "release", "reproduce", "select"]

PROCESS_BACKENDS = {"gloo": "gloo", "shm": _C.SHM_BACKEND}  # of the transports whose ranks are processes
TRANSPORTS = ("threads", *PROCESS_BACKENDS)

OnCase = Callable[[dict[str, Any], int, int], None]


def under_launcher() -> bool:
    """Whether a launcher (torchrun) started this process as one rank of a world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_of(target: str | Callable[..., Any], transport: str) -> Any:
    """The ranks that are asked. Errors: TargetError."""
    if transport == "torchrun":
        has_gpu = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
        if not dist.is_initialized():
            if has_gpu:
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if has_gpu else "gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        answers = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * GROUP_TIMEOUT_S))
        return _C.GroupRanks(on_device(as_target(target), device), dist.group.WORLD, answers)
    if transport in PROCESS_BACKENDS:
        if isinstance(target, str):
            check_target(target)  # before a world starts for it
        return WorkerRanks(target, backend=PROCESS_BACKENDS[transport])
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r} is unknown. Fix: {' or '.join(TRANSPORTS)}")
    if isinstance(target, str) and target.startswith(PEER):
        raise TargetError(f"{target} looks its group up per process and needs processes. Fix: --transport gloo, or shm")
    return _C.ThreadRanks(as_target(target))


def release(ranks: Any) -> int:
    """No more questions: processes end here. How many threads never came back from the target."""
    if isinstance(ranks, WorkerRanks):
        ranks.close()
    return stuck.note(ranks)


def name_of(target: str | Callable[..., Any]) -> str:
    """The target as a user would type it: what lies in no package, a script or a test, by its file."""
    if isinstance(target, str):
        return target
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    where = os.path.relpath(file) if file and "." not in target.__module__ else target.__module__
    return f"{where}:{getattr(target, '__qualname__', type(target).__name__)}"


def case_line(target: str | Callable[..., Any], transport: str, fields: dict[str, Any]) -> str:
    """The shell line that asks one case again. A shell has no launcher's world: it starts processes in its stead."""
    transport = "gloo" if transport == "torchrun" else transport
    text = json.dumps({"target": name_of(target), "transport": transport, "case": fields}, separators=(",", ":"))
    return f"ulysses repro {shlex.quote(text)}"


def _summary(cases: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {verdict: sum(case["verdict"] == verdict for case in cases) for verdict in VERDICTS}


def _kernels() -> str:
    """What "auto" means here, for a call that every kernel can serve."""
    return ", ".join(f"{dtype} {_C.auto_kernel(dtype)}" for dtype in ("float32", "bfloat16", "float16", "float64"))


def select(target: str | Callable[..., Any], *, worlds: Sequence[int], cases: str, quick: bool) -> Any:
    """Which cases to make for a target. Errors: TargetError."""
    selection = _C.CaseSelection()
    selection.strategies = strategies_of(target)
    selection.worlds = list(dict.fromkeys(worlds))
    selection.quick = quick
    selection.glob = cases
    return selection


def examine(
    target: str | Callable[..., Any],
    *,
    worlds: Sequence[int] = (2, 4),
    transport: str = "threads",
    cases: str = "",
    quick: bool = False,
    probes: bool | None = None,
    on_case: OnCase | None = None,
) -> Report:
    """Every selected case and every probe, over thread ranks, processes (Gloo, shared memory) or the launcher's world.

    target: see as_target. cases: a glob of case ids; with one, probes are left out unless asked for.
    Comm:   starts its own ranks; under a launcher every rank must call it, and its world is the one that is used.
    Errors: TargetError; ValueError for a transport that is not one of TRANSPORTS.
    """
    selection = select(target, worlds=worlds, cases=cases, quick=quick)
    start = time.monotonic()
    ranks = ranks_of(target, transport)
    if transport == "torchrun":
        selection.worlds = [dist.get_world_size()]
    try:
        found = _C.examine(ranks, selection, probes if probes is not None else cases == "", on_case)
    finally:
        release(ranks)
    for case in found["cases"]:
        case["repro"] = case_line(target, transport, case.pop("fields"))
        case["error"] = None if case["error"] is None else finite(case["error"])
    for picture in found["pictures"]:
        picture["weights"] = [[finite(weight) for weight in row] for row in picture["weights"]]
    report = {
        "schema_version": SCHEMA_VERSION,
        "library_version": __version__,
        "torch_version": torch.__version__,
        "kernels": _kernels(),
        "target": name_of(target),
        "transport": transport,
        "worlds": list(selection.worlds),
        "quick": quick,
        "seconds": round(time.monotonic() - start, 2),
        "strategies": list(selection.strategies),
        "summary": _summary(found["cases"]),
        **found,
    }
    return cast(Report, report)


def reproduce(line: str) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Ask one case again: (the case's result, the finding or None), and behind it the same of its forward alone where
    backward is refused. `line` is the JSON of `ulysses repro`.

    Errors: TargetError; ValueError for a line that is no case.
    """
    asked = json.loads(line)
    parts = {"target": str, "transport": str, "case": dict}
    if not isinstance(asked, dict) or {name: type(value) for name, value in asked.items()} != parts:
        raise ValueError("the line is no case. Fix: the text between the quotes of an `ulysses repro` line")
    case = _C.Case(asked["case"])
    ranks = ranks_of(asked["target"], asked["transport"])
    try:
        return cast("list[tuple[dict[str, Any], dict[str, Any] | None]]", _C.examine_case(ranks, case))
    finally:
        release(ranks)
