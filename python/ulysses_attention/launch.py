"""Ranks as processes of this machine: start them once, run many functions on them, leave none behind."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
import torch.distributed as dist

__all__ = ["ProcessRanks", "RankError", "post", "run_processes"]

_GRACE_S = 0.5  # after the first failure: time for the other ranks to report theirs, unless run() is told another
_START_TIMEOUT_S = 120.0  # to import torch and join the group

_to_parent: Connection | None = None  # set in a rank process only


class RankError(RuntimeError):
    """A rank failed. The text holds the rank's own traceback.

    Attributes: rank, the one that failed first; reports, {rank: traceback} of every rank that failed.
    """

    def __init__(self, rank: int, reports: dict[int, str]) -> None:
        self.rank = rank
        self.reports = reports
        others = sorted(set(reports) - {rank})
        more = f" (ranks {others} failed too)" if others else ""
        super().__init__(f"rank {rank} failed{more}:\n{reports[rank]}")


def post(value: Any) -> None:
    """Send a value from a running rank to the `on_post` of ProcessRanks.run, for progress."""
    if _to_parent is None:
        raise RuntimeError("post() works only inside a function that ProcessRanks or run_processes runs")
    _to_parent.send_bytes(pickle.dumps(("post", value)))


def run_processes(
    fn: Callable[..., Any], world: int, *args: Any, backend: str = "gloo", timeout_s: float = 120.0
) -> list[Any]:
    """Run fn(rank, group, *args) on `world` new processes and return the results in rank order.

    fn is a function of an importable module. A rank that fails ends the others; its traceback is raised here.
    backend: "gloo", "nccl", or "ulysses_shm", shared memory: far less time a collective, CPU tensors only.
    Comm:   a process group of the given backend over a temporary file; torch uses cores // world threads a rank.
    Units:  timeout_s, seconds for the whole run after start-up, and for each collective.
    Errors: RankError, TimeoutError.
    """
    with ProcessRanks(world, backend=backend, timeout_s=timeout_s) as ranks:
        return ranks.run(fn, *args)


class ProcessRanks:
    """A persistent world of `world` processes, for many short runs: a start costs seconds, a run milliseconds.

    Starts at the first run(). After a failure the processes are ended, because their collectives may be out of
    step, and the next run() starts new ones. Use as a context manager or call close().
    Units:  timeout_s, seconds per run and per collective.
    """

    launches: ClassVar[int] = 0  # worlds started by this process

    def __init__(self, world: int, *, backend: str = "gloo", timeout_s: float = 120.0) -> None:
        if world < 1:
            raise ValueError(f"[ProcessRanks] world={world} is not positive. Fix: world=1 or more. [CP006]")
        self.world = world
        self.backend = backend
        self.timeout_s = timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> ProcessRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids in rank order; empty before the first run() and after close()."""
        return tuple(process.pid for process in self._processes)

    def device(self, rank: int) -> torch.device:
        """The device on which a rank's tensors live."""
        return torch.device("cuda", rank) if self.backend == "nccl" else torch.device("cpu")

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        on_post: Callable[[int, Any], None] | None = None,
        grace_s: float = _GRACE_S,
    ) -> list[Any]:
        """fn(rank, group, *args) on every rank; results in rank order. on_post(rank, value) gets what ranks post().

        Units:  timeout_s, seconds for the run; grace_s, seconds that the others get after the first failure, to say how
                it looks from there: ranks that wait for a lost one need the timeout of their group.
        Errors: RankError with the traceback of the first rank that failed; TimeoutError. Both end the processes.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        task = pickle.dumps((sys.path, pickle.dumps((fn, args))))  # sys.path first: fn's module may be new there
        try:
            if not self._processes:
                self._start()
            for pipe in self._pipes:
                pipe.send_bytes(task)
            return self._collect(limit_s, on_post or (lambda rank, value: None), fn, grace_s)
        except BrokenPipeError:
            ended = {r: f"the process ended between two runs: exit code {code}" for r, code in self._ended().items()}
            self._kill()
            raise RankError(min(ended), ended) from None
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End the processes and wait for them. run() may be called again."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it may have ended already
                pipe.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        ProcessRanks.launches += 1
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ulysses-ranks-")
        rendezvous = "file://" + os.path.join(self._folder.name, "rendezvous")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world, self.backend, rendezvous, self.timeout_s, max(1, cores // self.world)),
                name=f"ulysses-rank-{rank}",
                daemon=True,  # ended by the interpreter if the parent forgets close()
            )
            self._pipes.append(ours)
            self._processes.append(process)
            process.start()
            theirs.close()
        self._collect(max(_START_TIMEOUT_S, self.timeout_s), lambda rank, value: None, _serve)

    def _collect(
        self, limit_s: float, on_post: Callable[[int, Any], None], fn: Callable[..., Any], grace_s: float = _GRACE_S
    ) -> list[Any]:
        """One answer from every rank, or an error that says which rank gave which."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + limit_s
        while len(results) + len(failures) < self.world:
            open_pipes = {p: r for r, p in enumerate(self._pipes) if r not in results and r not in failures}
            ready = multiprocessing.connection.wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failures:
                    break
                missing = sorted(open_pipes.values())
                raise TimeoutError(f"{getattr(fn, '__name__', fn)}: no answer from ranks {missing} within {limit_s} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                kind, value = self._receive(pipe, rank)
                if kind == "post":
                    on_post(rank, value)
                elif kind == "result":
                    results[rank] = value
                else:
                    if not failures:
                        deadline = time.monotonic() + grace_s
                    failures[rank] = value
        if failures:
            raise RankError(next(iter(failures)), failures)
        return [results[rank] for rank in range(self.world)]

    def _receive(self, pipe: Connection, rank: int) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5.0)
            return "failure", f"the process ended without an answer: exit code {self._processes[rank].exitcode}"
        return message

    def _ended(self) -> dict[int, int | None]:
        multiprocessing.connection.wait([process.sentinel for process in self._processes], 5.0)
        return {r: process.exitcode for r, process in enumerate(self._processes) if not process.is_alive()}

    def _kill(self) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                process.kill()
        for process in self._processes:
            if process.pid is not None:
                process.join()
                process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(
    pipe: Connection, rank: int, world: int, backend: str, rendezvous: str, timeout_s: float, threads: int
) -> None:
    """The life of a rank process: join the group, answer tasks, leave when the parent closes the pipe."""
    global _to_parent
    _to_parent = pipe
    try:
        torch.set_num_threads(threads)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        pipe.send_bytes(pickle.dumps(("result", None)))
    except Exception:
        pipe.send_bytes(pickle.dumps(("failure", traceback.format_exc())))
        return
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except (EOFError, KeyboardInterrupt):
            break
        if task is None:
            break
        path, body = task
        sys.path[:] = path
        try:
            fn, args = pickle.loads(body)
            answer = pickle.dumps(("result", fn(rank, dist.group.WORLD, *args)))
        except BaseException:
            answer = pickle.dumps(("failure", traceback.format_exc()))
        try:
            pipe.send_bytes(answer)
        except OSError:  # the parent is gone
            break
    dist.destroy_process_group()
