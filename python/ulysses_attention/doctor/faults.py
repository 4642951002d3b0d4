"""Faults of one rank on purpose: do the others hear who and what, in time, and is nothing left behind?"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ulysses_attention.attention import ulysses_attention
from ulysses_attention.doctor.run import PROCESS_BACKENDS, TRANSPORTS
from ulysses_attention.launch import ProcessRanks, RankError, post
from ulysses_attention.processor import AttendCall
from ulysses_attention.ranks import run_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FaultResult", "run_faults"]

TIMEOUT_S = 5.0  # of the group that has the fault
LIMIT_S = 10.0  # for every survivor's answer
SLOW_S = 1.5
RIGHT = "right numbers"
NO_ANSWER = "no answer"


@dataclasses.dataclass(frozen=True)
class FaultResult:
    """What the ranks of one world got when one of them, the last, had a fault.

    scenario, transport, world, expected: what was done, and what must come of it in one sentence.
    verdict: "ok" or "wrong"; problem says why it is wrong.
    seconds: of the slowest rank without the fault, from its call to its answer.
    texts:  per rank: its error, "right numbers", or what became of it.
    """

    scenario: str
    transport: str
    world: int
    expected: str
    verdict: Literal["ok", "wrong"]
    seconds: float
    texts: tuple[str, ...]
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A fault of the last rank, and the words that the others and itself must get; {odd} is its number."""

    expected: str
    others: tuple[str, ...]
    odd: tuple[str, ...]
    # Where they differ: our own transports see who never came, and shared memory sees what became of its process.
    others_on: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    act: Callable[[], None] | None = None  # done in attend() by the odd rank
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the call, on every rank
    odd_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: bool = True  # the odd rank makes the call
    needs_processes: bool = False
    group_lives: bool = True  # the group serves further calls

    def words(self, transport: str, is_odd: bool, odd: int) -> list[str]:
        """What this rank's text must hold."""
        others = self.others_on.get(transport, self.others)
        return [word.format(odd=odd) for word in (self.odd if is_odd else others)]


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    time.sleep(SLOW_S)


def _raise() -> None:
    raise ArithmeticError("a fault on purpose")


_ENDED = "exit code -9"
_STOPPED = "stopped, and ended when every other rank had answered"
_NO_CALL = "made no call"
_LOST = ("[CP062]", "rank {odd} has not reported: it ended, is stopped, or is not in this call")

# Those after which the group lives come first: they share one world.
SCENARIOS = {
    "slow": Scenario("every rank waits and gets the right numbers", (RIGHT,), (RIGHT,), act=_sleep),
    "raises": Scenario(
        'under agreement="always" every rank raises, naming the rank and its error',
        ("[CP067]", "attend() failed on rank {odd}: ArithmeticError: a fault on purpose"),
        ("ArithmeticError: a fault on purpose",),
        act=_raise,
        options={"agreement": "always"},
    ),
    "disagrees": Scenario(
        "every rank raises, naming the rank, the argument and both values",
        ("[CP060]", "is_causal", "rank {odd} has True"),
        ("[CP060]", "is_causal", "rank {odd} has True"),
        options={"agreement": "always"},
        odd_options={"is_causal": True},
    ),
    "killed": Scenario(
        "every survivor raises, naming the rank that is lost",
        _LOST,
        (_ENDED,),
        others_on={"shm": ("[CP062]", "for rank {odd}, whose process ", "ended; its last call was ")},
        act=_kill_self,
        needs_processes=True,
        group_lives=False,
    ),
    "stopped": Scenario(
        "every other rank raises after the group's timeout, naming the rank that is lost",
        _LOST,
        (_STOPPED,),
        others_on={"shm": ("[CP062]", "for rank {odd}, which never came", "is stopped; its last call was ")},
        act=_stop_self,
        needs_processes=True,
        group_lives=False,
    ),
    "never calls": Scenario(
        "every other rank raises after the group's timeout, naming the rank that never came",
        _LOST,
        (_NO_CALL,),
        others_on={
            "threads": ("[CP062]", "for rank {odd}, which never came"),
            "shm": ("[CP062]", "for rank {odd}, which never came", "is running; its last call was "),
        },
        calls=False,
        group_lives=False,
    ),
}


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)


def _call(rank: int, group: ProcessGroup, act: Callable[[], None] | None = None, **options: Any) -> str:
    """One call on this rank: RIGHT, how far its numbers are off, or its error."""
    world, rows = group.size(), 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, rows * world, world, 8, generator=generator, dtype=torch.float64)
    mine = slice(rows * rank, rows * (rank + 1))
    local_q, local_k, local_v = (x[:, mine].float() for x in (q, k, v))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttendCall) -> torch.Tensor:
        if act is not None:
            act()
        return _attention(q, k, v, call.is_causal)

    try:
        out = ulysses_attention(local_q, local_k, local_v, group, kernel=attend, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    weights = torch.einsum("bqhd,bkhd->bhqk", q[:, mine], k).div(8**0.5).softmax(-1)
    assert isinstance(out, torch.Tensor)
    off = float((torch.einsum("bhqk,bkhd->bqhd", weights, v) - out).abs().max())
    return RIGHT if off < 1e-5 else f"wrong numbers, off by {off:.3g}"


def _fault_on_rank(rank: int, group: ProcessGroup, name: str) -> tuple[str, str, float]:
    """(text of a plain call, text of the call with the fault, its seconds)"""
    scenario, is_odd = SCENARIOS[name], rank == group.size() - 1
    plain = _call(rank, group)
    start = time.monotonic()
    if is_odd and not scenario.calls:
        text = _NO_CALL
    elif is_odd:
        text = _call(rank, group, scenario.act, **scenario.options | scenario.odd_options)
    else:
        text = _call(rank, group, **scenario.options)
    return plain, text, time.monotonic() - start


def _plain_in_process(rank: int, group: ProcessGroup) -> str:
    return _call(rank, group)


def _fault_in_process(rank: int, world_group: ProcessGroup, name: str) -> None:
    # A group of its own has the short timeout: the start of processes may take longer on a busy machine.
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    post(_fault_on_rank(rank, group, name))


def _is_running(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


class _Outcome:
    """What came back from the ranks of one scenario."""

    def __init__(self, world: int) -> None:
        self.texts = [NO_ANSWER] * world
        self.seconds = 0.0
        self.problems: list[str] = []

    def take(self, rank: int, plain: str, text: str, seconds: float) -> None:
        self.texts[rank] = text
        if plain != RIGHT:
            self.problems.append(f"rank {rank}, before the fault: {plain}")
        if rank != len(self.texts) - 1:
            self.seconds = max(self.seconds, seconds)

    def expect_right(self, texts: list[str]) -> None:
        self.problems += [f"rank {r}, a plain call afterwards: {text}" for r, text in enumerate(texts) if text != RIGHT]


def _over_processes(ranks: ProcessRanks, name: str) -> _Outcome:
    """One scenario in the processes of `ranks`; a world that it loses is ended, and another one is started."""
    outcome, odd = _Outcome(ranks.world), ranks.world - 1
    pids: set[int] = set()

    def on_post(rank: int, value: tuple[str, str, float]) -> None:
        outcome.take(rank, *value)
        pids.update(ranks.pids)
        if name == "stopped" and NO_ANSWER not in outcome.texts[:odd]:
            os.kill(ranks.pids[odd], signal.SIGKILL)  # it would never answer
            outcome.texts[odd] = _STOPPED

    try:
        ranks.run(_fault_in_process, name, timeout_s=2 * LIMIT_S, on_post=on_post, grace_s=LIMIT_S)
    except RankError as error:
        for rank, report in error.reports.items():
            if outcome.texts[rank] == NO_ANSWER:
                outcome.texts[rank] = report
    except TimeoutError as error:
        outcome.problems.append(str(error))
    if not SCENARIOS[name].group_lives:
        ranks.close()
        outcome.problems += [f"process {pid} is still running" for pid in sorted(pids) if _is_running(pid)]
    outcome.expect_right(ranks.run(_plain_in_process, timeout_s=2 * LIMIT_S))
    return outcome


def _over_threads(world: int, name: str) -> _Outcome:
    outcome = _Outcome(world)
    for rank, value in enumerate(
        run_ranks(lambda r, group: _fault_on_rank(r, group, name), world, timeout_s=TIMEOUT_S)
    ):
        outcome.take(rank, *value)
    outcome.expect_right(run_ranks(_call, world, timeout_s=TIMEOUT_S))
    return outcome


def _judge(name: str, transport: str, outcome: _Outcome) -> FaultResult:
    scenario, problems = SCENARIOS[name], list(outcome.problems)
    world = len(outcome.texts)
    for rank, text in enumerate(outcome.texts):
        missing = [word for word in scenario.words(transport, rank == world - 1, world - 1) if word not in text]
        if missing:
            problems.append(f"rank {rank} did not get {missing}")
    if outcome.seconds > LIMIT_S:
        problems.append(f"the slowest rank took {outcome.seconds:.1f} s of {LIMIT_S:.0f}")
    return FaultResult(
        name,
        transport,
        world,
        scenario.expected,
        "wrong" if problems else "ok",
        outcome.seconds,
        tuple(outcome.texts),
        "; ".join(problems),
    )


def run_faults(
    world: int = 3, transport: str = "gloo", on_result: Callable[[FaultResult], None] | None = None
) -> list[FaultResult]:
    """Give the last rank of a world one fault after the other, and judge what every rank is told.

    Each scenario begins with a plain call and ends with one, in a new world where the fault costs the world.
    transport: "gloo" or "shm", processes of this machine; or "threads", where a rank can be neither
            killed nor stopped alone, so that those two have no result.
    Units:  half a minute over processes, which are started four times; ten seconds on threads. A scenario ends after
            20 s.
    Errors: ValueError for fewer than two ranks (CP006) or another transport (CP033). A fault that goes wrong is a
            result, not an error.
    """
    if world < 2:
        raise ValueError(
            f"[run_faults] world={world} has no rank that could see another's fault. Fix: world=2. [CP006]"
        )
    if transport not in TRANSPORTS:
        raise ValueError(f'[run_faults] transport="{transport}" is unknown. Fix: "gloo", "shm" or "threads". [CP033]')
    results = []
    with ProcessRanks(world, backend=PROCESS_BACKENDS.get(transport, "gloo")) as ranks:
        for name, scenario in SCENARIOS.items():
            if transport == "threads" and scenario.needs_processes:
                continue
            outcome = _over_threads(world, name) if transport == "threads" else _over_processes(ranks, name)
            results.append(_judge(name, transport, outcome))
            if on_result is not None:
                on_result(results[-1])
    return results
