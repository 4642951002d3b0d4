"""Ranks as processes for the doctor: worlds are reused, and replaced only after a crash, a hang or a desync."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ulysses_attention import _C
from ulysses_attention.doctor.targets import Target, as_target
from ulysses_attention.launch import ProcessRanks, RankError, post

__all__ = ["GlooRanks"]

HANG_LIMIT_S = 5.0
GROUP_TIMEOUT_S = 10.0

_targets: dict[Any, Target] = {}  # of this rank process: a target is set up once


def _answer(rank: int, group: Any, target: str | Callable[..., Any], question: Any) -> bool:
    """Runs in a rank process: posts the answer, so that it counts even if another rank never gives one."""
    if target not in _targets:
        _targets[target] = as_target(target)
    answer = _C.answer_on_rank(question, _targets[target], group)
    post(answer)
    return bool(answer.message)


def _set_up(rank: int, group: Any, target: str | Callable[..., Any]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _targets[target] = as_target(target)


def _heartbeat(rank: int, group: Any) -> None:
    """Are the ranks still in step? A collective of one number each."""
    sent = torch.full((group.size(),), float(rank))
    received = torch.empty_like(sent)
    group.alltoall_base(received, sent, [], []).wait()
    if received.tolist() != list(range(group.size())):
        raise RuntimeError("the ranks are out of step")


class GlooRanks(_C.DoctorRanks):
    """Questions to rank processes over Gloo, one world per number of ranks.

    A crash or a hang costs its question and the start of a world (2 to 5 s), nothing else.
    """

    def __init__(self, target: str | Callable[..., Any], *, hang_limit_s: float = HANG_LIMIT_S) -> None:
        super().__init__()
        self._target = target
        self._hang_limit_s = hang_limit_s
        self._worlds: dict[int, ProcessRanks] = {}
        self.restarts = 0

    def __enter__(self) -> GlooRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes and wait for them."""
        for world in self._worlds.values():
            world.close()
        self._worlds = {}

    def ask(self, question: Any) -> list[Any]:
        """One answer per rank; never raises what a rank meets. Called from the C++ core."""
        size = question.case.cp_size
        world = self._world(size)
        answers: dict[int, Any] = {}
        try:
            raised = world.run(
                _answer, self._target, question, timeout_s=self._hang_limit_s, on_post=answers.__setitem__
            )
            if any(raised) and size > 1:
                world.run(_heartbeat, timeout_s=self._hang_limit_s)
        except RankError as error:
            self._replace(size)
            for rank in range(size):
                text = error.reports.get(rank)
                if text is not None:
                    answers.setdefault(rank, _C.RankAnswer.crashed(text.strip().splitlines()[-1]))
                answers.setdefault(rank, _C.RankAnswer.released("another rank ended"))
        except TimeoutError:
            self._replace(size)
            limit = f"no answer within {self._hang_limit_s:g} s"
            for rank in range(size):
                answers.setdefault(rank, _C.RankAnswer.hung(limit))
        return [answers[rank] for rank in range(size)]

    def _world(self, size: int) -> ProcessRanks:
        if size not in self._worlds:
            world = ProcessRanks(size, timeout_s=GROUP_TIMEOUT_S)
            world.run(_set_up, self._target, timeout_s=120.0)  # imports take longer than an answer may
            self._worlds[size] = world
        return self._worlds[size]

    def _replace(self, size: int) -> None:
        self.restarts += 1
        self._worlds.pop(size).close()
