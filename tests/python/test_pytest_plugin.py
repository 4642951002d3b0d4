"""The doctor as tests of an author's suite: what passes, what fails and with which text, and what is selected."""

from __future__ import annotations

import json
import multiprocessing
import shlex
import subprocess
import sys
from typing import Any

import pytest

from ulysses_attention import _C, backends, cli
from ulysses_attention.launch import ProcessRanks
from ulysses_attention.pytest_plugin import ulysses_conformance
from ulysses_pytest import matches

LOCAL = "each rank attends only to its own tokens: keys 8-15 never influence queries 0-7"
PLAIN = "equal_shards/allgather_kv/W2/float32/S16-H4-B2"
SUITE = """
import time

import torch
from ulysses_attention import UlyssesAttentionProcessor, ulysses_attention
from ulysses_attention.pytest_plugin import ulysses_conformance


class Right(UlyssesAttentionProcessor):
    def attend(self, q, k, v, call):
        k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2) for x in (k, v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(q.size(3) ** -0.5).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)


class Local(Right):
    def attend(self, q, k, v, call):
        own = slice(int(call.q_positions[0]), int(call.q_positions[-1]) + 1)
        return super().attend(q, k[:, own], v[:, own], call)


def built_in(q, k, v, group, **options):
    with open("calls.txt", "a") as file:
        file.write(f"{v.size(3)} of v\\n")
    return ulysses_attention(q, k, v, group, **options)


def wrong_scale(q, k, v, group, **options):
    return built_in(1.1 * q, k, v, group, **options)


def trains_not(q, k, v, group, **options):
    if q.requires_grad:
        raise NotImplementedError("the backward is not supported")
    return wrong_scale(q, k, v, group, **options)


def waits(q, k, v, group):
    while group.rank() == 1:
        time.sleep(0.01)
    return q


def test_of_the_author():
    pass


"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> Any:
    """suite(call, *options): runs a suite whose test_mine = ulysses_conformance(call), in this process."""

    def run(call: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_author=f"{SUITE}test_mine = ulysses_conformance({call})\n")
        return pytester.runpytest_inprocess("-p", "ulysses_pytest", "-p", "no:cacheprovider", *options)

    return run


def test_a_right_processor_passes_one_item_per_case_and_probe(suite: Any) -> None:
    before = set(backends())
    result = suite("Right, worlds=(2,), quick=True", "-k", "test_mine")
    assert set(backends()) == before  # the class was registered for as long as it was examined
    plain_in_bfloat16 = 1
    for_each_strategy = len(_C.probe_names()) + len(_C.capabilities("ulysses")) + plain_in_bfloat16
    result.assert_outcomes(passed=len(_C.known_strategies()) * for_each_strategy, deselected=1)


def test_a_wrong_processor_fails_with_the_diagnosis_and_no_traceback(
    suite: Any, pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    result = suite(f"Local, cases='{PLAIN}'")
    result.assert_outcomes(passed=1, failed=1)
    lines = result.outlines
    begin = lines.index(LOCAL)
    assert lines[begin - 1].strip("_ ") == f"test_mine[{PLAIN}]"
    assert lines[begin + 1] == f"case: {PLAIN}: wrong"
    assert lines[begin + 2].startswith("where: out is off by ")
    assert lines[begin + 2].endswith("in tokens 0-15, heads 0-3, ranks 0-1")
    assert lines[begin + 3] == "checklist: 2. K and V are global: a query sees the keys of every rank"
    assert lines[begin + 4].startswith("guide: docs/guide.md#")
    assert lines[begin + 6].startswith("====")  # nothing more: no traceback
    again = shlex.split(lines[begin + 5].removeprefix("again: "))
    assert json.loads(again[2])["target"] == "test_author.py:Local"
    capsys.readouterr()
    assert again[0] == "ulysses" and cli.main(again[1:]) == 1
    assert LOCAL in capsys.readouterr().out


def test_a_wrong_probe_fails_with_the_diagnosis_and_its_own_line(suite: Any) -> None:
    result = suite("Local, cases='probe/*/allgather_kv/W2'", "-k", "reach and not (causal or cross) or identity")
    result.assert_outcomes(passed=1, failed=1, deselected=len(_C.probe_names()) - 1)
    name = "test_mine[probe/reach/allgather_kv/W2]"
    lines = result.outlines
    assert lines[lines.index(LOCAL) + 1] == "case: probe/reach/allgather_kv/W2: wrong"
    assert f"again: pytest 'test_author.py::{name}'" in lines


def test_items_are_selected_by_name_and_by_the_option(suite: Any) -> None:
    result = suite("Right, worlds=(2, 3), quick=True", "-k", "grouped_kv and W3")
    assert result.parseoutcomes()["passed"] == 2
    result = suite("Right, worlds=(2, 3), quick=True", "--ulysses-cases=grouped_kv/*/W3/*")
    assert result.parseoutcomes()["passed"] == 2 + 1  # other tests of the suite are not touched
    result = suite("Right, worlds=(2, 3), quick=True", "--ulysses-cases=probe/linearity/*")
    assert result.parseoutcomes()["passed"] == 4 + 1


def test_each_case_runs_in_its_own_item_so_x_stops(suite: Any, pytester: pytest.Pytester) -> None:
    kind, two = "worlds=(2,), quick=True", ("-k", "is_causal or value_head_dim")  # the second has 8 numbers a head
    suite(f"built_in, {kind}", *two).assert_outcomes(passed=2)
    calls = pytester.path / "calls.txt"
    assert set(calls.read_text().splitlines()) == {"16 of v", "8 of v"}
    calls.unlink()
    suite(f"wrong_scale, {kind}", *two, "-x").assert_outcomes(failed=1)
    assert set(calls.read_text().splitlines()) == {"16 of v"}


def test_brackets_stand_for_themselves_in_a_glob_of_cases_and_probes() -> None:
    for cases in ("[ei]*/W2/*", "probe/[a-z]*"):
        with pytest.raises(ValueError, match="matches no id"):
            ulysses_conformance("ulysses", cases=cases)
    assert matches("probe/reach/W2", "*/re?ch/*") and not matches("reach", "[r]each")
    assert matches("[r]each", "[r]*") and not matches("reach", "reac") and not matches("reach", "REACH")


def test_a_refusal_passes_and_is_recorded_but_fails_where_strict(suite: Any, pytester: pytest.Pytester) -> None:
    arguments = "Right, worlds=(2,), quick=True, cases='is_causal/ulysses/*'"
    result = suite(arguments, "-rA", "--junitxml=report.xml")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["refused: *is_causal*CP050]"])
    assert 'name="ulysses_refused"' in (pytester.path / "report.xml").read_text()
    result = suite(f"{arguments}, strict=['is_causal']")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["refused, and strict asks for is_causal: *CP050]", "case: is_causal/*: refused"])


def test_a_refused_backward_hides_no_wrong_forward(suite: Any) -> None:
    result = suite("trains_not, cases='equal_shards/W2/float32/S16-H4-B2'")
    result.assert_outcomes(passed=1, failed=1)
    case = "case: equal_shards/W2/float32/S16-H4-B2-forward: wrong"
    result.stdout.fnmatch_lines(["the softmax scale is 0.275 instead of 0.25", case])


def test_processes_end_with_the_tests_of_their_module(suite: Any) -> None:
    launches, processes = ProcessRanks.launches, len(multiprocessing.active_children())
    result = suite("Local, transport='gloo', cases='equal_shards/*/W2/float32/S16-H4-B2'")
    result.assert_outcomes(passed=2, failed=1)  # with strategy ulysses, the local keys are all keys
    result.stdout.fnmatch_lines([LOCAL])
    assert ProcessRanks.launches == launches + 1
    assert len(multiprocessing.active_children()) == processes


def test_a_thread_that_never_comes_back_does_not_crash_the_session(pytester: pytest.Pytester) -> None:
    case = "equal_shards/W2/float32/S16-H4-B2"
    pytester.makepyfile(test_author=f"{SUITE}test_mine = ulysses_conformance(waits, cases='{case}')\n")
    result = pytester.runpytest_subprocess("-p", "ulysses_pytest", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"case: {case}: hung"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strict": ["causal"]}, r"strict=\['causal'\] names no feature\. Fix: some of .*is_causal"),
        ({"cases": "is_casual/*"}, r"cases='is_casual/\*' matches no id\. Fix: 'is_causal/\*'"),
        ({"transport": "mpi"}, "transport='mpi' is unknown. Fix: threads or gloo"),
    ],
)
def test_what_selects_nothing_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ulysses_conformance("ulysses", **arguments)


def test_the_part_that_every_pytest_run_loads_brings_no_torch() -> None:
    loaded = "import sys, ulysses_pytest; print(sorted({'torch', 'ulysses_attention'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
