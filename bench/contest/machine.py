"""The machine, what runs on it beside the measurement, and who is measured in which version."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from contest.contestants import versions
from ulysses_attention import _C, __version__

__all__ = ["Load", "describe"]

_TICKS = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """Processor, cores, versions, and which kernel kernel="auto" takes here, by dtype."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "ulysses_attention": __version__,
        "libraries": versions(),
        "auto_kernel": {dtype: _C.auto_kernel(dtype) for dtype in ("float32", "bfloat16")},
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


class Load:
    """What other processes take of the machine, from its making to read().

    Units: cores, on average; the load of the last minute as the system counts it.
    """

    def __init__(self, own: Iterable[int]) -> None:
        self._own = [os.getpid(), *own]
        self._start = time.monotonic(), _busy(), self._used()

    def read(self) -> dict[str, float]:
        then, busy, used = self._start
        seconds = max(time.monotonic() - then, 1e-9)
        others = (_busy() - busy) - (self._used() - used)
        return {"others_cores": round(max(0.0, others / seconds), 2), "load_average": round(os.getloadavg()[0], 2)}

    def _used(self) -> float:
        return sum(_used_by(pid) for pid in self._own)


def _processor() -> str:
    """By name, and by family and model: virtual machines often leave the name short."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in known:
        return platform.processor() or "unknown processor"
    return f"{known['model name']} (family {known.get('cpu family')}, model {known.get('model')})"


def _busy() -> float:
    """Seconds in which some core worked: all but idle, waiting for disks, and time of guests, which is in user."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _used_by(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
