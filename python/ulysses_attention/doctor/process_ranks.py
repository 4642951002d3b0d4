"""Ranks as processes for the doctor: worlds are reused, and started again only after a crash, a hang or a desync."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ulysses_attention import _C
from ulysses_attention.doctor.targets import Target, TargetError, as_target
from ulysses_attention.launch import ProcessRanks, RankError, post

__all__ = ["WorkerRanks"]

HANG_LIMIT_S = 5.0
GROUP_TIMEOUT_S = 10.0
SET_UP_LIMIT_S = 120.0  # imports take longer than an answer may

_targets: dict[Any, Target] = {}  # of this rank process: a target is set up once


def on_device(target: Target, device: torch.device) -> Target:
    """Questions are CPU tensors; a rank of an NCCL world computes on its GPU."""
    if device.type == "cpu":
        return target

    def there(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, call: Any) -> Any:
        text = [there(x) for x in call.text]
        call = SimpleNamespace(case=call.case, mask=there(call.mask), sinks=there(call.sinks), text=text)
        return target(q.to(device), k.to(device), v.to(device), group, call)

    return attend


def _answer(
    rank: int, group: Any, target: str | Callable[..., Any], devices: Sequence[torch.device], question: Any
) -> bool:
    """Runs in a rank process: posts the answer, so that it counts even if another rank never gives one."""
    if target not in _targets:
        _set_up(rank, group, target, devices)
    answer = _C.answer_on_rank(question, _targets[target], group)
    post(answer)
    return bool(answer.message)


def _log_of(folder: str, size: int, rank: int) -> Path:
    return Path(folder) / f"stderr-of-rank-{rank}-of-{size}"


def _set_up(
    rank: int, group: Any, target: str | Callable[..., Any], devices: Sequence[torch.device], logs: str | None = None
) -> None:
    if logs is not None:  # what a dying process says is part of its answer, and no noise between the lines of a report
        with _log_of(logs, group.size(), rank).open("w") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
    _targets[target] = on_device(as_target(target), devices[rank])


def _heartbeat(rank: int, group: Any, devices: Sequence[torch.device]) -> None:
    """Are the ranks still in step? A collective of one number each."""
    sent = torch.full((group.size(),), float(rank), device=devices[rank])
    received = torch.empty_like(sent)
    group.alltoall_base(received, sent, [], []).wait()
    if received.tolist() != list(range(group.size())):
        raise RuntimeError("the ranks are out of step")


class WorkerRanks(_C.DoctorRanks):
    """Questions to rank processes, one world per number of ranks, over Gloo or shared memory.

    A crash or a hang costs its question and the start of a world (2 to 5 s), nothing else.
    """

    def __init__(
        self,
        target: str | Callable[..., Any],
        *,
        backend: str = "gloo",
        worlds: Callable[[int], ProcessRanks | None] | None = None,
        hang_limit_s: float = HANG_LIMIT_S,
    ) -> None:
        """backend: of the worlds that are started here.
        worlds: a number of ranks → a world that its owner closes, or None for one that is started and closed here.
        Units: hang_limit_s, how long a question may take."""
        super().__init__()
        self._target = target
        self._backend = backend
        self._worlds_of_caller = worlds or (lambda size: None)
        self._hang_limit_s = hang_limit_s
        self._own: dict[int, ProcessRanks] = {}
        self._is_set_up: set[int] = set()
        self._logs = tempfile.TemporaryDirectory(prefix="ulysses-doctor-")
        self.restarts = 0

    def __enter__(self) -> WorkerRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that were started here and wait for them."""
        for world in self._own.values():
            world.close()
        self._own = {}
        self._is_set_up = set()
        self._logs.cleanup()

    def ask(self, question: Any) -> list[Any]:
        """One answer per rank; never raises what a rank meets in a question. Called from the C++ core.

        Errors: TargetError where the target can't even be set up.
        """
        size = question.case.cp_size
        world = self._world(size)
        devices = [world.device(rank) for rank in range(size)]
        answers: dict[int, Any] = {}
        try:
            raised = world.run(
                _answer, self._target, devices, question, timeout_s=self._hang_limit_s, on_post=answers.__setitem__
            )
            if any(raised) and size > 1:
                world.run(_heartbeat, devices, timeout_s=self._hang_limit_s)
        except RankError as error:
            self._restart(size)
            for rank in range(size):
                text = error.reports.get(rank)
                if text is not None:
                    answers.setdefault(rank, _C.RankAnswer.crashed(self._last_words(size, rank, text)))
                answers.setdefault(rank, _C.RankAnswer.released("another rank ended"))
        except TimeoutError:
            self._restart(size)
            limit = f"no answer within {self._hang_limit_s:g} s"
            for rank in range(size):
                answers.setdefault(rank, _C.RankAnswer.hung(limit))
        return [answers[rank] for rank in range(size)]

    def _world(self, size: int) -> ProcessRanks:
        world = self._worlds_of_caller(size) or self._own.get(size)
        if world is None:
            world = self._own[size] = ProcessRanks(size, backend=self._backend, timeout_s=GROUP_TIMEOUT_S)
        if size not in self._is_set_up:
            devices = [world.device(rank) for rank in range(size)]
            logs = self._logs.name if size in self._own else None  # a world that is lent keeps its own stderr
            self._set_up(world, devices, logs)
            self._is_set_up.add(size)
        return world

    def _set_up(self, world: ProcessRanks, devices: Sequence[torch.device], logs: str | None) -> None:
        """Errors: TargetError for a target that fails in the process of a rank, before there is a question."""
        try:
            world.run(_set_up, self._target, devices, logs, timeout_s=SET_UP_LIMIT_S)
        except RankError as error:
            why = self._last_words(world.world, error.rank, error.reports[error.rank])
            raise TargetError(f"{self._target} cannot be set up on rank {error.rank}: {why}") from error
        except TimeoutError as error:
            raise TargetError(f"{self._target} cannot be set up: {error}") from error

    def _last_words(self, size: int, rank: int, report: str) -> str:
        """The end of a process in one line: why, as far as it said, and its exit code."""
        said = _log_of(self._logs.name, size, rank)
        lines = said.read_text(errors="replace").splitlines() if said.exists() else []
        why = [line.strip() for line in lines if line.strip().startswith("what():")]
        end = report.strip().splitlines()[-1]
        return f"{end}: {why[-1].removeprefix('what():').strip()}" if why else end

    def _restart(self, size: int) -> None:
        """A world that failed has ended its processes and starts new ones at its next run."""
        self.restarts += 1
        self._is_set_up.discard(size)
