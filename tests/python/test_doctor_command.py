"""`ulysses doctor` and `ulysses repro`: targets, files, exit statuses, and what wrong usage is told."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY
from ulysses_attention import cli
from ulysses_attention.doctor import run, schema, targets

MODULE = """
import time

import torch
import torch.nn.functional as F
from ulysses_attention import UlyssesAttentionProcessor

number = 7


def local(q, k, v, group):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def takes_all(q, k, v, group, **options):
    return local(q, k, v, group)


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
OTHER_MODULES = {
    "raises": "1 / 0",
    "leaves": "import sys; sys.exit(3)",
    "damaged": "def local(",
    "needs": "import not_there",
    "in_ranks": "import multiprocessing\n\nif multiprocessing.parent_process():\n    1 / 0\n" + MODULE,
}
SHARDS = ("lengths", "padded_lengths", "kv_lengths")
SENTENCE = "each rank attends only to its own tokens: keys 8-15 never influence queries 0-7"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules of the user's, as the current one."""
    for name, text in {"mine": MODULE, **OTHER_MODULES}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
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


def test_processes_over_shared_memory(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--transport", "shm", "--world", "2", "--cases", "equal_shards/*/float32/*", "--json", "r.json"]
    status, out, _ = _ask(capsys, "doctor", "mine.py:local", *files)
    assert status == 1 and SENTENCE in out
    report = schema.load("r.json")
    assert report["transport"] == "shm"
    assert json.loads(shlex.split(report["cases"][0]["repro"])[2])["transport"] == "shm"


WRONG_USAGE = {
    "nobody": "'nobody' is no registered backend (ulysses",
    "mine.py:absent": "has no 'absent'. Fix: one of",
    "gone.py:x": "no file gone.py",
    "gone:x": "no module 'gone'",
    "mine.py:number": "mine.py:number is a int. Fix: a function or a class",
    "mine.py:Plain": "Plain does not inherit UlyssesAttentionProcessor",
    "peer:nobody": "target='peer:nobody' is no known library",
    "ulysses --cases nothing*": "--cases 'nothing*' matches no case",
    "peer:diffusers --transport threads": "Fix: --transport gloo, or shm",
    "raises.py:local": "raises.py cannot be imported: ZeroDivisionError: division by zero",
    "raises:local": "raises cannot be imported: ZeroDivisionError: division by zero",
    "leaves.py:local": "leaves.py cannot be imported: SystemExit: 3",
    "damaged.py:local": "damaged.py cannot be imported: SyntaxError: ",
    "needs.py:local": "needs.py needs not_there, which is not installed",
    "needs:local": "needs needs not_there, which is not installed",
    "in_ranks.py:local --transport gloo --world 2": "in_ranks.py:local cannot be set up on rank",
    "mine.py:local --json absent/r.json": "no folder absent for r.json",
    "mine.py:local --html .": ". cannot be written",
    "ulysses --faults": "--faults tries ranks of our own and takes no ulysses. Fix: leave it out",
    "--faults --world 2 --cases * --quick --json r.json --html r.html": "takes no --world, --cases, --json, --html, "
    "--quick. Fix",
}


@pytest.mark.parametrize("arguments", WRONG_USAGE)
def test_wrong_usage_is_status_2_and_says_what_is_right(
    arguments: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _ask(capsys, "doctor", *arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith("ulysses doctor: ") and WRONG_USAGE[arguments] in err


def test_wrong_usage_is_told_before_the_run(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "examine", lambda *_, **__: pytest.fail("the run began"))
    assert cli.main(["doctor", "mine.py:local", "--json", "absent/r.json"]) == 2


def test_a_number_of_ranks_that_is_given_twice_is_tried_once(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--cases", "is_causal/*", "--world", "3,2,3", "--json", "r.json"]
    assert _ask(capsys, "doctor", "ulysses", *arguments)[0] == 0
    report = schema.load("r.json")
    assert report["worlds"] == [3, 2]
    assert [case["cp_size"] for case in report["cases"]] == [3, 3, 2, 2]  # of two strategies


@pytest.mark.parametrize("name", ["rich", "torch", "functools"])
def test_a_file_named_like_an_installed_module_replaces_none(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(f"import {name} as installed\n{MODULE}")
    before, path = sys.modules[name], list(sys.path)
    target = f"{tmp_path / name}.py:local"
    try:
        assert targets.as_target(target) is not None
        assert sys.modules[name] is before
        (module,) = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == f"{tmp_path / name}.py"]
        assert module.installed is before and sys.modules[module.__name__] is module
        assert pickle.loads(pickle.dumps(module.Plain)) is module.Plain
        assert sys.path == [*path, str(tmp_path)]
    finally:
        sys.path[:] = path


def test_a_file_that_fails_leaves_no_module_and_is_read_again(mine: Path) -> None:
    before = set(sys.modules)
    for _ in range(2):
        with pytest.raises(targets.TargetError, match="ZeroDivisionError"):
            targets.as_target("raises.py:local")
    assert set(sys.modules) == before
    (mine / "raises.py").write_text(MODULE)
    assert targets.as_target("raises.py:local") is not None


def test_a_layout_that_the_doctor_cannot_make_is_not_laid_to_a_function(mine: Path) -> None:
    report = run.examine("mine.py:takes_all", worlds=[2], cases="head_tail_order/*", quick=True)
    (case,) = report["cases"]
    assert case["verdict"] == "refused"
    assert "not asked of takes_all(): the doctor has no layout of order='head_tail' to hand over" in case["message"]


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


def _line(target: Any = "ulysses", transport: str = "threads", **fields: Any) -> str:
    case = {key: [8, 8] for key in SHARDS} | fields
    return json.dumps({"target": target, "transport": transport, "case": case})


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"target": "ulysses", "transport": "threads", "case": [1]}',
        _line(cp_size=3),
        _line(colour=3),
        _line(cp_size="many"),
        _line(dtype="f"),
        _line(transport="pigeons"),
        _line(target=3),
        _line(target="raises.py:local"),
    ],
)
def test_repro_of_a_damaged_line_is_wrong_usage(line: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _ask(capsys, "repro", line)
    assert (status, out) == (2, "") and err.startswith("ulysses repro: ")


def test_a_thread_that_never_comes_back_does_not_crash_the_command(mine: Path) -> None:
    command = [sys.executable, "-m", "ulysses_attention.cli", "repro", _line("mine.py:waits")]
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
    again = [json.loads(shlex.split(case["repro"])[2])["transport"] for case in report["cases"]]
    assert set(again) == {"gloo"}  # a plain shell has no launcher
    wrong = _torchrun(2, "mine.py:local", "--quick", cwd=mine)
    assert wrong.returncode != 0
    assert SENTENCE in " ".join(wrong.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ulysses --world 2", "--world 2 under a launcher that started 3 ranks. Fix: leave --world out"),
        ("ulysses --transport gloo", "transport='gloo' under a launcher, whose ranks are used"),
        ("--faults", "--faults starts ranks of its own. Fix: run it without a launcher"),
    ],
)
def test_under_a_launcher_nothing_is_ignored(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    status, out, err = _ask(capsys, "doctor", *arguments.split())
    assert (status, out) == (2, "") and message in err


def test_the_committed_document_of_other_libraries_names_what_was_found() -> None:
    """docs/peers.md is made by `make peers-report`, which the tests do not run; what it must hold stands there."""
    text = (REPOSITORY / "docs" / "peers.md").read_text()
    for sentence in (
        "each rank attends only to its own tokens",
        "the replicated text counts 2 times in the softmax",
        "with dropout the gradient of v belongs to other weights than the output",
    ):
        assert sentence in text
    assert "diffusers 0.42.1" in text
