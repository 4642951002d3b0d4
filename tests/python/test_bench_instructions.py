"""The comparison of instruction counts: what it reads from callgrind's dumps, and when it fails."""

from __future__ import annotations

import importlib.util

from conftest import REPOSITORY

SPEC = importlib.util.spec_from_file_location("count", REPOSITORY / "bench" / "instructions" / "count.py")
assert SPEC is not None and SPEC.loader is not None
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


def _dump(trigger: str, instructions: int) -> str:
    return f"version: 1\ndesc: Trigger: {trigger}\npart: 1\nevents: Ir\nsummary: {instructions}\n\nfn=(1) main\n1 2\n"


def test_what_happens_once_cancels() -> None:
    once, each = 7_000, 523
    dumps = [_dump(f"Client Request: cpp_forward {n}", once + n * each) for n in (200, 100)]
    assert bench.per_call([*dumps, _dump("Program termination", 99)]) == {"cpp_forward": each}


def test_a_rise_over_five_percent_fails_with_both_numbers() -> None:
    lines, good = bench.compare({"cpp_forward": 1051, "op_forward": 1050}, {"cpp_forward": 1000, "op_forward": 1000})
    assert not good
    assert "1051" in lines[0] and "baseline 1000 (+5.10%): more than 5% above" in lines[0]
    assert lines[1] == "op_forward: 1050 instructions per call, baseline 1000 (+5.00%)"


def test_fewer_are_fine_and_a_call_that_is_missing_is_not() -> None:
    assert bench.compare({"cpp_forward": 500}, {"cpp_forward": 1000})[1]
    assert not bench.compare({}, {"cpp_forward": 1000})[1]
    assert not bench.compare({"cpp_forward": 1, "op_forward": 1}, {"cpp_forward": 1})[1]


def test_the_stored_baseline_has_the_four_calls() -> None:
    baseline = bench.json.loads(bench.BASELINE.read_text())
    calls = {f"{call}_{passes}" for call in ("cpp", "op") for passes in ("forward", "forward_backward")}
    assert set(baseline["instructions_per_call"]) == calls and baseline["built_with"].startswith("torch ")
