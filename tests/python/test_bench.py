"""`make bench`: the table from given samples, the check behind every cell, and what fails shown with its reason."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import REPOSITORY
from oracle import oracle_with_grads
from ulysses_attention import _C
from ulysses_attention.launch import RankError

sys.path.insert(0, str(REPOSITORY / "bench"))

from contest import page, picture, ranks, results
from contest.cells import QUICK, SECTIONS, TOLERANCES, Cell, all_cells
from contest.contestants import CONTESTANTS, CONTROL, KERNEL, Contestant
from contest.measure import Field
from contest.oracle import random_inputs, right_values, stored_values
from contest.ranks import Entrant, Failure, Limits

OURS, RECIPE = "ours: ulysses, cpu_flash", "recipe: four all-to-alls"
TESTED = [c for c in CONTESTANTS if c.is_ours or c.name.startswith("recipe: ")]


def _small(cell: Cell) -> Cell:
    """The same kind of cell, with few tokens and dimensions."""
    return cell._replace(seq_len=32 + cell.seq_len % cell.world, head_dim=16)


SMALL = list(dict.fromkeys(_small(cell) for cell in (*all_cells(SECTIONS), *all_cells(QUICK))))


def _local_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, *, is_causal: bool = False, layout: Any = None
) -> torch.Tensor:
    """Wrong: a rank's own keys only."""
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal, enable_gqa=q.size(2) != k.size(2)
    )
    return out.transpose(1, 2)


class _WrongLater:
    """Right twice, then not."""

    def __init__(self) -> None:
        self.calls, self.right = 0, CONTROL.setup()

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls += 1
        return self.right(*args, **options) * (1.0 if self.calls < 3 else 1.1)


def _set_up_local() -> Any:
    return _local_attention


def _set_up_without_dk() -> Any:
    right = CONTROL.setup()
    return lambda q, k, v, group, **options: right(q, k.detach(), v, group, **options)


LOCAL = Contestant("local", _set_up_local, is_ours=True)
WITHOUT_DK = Contestant("without dk", _set_up_without_dk, is_ours=True)


def _in_a_world_of_the_suite(rank: int, group: Any, contestants: list[Contestant], call: Any) -> Any:
    """set_up() changes settings of the process, which later tests share."""
    threads, level = torch.get_num_threads(), logging.root.manager.disable
    try:
        assert ranks.set_up(rank, group, contestants) == []
        return call(rank, group)
    finally:
        torch.set_num_threads(threads)
        logging.disable(level)
        for contestant in contestants:
            ranks._ATTENTION.pop(contestant.name)


def _try_all(rank: int, group: Any, entrants: list[Entrant]) -> list[float | Failure]:
    return [ranks.try_once(rank, group, entrant) for entrant in entrants]


def _record(**changes: Any) -> dict[str, Any]:
    """Three rounds: the kernel slows down in the last, and ours and the recipe with it."""
    wall = {
        KERNEL: [0.010, 0.010, 0.020],
        OURS: [0.012, 0.011, 0.026],
        RECIPE: [0.011, 0.010, 0.022],
        CONTROL.name: [0.020, 0.020, 0.040],
        results.CONTROL_AGAIN: [0.020, 0.020, 0.040],
    }
    record = {
        "cell": Cell(2, 256)._asdict(),
        "failed": {"diffusers": "ValueError: no such | thing"},
        "wall_s": wall,
        "cpu_s": {label: [time / 2 for time in times] for label, times in wall.items()},
        "error": dict.fromkeys(wall, 0.1),
        "load": {"others_cores": 0.5, "load_average": 2.5},
        "tries": 1,
        "seconds": 3.0,
    }
    return record | changes


def _run(*records: dict[str, Any]) -> dict[str, Any]:
    machine = {
        "processor": "Some CPU",
        "cores": 2,
        "system": "Linux",
        "torch": "2.13.0",
        "ulysses_attention": "0.1.0",
        "libraries": {"diffusers": "0.42.1", "yunchang": None},
        "auto_kernel": {"float32": "cpu_flash"},
        "capability": "AVX512",
    }
    return {"machine": machine, "date": "2026-11-30", "sections": {"A section": list(records)}}


def _line(text: str, begin: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {begin} |"))


def test_ratios_are_medians_of_the_ratio_within_a_round() -> None:
    row = {row.label: row for row in results.rows_of(_record(), [KERNEL, OURS])}[OURS]
    assert row.wall_ms == pytest.approx(12.0) and row.cpu_ms == pytest.approx(6.0)
    assert row.wall_ratio == pytest.approx(1.2)  # of 1.2, 1.1, 1.3
    assert row.cpu_ratio == pytest.approx(1.2) and row.rounds == 3
    slow = _record()
    slow["wall_s"][OURS] = [0.012, 0.020, 0.020]
    assert results.rows_of(slow, [OURS])[0].wall_ratio == pytest.approx(1.2)  # of 1.2, 2.0, 1.0; not 20 ms / 10 ms


def test_losing_cells_stand_there_like_winning_ones() -> None:
    losing = _record()
    winning = _record(wall_s=losing["wall_s"] | {OURS: [0.009, 0.009, 0.018]}, tries=2)
    text = page.render(_run(losing, winning))
    assert _line(text, OURS) == f"| {OURS} | 12 · 1.20 · 1.20 | 9 · 0.90 · 1.20 |"
    assert _line(text, RECIPE) == f"| {RECIPE} | 11 · 1.10 · 1.10 | 11 · 1.10 · 1.10 |"
    assert _line(text, "fastest of ours / of the others") == (
        "| fastest of ours / of the others | 1.10, ours is slower: ulysses, cpu_flash / four all-to-alls "
        "| 0.82, ours is faster: ulysses, cpu_flash / four all-to-alls |"
    )
    assert "; seconds in all | 3; 0.50; 3 | 3; 0.50; 3 |" in text
    assert _line(text, "control, second / first") == "| control, second / first | 1.000 | 1.000, at try 2 |"


def test_a_failed_cell_shows_why_and_a_wrong_output_has_no_time() -> None:
    record = _record()
    record["error"][RECIPE] = 40.0
    text = page.render(_run(record))
    assert _line(text, "diffusers") == "| diffusers | no time [2] |"
    assert _line(text, RECIPE) == f"| {RECIPE} | **wrong** [1] |"
    assert "1. WRONG: 40 times the allowed error" in text and "2. ValueError: no such \\| thing" in text
    assert "yunchang not installed" in text and "cpu_flash for float32" in text and "0.50 to 0.50 cores" in text
    assert results.faults([record]) == []  # theirs are results
    record["error"][OURS] = 2.0
    record["failed"][CONTESTANTS[2].name] = "ValueError: cpu_flash needs AVX2. Fix: kernel='auto' [CP032]"
    assert results.faults([record]) == [f"w2-s256-h8-d64-float32-forward: {OURS}: WRONG: 2 times the allowed error"]


@pytest.mark.parametrize(("second", "held"), [(0.969, False), (0.971, True), (1.029, True), (1.031, False)])
def test_the_control_fails_outside_three_percent(second: float, held: bool) -> None:
    record = _record()
    record["wall_s"][results.CONTROL_AGAIN] = [time * second for time in record["wall_s"][CONTROL.name]]
    assert results.holds(record) == held
    name = "w2-s256-h8-d64-float32-forward"
    fault = f"{name}: the control is {second:.3f}, outside 0.97 to 1.03"
    assert results.faults([record]) == ([] if held else [fault])
    assert ("FAILS in 1 of 1 cells" in page.render(_run(record))) != held


def test_a_control_that_did_not_run_fails_too() -> None:
    record = _record(failed={CONTROL.name: "the process aborts: SIGABRT"})
    del record["wall_s"][results.CONTROL_AGAIN], record["wall_s"][CONTROL.name]
    assert not results.holds(record)
    assert "did not run: the process aborts: SIGABRT" in results.faults([record])[0]


def test_times_without_a_check_of_the_output_are_refused() -> None:
    record = _record()
    del record["error"][RECIPE]
    with pytest.raises(ValueError, match=f"no check of the output of {RECIPE}"):
        page.render(_run(record))


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    picture.draw(_run(_record(), _record()), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_slowest_rank_counts() -> None:
    assert results.worst_of_ranks([{"a": [1.0, 5.0]}, {"a": [3.0, 2.0]}]) == {"a": [3.0, 5.0]}


@pytest.mark.parametrize("count", [1, 2, 7, 15, 16])
def test_every_round_calls_each_once_and_each_is_first_in_turn(count: int) -> None:
    orders = [ranks.order_of_round(number, count) for number in range(count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert sorted(order[0] for order in orders) == list(range(count))


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_the_right_values_of_every_cell(cell: Cell) -> None:
    want = oracle_with_grads(*random_inputs(cell), is_causal=cell.is_causal)
    got = right_values(cell)
    assert set(got) == ({"out", "dq", "dk", "dv"} if cell.backward else {"out"})
    for name, values in got.items():
        assert (values - want[name]).abs().max() <= 1e-12 * want[name].abs().max()


@pytest.mark.parametrize("world", [2, 4])
def test_every_cell_is_checked_and_ours_and_the_recipes_are_right(gloo: Any, tmp_path: Path, world: int) -> None:
    entrants = []
    for cell in (cell for cell in SMALL if cell.world == world):
        assert cell.dtype in TOLERANCES
        able = [c for c in TESTED if (c.is_ours or not cell.is_uneven) and _runs_here(c, cell)]
        right = stored_values(cell, tmp_path)
        wrong = [LOCAL, WITHOUT_DK] if cell.backward else [LOCAL]
        entrants += [Entrant(c.name, c, cell, right) for c in (*able, *wrong)]
        entrants += [Entrant(KERNEL, None, cell, right)]
    call = functools.partial(_try_all, entrants=entrants)
    answers = gloo(world).run(_in_a_world_of_the_suite, [*TESTED, LOCAL, WITHOUT_DK], call)
    for entrant, *errors in zip(entrants, *answers, strict=True):
        assert not any(isinstance(error, Failure) for error in errors), errors
        if entrant.contestant in (LOCAL, WITHOUT_DK):
            assert max(errors) > 1.0, entrant.cell.name
        else:
            assert max(errors) <= 1.0, (entrant.label, entrant.cell.name, errors)


def _runs_here(contestant: Contestant, cell: Cell) -> bool:
    return "cpu_flash" not in contestant.name or _C.auto_kernel(cell.dtype) == "cpu_flash"


def test_every_output_of_every_timed_round_is_checked(gloo: Any, tmp_path: Path) -> None:
    cell = Cell(2, 32, head_dim=16)
    later = Contestant("wrong later", _WrongLater)
    right = stored_values(cell, tmp_path)
    entrants = [Entrant(KERNEL, None, cell, right), *(Entrant(c.name, c, cell, right) for c in (CONTROL, later))]
    call = functools.partial(ranks.time_rounds, entrants=entrants, limits=Limits(0.0, 3, 9, warm_up=False))
    answers = gloo(2).run(_in_a_world_of_the_suite, [CONTROL, later], call)
    for samples in answers:
        assert {label: len(times) for label, times in samples.wall.items()} == dict.fromkeys(samples.wall, 3)
        assert samples.error[CONTROL.name] <= 1.0 and samples.error[KERNEL] <= 1.0
        assert samples.error["wrong later"] > 1.0


class _World:
    """Answers in place of processes."""

    pids = (1, 2)

    def __init__(self, answer: Any, posted: tuple[Failure, ...] = ()) -> None:
        self.answer, self.posted = answer, posted

    def run(self, fn: Any, *args: Any, on_post: Any = None, **options: Any) -> Any:
        if fn is ranks.set_up:
            return [[], []]
        for rank, failure in enumerate(self.posted):
            on_post(rank, failure)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        pass


REFUSAL = Failure("local", "ValueError: 7 heads")


@pytest.mark.parametrize(
    ("answer", "posted", "why"),
    [
        ([0.2, 0.9], (), ""),
        ([0.2, 40.0], (), "WRONG: 40 times the allowed error"),
        ([REFUSAL, REFUSAL], (REFUSAL, REFUSAL), "ValueError: 7 heads"),
        ([REFUSAL, 0.1], (REFUSAL,), "on 1 of 2 ranks: ValueError: 7 heads"),
        (TimeoutError(), (REFUSAL,), "one rank raises and another waits: ValueError: 7 heads"),
        (TimeoutError(), (), "no answer within 60 s"),
        (RankError(0, {0: "the process ended without an answer: exit code -6"}), (), "the process aborts: SIGABRT"),
    ],
)
def test_what_goes_wrong_becomes_a_reason(tmp_path: Path, answer: Any, posted: Any, why: str) -> None:
    field = Field(2, tmp_path)
    field.spare = _World(answer, posted)  # type: ignore[assignment]  (an uneven cell is tried there)
    assert field.attempt(Entrant("local", LOCAL, Cell(2, 33), "")) == why
