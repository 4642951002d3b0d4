"""Worlds of ranks that serve the whole suite, and the count of how many were started."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
BUILT = REPOSITORY / "build" / "dev" / "python"

if BUILT.is_dir():
    sys.path.insert(0, str(BUILT))
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(BUILT), os.environ.get("PYTHONPATH", "")) if p)

from ulysses_attention import _C  # noqa: E402  (needs the path above)
from ulysses_attention.launch import ProcessRanks  # noqa: E402

# tests/cuda is the proof that the README waits for: collected only where there is a GPU; elsewhere the summary says so.
collect_ignore_glob = [] if torch.cuda.is_available() else ["cuda/*"]
pytest_plugins = ["pytester"]
MAX_LAUNCHES = 30  # a Gloo world costs 2 to 5 s


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "multi_gpu(n): n ranks through the `ranks` fixture: NCCL where n GPUs exist, else n Gloo processes"
    )


@pytest.fixture(scope="session")
def _worlds() -> Iterator[dict[tuple[str, int], ProcessRanks]]:
    worlds: dict[tuple[str, int], ProcessRanks] = {}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture(scope="session")
def gloo(_worlds: dict[tuple[str, int], ProcessRanks]) -> Callable[[int], ProcessRanks]:
    """gloo(world): the suite's one world of that many Gloo processes, 1 to 4."""

    def get(world: int) -> ProcessRanks:
        if not 1 <= world <= 4:
            raise ValueError(f"the suite keeps worlds of 1 to 4 processes, not {world}")
        return _worlds.setdefault(("gloo", world), ProcessRanks(world))

    return get


@pytest.fixture(scope="session")
def shm(_worlds: dict[tuple[str, int], ProcessRanks]) -> Callable[[int], ProcessRanks]:
    """shm(world): the suite's one world of that many processes over shared memory."""
    return lambda world: _worlds.setdefault(("shm", world), ProcessRanks(world, backend="ulysses_shm"))


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest,
    gloo: Callable[[int], ProcessRanks],
    _worlds: dict[tuple[str, int], ProcessRanks],
) -> Callable[..., ProcessRanks]:
    """ranks(n), or ranks() for the n of the test's multi_gpu mark: NCCL where n GPUs exist, else Gloo; no skip.

    Tensors belong on ProcessRanks.device(rank).
    """

    def get(n: int | None = None) -> ProcessRanks:
        if n is None:
            mark = request.node.get_closest_marker("multi_gpu")
            if mark is None:
                raise ValueError("ranks() without a number needs @pytest.mark.multi_gpu(n)")
            n = int(mark.args[0])
        if torch.cuda.is_available() and torch.cuda.device_count() >= n:
            return _worlds.setdefault(("nccl", n), ProcessRanks(n, backend="nccl"))
        return gloo(n)

    return get


def pytest_sessionfinish(session: pytest.Session) -> None:
    if ProcessRanks.launches > MAX_LAUNCHES and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    kernels = ", ".join(f"{name} {_C.auto_kernel(name)}" for name in ("float32", "bfloat16", "float16"))
    terminalreporter.write_line(f"local kernels of calls that name none: {kernels}")
    if not torch.cuda.is_available():
        terminalreporter.write_line("tests/cuda: not run, there is no GPU; CUDA stays unproved")
    launches = ProcessRanks.launches
    terminalreporter.write_line(f"worlds of processes started: {launches} (at most {MAX_LAUNCHES})")
    if launches > MAX_LAUNCHES:
        terminalreporter.write_line("FAILED: too many worlds; use the gloo fixture instead of run_processes", red=True)
