"""Faults of one rank: the others hear who and what, in time, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import re

import pytest

from refusals import assert_text
from ulysses_attention.doctor import faults
from ulysses_attention.doctor.faults import FaultResult, run_faults
from ulysses_attention.launch import ProcessRanks

WORLD, ODD = 3, 2
ON_THREADS = ["slow", "raises", "disagrees", "never calls"]  # one thread can be neither killed nor stopped
ON_PROCESSES = ["slow", "raises", "disagrees", "killed", "stopped", "never calls"]


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], FaultResult]:
    """All faults on every transport, by (transport, scenario)."""
    children = set(multiprocessing.active_children())  # in no order
    results: list[FaultResult] = []
    for transport in ("threads", "gloo", "shm"):
        before = len(results)
        assert run_faults(WORLD, transport, results.append) == results[before:]
    assert set(multiprocessing.active_children()) == children  # eight worlds of processes, and none is left
    return {(result.transport, result.scenario): result for result in results}


def test_every_fault_ends_well(found: dict[tuple[str, str], FaultResult]) -> None:
    on_processes = [(transport, name) for transport in ("gloo", "shm") for name in ON_PROCESSES]
    assert list(found) == [*(("threads", name) for name in ON_THREADS), *on_processes]
    for result in found.values():
        assert (result.verdict, result.problem) == ("ok", ""), result
        assert len(result.texts) == result.world == WORLD


OF_ITSELF = {
    "killed": "the process ended without an answer: exit code -9",
    "stopped": "stopped, and ended when every other rank had answered",
    "never calls": "made no call",
}


def _error(text: str) -> str:
    return text.removeprefix("RuntimeError: ")


@pytest.mark.parametrize("transport", ["threads", "gloo", "shm"])
def test_a_slow_rank_is_waited_for(found: dict[tuple[str, str], FaultResult], transport: str) -> None:
    result = found[transport, "slow"]
    assert result.texts == ("right numbers",) * WORLD
    assert result.seconds >= faults.SLOW_S  # the others did wait: a sleep is never shorter


@pytest.mark.parametrize("transport", ["threads", "gloo", "shm"])
def test_cp067_a_rank_that_raises_is_named_with_its_error(
    found: dict[tuple[str, str], FaultResult], transport: str
) -> None:
    texts = found[transport, "raises"].texts
    assert texts[ODD] == "ArithmeticError: a fault on purpose"
    for text in texts[:ODD]:
        assert_text(_error(text), "CP067", "failed on rank 2: ArithmeticError: a fault on purpose", "still usable")


@pytest.mark.parametrize("transport", ["threads", "gloo", "shm"])
def test_cp060_a_rank_with_another_argument_is_named_with_both_values(
    found: dict[tuple[str, str], FaultResult], transport: str
) -> None:
    for text in found[transport, "disagrees"].texts:
        assert_text(_error(text), "CP060", "ranks disagree on is_causal", "rank 0 has False", "rank 2 has True")


@pytest.mark.parametrize("fault", ["killed", "stopped", "never calls"])
def test_cp062_a_lost_process_is_named_and_so_is_who_failed_too(
    found: dict[tuple[str, str], FaultResult], fault: str
) -> None:
    result = found["gloo", fault]
    for rank, text in enumerate(result.texts[:ODD]):
        lost = "rank 2 has not reported: it ended, is stopped, or is not in this call"
        also = f"rank {1 - rank} failed in rows_to_ranks too"
        assert_text(_error(text), "CP062", "torch.distributed failed in rows_to_ranks: ", lost, also)
    assert result.texts[ODD] == OF_ITSELF[fault]
    if fault != "killed":  # a lost connection is seen at once, a silent rank after the time of the group
        assert result.seconds >= faults.TIMEOUT_S


@pytest.mark.parametrize(
    ("fault", "words", "last_call"),
    [
        ("killed", r"rank [01] waits in all_to_all for rank 2, whose process \d+ ended; ", "number 5"),
        ("stopped", r"waited 5000 ms in all_to_all for rank 2, which never came .* is stopped; ", "number 5"),
        ("never calls", r"waited 5000 ms in all_gather for rank 2, which never came .* is running; ", "number 3"),
    ],
)
def test_cp062_shared_memory_says_what_became_of_the_process_and_what_it_did_last(
    found: dict[tuple[str, str], FaultResult], fault: str, words: str, last_call: str
) -> None:
    result = found["shm", fault]
    for text in result.texts[:ODD]:
        assert_text(_error(text), "CP062", f"its last call was all_to_all, {last_call}", "no longer usable")
        assert re.search(words, text), text
    assert result.texts[ODD] == OF_ITSELF[fault]
    if fault != "killed":
        assert result.seconds >= faults.TIMEOUT_S


def test_cp062_a_thread_that_never_comes_is_named(found: dict[tuple[str, str], FaultResult]) -> None:
    texts = found["threads", "never calls"].texts
    assert texts[ODD] == "made no call"
    for text in texts[:ODD]:
        assert_text(_error(text), "CP062", "waited 5000 ms in all_gather for rank 2, which never came")


def test_a_fault_that_others_do_not_hear_of_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without agreement="always" nobody tells thread ranks that catch the error: the others wait for the timeout."""
    raises = faults.dataclasses.replace(faults.SCENARIOS["raises"], options={}, group_lives=False)
    never = faults.dataclasses.replace(faults.SCENARIOS["slow"], act=None, others=("other numbers",))
    monkeypatch.setattr(faults, "SCENARIOS", {"raises": raises, "slow": never})
    monkeypatch.setattr(faults, "TIMEOUT_S", 2.0)
    wrong, also_wrong = run_faults(2, "threads")
    assert wrong.verdict == "wrong" and "rank 0 did not get ['[CP067]'" in wrong.problem
    assert also_wrong.verdict == "wrong" and also_wrong.problem == "rank 0 did not get ['other numbers']"


def test_a_late_answer_and_wrong_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "SCENARIOS", {"slow": faults.SCENARIOS["slow"]})
    monkeypatch.setattr(faults, "LIMIT_S", 1.0)
    (late,) = run_faults(2, "threads")
    assert late.verdict == "wrong" and re.fullmatch(r"the slowest rank took \d+\.\d s of 1", late.problem)
    attention = faults._attention
    monkeypatch.setattr(faults, "_attention", lambda *call: attention(*call) + 1)
    monkeypatch.setattr(faults, "LIMIT_S", 10.0)
    (off,) = run_faults(2, "threads")
    assert off.verdict == "wrong" and "rank 1, before the fault: wrong numbers, off by 1" in off.problem
    assert "rank 0, a plain call afterwards: wrong numbers" in off.problem


def test_a_world_that_cannot_have_the_fault_is_refused() -> None:
    launches = ProcessRanks.launches
    with pytest.raises(ValueError, match=r"world=1 .* Fix: world=2\. \[CP006\]"):
        run_faults(1, "gloo")
    with pytest.raises(ValueError, match=r'transport="mpi" .* Fix: "gloo", "shm" or "threads"\. \[CP033\]'):
        run_faults(2, "mpi")
    assert ProcessRanks.launches == launches
