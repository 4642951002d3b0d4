"""The C++ test programs: one item per suite in the dev build, one per program in the sanitizer builds."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).resolve().parents[2] / "build"
SUPPRESSIONS = BUILD.parent / "tests" / "cpp" / "tsan_suppressions.txt"
DEV_PROGRAMS = ("core_tests", "ulysses_tests", "flipped_tests")


def program_path(preset: str, name: str) -> Path:
    """Where a preset's build leaves a test program."""
    return BUILD / preset / "tests" / "cpp" / name


def suites(name: str) -> list[str]:
    """The suites that a program of the dev build lists, or [""] if it isn't built: then its item fails."""
    path = program_path("dev", name)
    if not path.exists():
        return [""]
    listing = subprocess.run(
        [path, "--gtest_list_tests"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    # A suite stands at the start of a line and ends with a dot; a parametrized one is followed by a comment.
    return [line.split()[0].rstrip(".") for line in listing.splitlines() if line.split("#")[0].rstrip().endswith(".")]


def run(path: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a test program. One intra-op thread: the ranks are threads, and threads of threads only wait."""
    assert path.exists(), f"{path} is missing: run `make test`"
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([str(word) for word in (path, *arguments)], capture_output=True, text=True, env=env)


def assert_passed(done: subprocess.CompletedProcess[str]) -> None:
    """The program passed and ran something; else its output is the message."""
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert "[  PASSED  ]" in done.stdout and "[  PASSED  ] 0 tests" not in done.stdout, done.stdout[-2000:]


@functools.cache
def results(name: str) -> dict[str, dict[str, Any]]:
    """What each suite of a dev program reported; the program runs once, because loading torch takes a second."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = run(program_path("dev", name), f"--gtest_output=json:{report}")
        assert report.exists(), f"{name} died, exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return {suite["name"]: suite for suite in json.loads(report.read_text())["testsuites"]}


@pytest.mark.parametrize(("program", "suite"), [(name, suite) for name in DEV_PROGRAMS for suite in suites(name)])
def test_cpp_suite(program: str, suite: str) -> None:
    found = results(program)[suite]
    failures = [
        f"{test['name']}: {failure['failure']}" for test in found["testsuite"] for failure in test.get("failures", [])
    ]
    assert failures == []
    assert found["tests"] > 0 and all(test["result"] == "COMPLETED" for test in found["testsuite"])


@pytest.mark.parametrize("features", ["none", "avx2", "avx512"])
def test_our_kernels_suites_pass_on_lesser_processors(features: str) -> None:
    assert_passed(run(program_path("dev", "ulysses_tests"), "--gtest_filter=CpuFlash*", ULYSSES_CPU_FEATURES=features))


@pytest.mark.sanitizer
@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", ["asan", "tsan"])
def test_cpp_suite_is_clean_under(preset: str) -> None:
    done = run(
        program_path(preset, "ulysses_tests"),
        ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        TSAN_OPTIONS=f"second_deadlock_stack=1:suppressions={SUPPRESSIONS}",
    )
    assert_passed(done)
