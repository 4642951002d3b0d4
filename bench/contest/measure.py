"""One cell: who can do it, then rounds of those who can. What fails becomes a result with its reason."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contest import ranks, results
from contest.cells import Cell
from contest.contestants import CONTROL, KERNEL, Contestant
from contest.machine import Load
from contest.oracle import stored_values
from contest.ranks import Entrant, Failure, Limits
from ulysses_attention.launch import ProcessRanks, RankError

__all__ = ["Field", "measure"]

COLLECTIVE_LIMIT_S = 60.0
CALL_LIMIT_S = 60.0
SET_UP_LIMIT_S = 240.0  # imports of every library, on a busy machine
ROUNDS_LIMIT_S = 1500.0

OnRound = Callable[[int], None]


class Field:
    """The processes of one number of ranks: one world that holds every contestant, and a spare one for first tries that
    may end their processes. What ended is started again."""

    def __init__(self, world: int, folder: Path) -> None:
        self._log = str(folder / "ranks.log")
        self.main = ProcessRanks(world, timeout_s=COLLECTIVE_LIMIT_S)
        self.spare = ProcessRanks(world, timeout_s=COLLECTIVE_LIMIT_S)

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self.main.close()
        self.spare.close()

    def ready(self, world: ProcessRanks, contestants: Sequence[Contestant]) -> list[Failure]:
        """Started and set up; returns who could not be."""
        if not world.pids:
            world.run(ranks.be_quiet, self._log)
        return world.run(ranks.set_up, list(contestants), timeout_s=SET_UP_LIMIT_S)[0]

    def attempt(self, entrant: Entrant) -> str:
        """Why a contestant can't do a cell; empty if it can and is right."""
        assert entrant.contestant is not None
        world = self.spare if entrant.cell.is_uneven else self.main
        posted: list[Failure] = []
        try:
            failed = self.ready(world, [entrant.contestant])
            if failed:
                return failed[0].why
            answers = world.run(
                ranks.try_once, entrant, timeout_s=CALL_LIMIT_S, on_post=lambda rank, failure: posted.append(failure)
            )
        except RankError as error:
            return _short(error)
        except TimeoutError:
            waits = f"no answer within {CALL_LIMIT_S:.0f} s"
            return f"one rank raises and another waits: {posted[0].why}" if posted else waits
        if posted:
            everywhere = len(posted) == len(answers)
            return posted[0].why if everywhere else f"on {len(posted)} of {len(answers)} ranks: {posted[0].why}"
        worst = max(answers)
        return "" if worst <= 1.0 else f"WRONG: {worst:.3g} times the allowed error"


def measure(
    field: Field, cell: Cell, contestants: Sequence[Contestant], folder: Path, limits: Limits, on_round: OnRound
) -> dict[str, Any]:
    """The record of a cell: samples by label (the largest over ranks), errors, and why the others have none."""
    right = stored_values(cell, folder / "right")
    failed: dict[str, str] = {}
    able = []
    for contestant in contestants:
        if contestant.only_uneven and not cell.is_uneven:
            continue
        why = field.attempt(Entrant(contestant.name, contestant, cell, right))
        if why:
            failed[contestant.name] = why
        else:
            able.append(contestant)
    field.spare.close()
    entrants = _entrants(cell, able, folder)
    samples: list[ranks.Samples] = []
    while True:
        field.ready(field.main, able)
        load = Load(field.main.pids)
        try:
            samples = _rounds(field, entrants, limits, on_round)
            break
        except Failed as error:
            failed |= dict.fromkeys(error.labels, error.why)
            gone = {label.removesuffix(results.EVEN) for label in error.labels}
            entrants = [e for e in entrants if e.label not in gone and e.label.removesuffix(results.EVEN) not in gone]
    return {
        "cell": cell._asdict(),
        "failed": failed,
        "wall_s": results.worst_of_ranks([rank.wall for rank in samples]),
        "cpu_s": results.worst_of_ranks([rank.cpu for rank in samples]),
        "error": {label: max(rank.error[label] for rank in samples) for label in samples[0].error},
        "load": load.read(),
    }


class Failed(Exception):
    """Timed rounds that ended early: whose call it was, or all of them where nobody knows."""

    def __init__(self, labels: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.labels, self.why = labels, why


def _entrants(cell: Cell, able: Sequence[Contestant], folder: Path) -> list[Entrant]:
    """The kernel, everyone who can, the control once more; on an uneven cell, all of them on its neighbour too."""
    pairs: list[tuple[str, Contestant | None]] = [(KERNEL, None), *((each.name, each) for each in able)]
    if CONTROL in able:
        pairs.append((results.CONTROL_AGAIN, CONTROL))
    found = []
    for each, mark in ((cell, ""), (cell.neighbour, results.EVEN)):
        if each is not None:
            right = stored_values(each, folder / "right")
            known = [(label, who) for label, who in pairs if not mark or label != results.CONTROL_AGAIN]
            found += [Entrant(label + mark, who, each, right) for label, who in known]
    return found


def _rounds(field: Field, entrants: Sequence[Entrant], limits: Limits, on_round: OnRound) -> list[ranks.Samples]:
    """Errors: Failed."""
    posted: list[Failure] = []

    def hear(rank: int, said: Any) -> None:
        if isinstance(said, Failure):
            posted.append(said)
        else:
            on_round(said)

    try:
        return field.main.run(ranks.time_rounds, list(entrants), limits, timeout_s=ROUNDS_LIMIT_S, on_post=hear)
    except (RankError, TimeoutError) as error:
        if posted and posted[0].label.removesuffix(results.EVEN) not in (KERNEL, results.CONTROL_AGAIN):
            raise Failed([posted[0].label], f"in a timed round: {posted[0].why}") from error
        raise


def _short(error: RankError) -> str:
    """The last line of a rank's report, exit codes in words."""
    line = str(error).strip().splitlines()[-1]
    _, found, code = line.partition("exit code -")
    if found and code.isdigit():
        return f"the process aborts: {signal.Signals(int(code)).name}"
    return line[:300]
