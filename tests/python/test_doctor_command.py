"""`ulysses doctor` and `ulysses repro`: targets, files, exit statuses, and what wrong usage is told."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY
from ulysses_attention import cli
from ulysses_attention.doctor import schema
from ulysses_attention.doctor.run import case_line

MODULE = """
import time

import torch
import torch.nn.functional as F
from ulysses_attention import UlyssesAttentionProcessor

number = 7


def local(q, k, v, group):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def waits(q, k, v, group):
    while group.rank() == 1:
        time.sleep(0.01)
    return q


class Mine(UlyssesAttentionProcessor):
    def attend(self, q, k, v, call):
        return local(q, k, v, None)


class Plain:
    pass
"""
SHARDS = ("lengths", "padded_lengths", "kv_lengths")
SENTENCE = "each rank attends only to its own tokens: keys 8-15 never influence queries 0-7"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's, as the current one."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def _ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout on one line, stderr."""
    status = cli.main(arguments)
    shown = capsys.readouterr()
    return status, " ".join(shown.out.split()), shown.err


def test_every_registered_backend_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, progress = _ask(capsys, "doctor", "--quick")
    assert status == 0
    assert "ulysses doctor ulysses" in out and "right, or refused clearly" in out
    assert "allgather_kv W=4:" in progress


@pytest.mark.parametrize("target", ["mine.py:local", "mine:local"])
def test_a_wrong_function_has_its_sentence_in_terminal_json_and_page(
    target: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", "r.json", "--html", "r.html"]
    status, out, _ = _ask(capsys, "doctor", target, "--quick", "--world", "2", *files)
    assert status == 1 and SENTENCE in out
    report = schema.load("r.json")
    assert [finding["sentence"] for finding in report["findings"]] == [SENTENCE]
    assert report["worlds"] == [2] and report["target"] == target
    assert {case["verdict"] for case in report["cases"]} == {"ok", "wrong", "refused"}
    # Two ranks of which one holds every token: local keys are all keys.
    assert {case["feature"] for case in report["cases"] if case["verdict"] == "ok"} == {"empty_shards"}
    assert SENTENCE in Path("r.html").read_text()


def test_a_class_and_the_cases_that_are_asked_for(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, _ = _ask(capsys, "doctor", "mine.py:Mine", "--cases", "grouped_kv/*/W4/float64/*", "--json", "r.json")
    report = schema.load("r.json")
    assert status == 0 and report["probes"] == []
    assert {(case["feature"], case["cp_size"], case["dtype"]) for case in report["cases"]} == {
        ("grouped_kv", 4, "float64")
    }
    assert {case["strategy"] for case in report["cases"]} == {"ulysses", "allgather_kv"}


WRONG_USAGE = {
    "nobody": "'nobody' is no registered backend (ulysses",
    "mine.py:absent": "has no 'absent'. Fix: one of",
    "gone.py:x": "no file gone.py",
    "gone:x": "no module 'gone'",
    "mine.py:number": "mine.py:number is a int. Fix: a function or a class",
    "mine.py:Plain": "Plain does not inherit UlyssesAttentionProcessor",
    "peer:nobody": "target='peer:nobody' is no known library",
    "ulysses --cases nothing*": "--cases 'nothing*' matches no case",
    "ulysses --transport shm": "Fix: --transport threads, or gloo",
    "peer:diffusers --transport threads": "Fix: --transport gloo",
}


@pytest.mark.parametrize("arguments", WRONG_USAGE)
def test_wrong_usage_is_status_2_and_says_what_is_right(
    arguments: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _ask(capsys, "doctor", *arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith("ulysses doctor: ") and WRONG_USAGE[arguments] in err


@pytest.mark.parametrize("worlds", ["0", "2,", "two", "65"])
def test_numbers_of_ranks_are_positive(worlds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--world", worlds])
    assert stopped.value.code == 2
    assert "is no list of numbers of ranks" in capsys.readouterr().err


def test_repro_lines_give_the_same_verdict_again(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _ask(capsys, "doctor", "mine.py:local", "--quick", "--json", "r.json")
    cases: dict[str, Any] = {case["verdict"]: case for case in schema.load("r.json")["cases"]}
    for verdict in ("ok", "wrong", "refused"):
        status, out, _ = _ask(capsys, *shlex.split(cases[verdict]["repro"])[1:])
        assert status == (1 if verdict == "wrong" else 0)
        assert out.startswith(f"{cases[verdict]['id']}: {verdict}")
        assert (SENTENCE in out) == (verdict == "wrong") or cases[verdict]["cp_size"] == 4


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"target": "ulysses", "transport": "threads", "case": {"cp_size": 3}}),
        json.dumps({"target": "ulysses", "transport": "threads", "case": {"colour": 3}}),
        json.dumps({"target": "ulysses", "transport": "threads", "case": {"cp_size": "many"}}),
        json.dumps({"target": "ulysses", "transport": "pigeons", "case": {"lengths": [8, 8]}}),
    ],
)
def test_repro_of_a_damaged_line_is_wrong_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _ask(capsys, "repro", line)
    assert (status, out) == (2, "") and err.startswith("ulysses repro: ")


def test_a_thread_that_never_comes_back_does_not_crash_the_command(mine: Path) -> None:
    line = case_line("mine.py:waits", "threads", {key: [8, 8] for key in SHARDS})
    command = [sys.executable, "-m", "ulysses_attention.cli", *shlex.split(line)[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert ": hung\n" in done.stdout and "no answer within 5 s" in done.stdout


def _torchrun(world: int, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = ["torchrun", "--standalone", "--nproc-per-node", str(world), "-m", "ulysses_attention.cli", "doctor"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, cwd=cwd, env={**os.environ, "PATH": path}
    )


def test_under_torchrun_its_ranks_are_asked_and_one_speaks(mine: Path) -> None:
    right = _torchrun(3, "mine.py:Mine", "--quick", "--json", "r.json", cwd=mine)
    assert right.returncode == 0, right.stderr
    assert right.stdout.count("right, or refused clearly") == 1
    report = schema.load(mine / "r.json")
    assert (report["worlds"], report["transport"]) == ([3], "torchrun")
    wrong = _torchrun(2, "mine.py:local", "--quick", cwd=mine)
    assert wrong.returncode != 0
    assert SENTENCE in " ".join(wrong.stdout.split())


def test_the_committed_document_of_other_libraries_names_what_was_found() -> None:
    """docs/peers.md is made by `make peers-report`, which the tests do not run; what it must hold stands there."""
    text = (REPOSITORY / "docs" / "peers.md").read_text()
    for sentence in (
        "each rank attends only to its own tokens",
        "the replicated text counts 2 times in the softmax",
        "with dropout the backward belongs to another forward",
    ):
        assert sentence in text
    assert "diffusers 0.42.1" in text
