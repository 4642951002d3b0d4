"""ulysses-check, the native program: exit 0 no problem, 1 problems, 2 wrong usage."""

from __future__ import annotations

import subprocess

import pytest

from conftest import REPOSITORY

PROGRAM = REPOSITORY / "build" / "dev" / "tools" / "ulysses-check"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PROGRAM), *arguments], capture_output=True, text=True)


def test_a_legal_configuration_is_exit_0() -> None:
    done = check("--seq-len", "3008", "--cp-size", "4", "--heads", "30", "--kv-heads", "6")
    assert done.returncode == 0 and "752" in done.stdout


def test_a_problem_is_exit_1_with_its_id() -> None:
    done = check("--seq-len", "3000", "--cp-size", "4")
    assert done.returncode == 1 and "[CP011]" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seq-len", "99999999999999999999", "--cp-size", "4"],  # beyond 64 bits: never another number
        ["--seq-len", "3008", "--cp-size", "4", "--pad-multiple", "99999999999999999999"],
        ["--seq-len", "3008.5", "--cp-size", "4"],
        ["--seq-len", "3008"],
        ["--unknown"],
    ],
)
def test_wrong_usage_is_exit_2(arguments: list[str]) -> None:
    done = check(*arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr != ""


@pytest.mark.parametrize(
    ("flag", "file"), [("--guide", "guide.md"), ("--errors", "errors.md"), ("--table", "capabilities.md")]
)
def test_it_prints_the_committed_documents(flag: str, file: str) -> None:
    assert check(flag).stdout == (REPOSITORY / "docs" / file).read_text()
