"""The command line: what it hands to the core and what it returns."""

from __future__ import annotations

import types
from typing import Any

import pytest

import ulysses_attention
from ulysses_attention import UlyssesContextParallelPolicy, cli


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def check_report(*arguments: Any) -> tuple[str, int]:
        seen.append(arguments)
        return "report", 1

    core = types.SimpleNamespace(
        check_report=check_report,
        render_guide=lambda: "guide\n",
        render_errors=lambda: "errors\n",
        render_capability_page=lambda: "table\n",
    )
    monkeypatch.setattr(ulysses_attention, "_C", core)
    return seen


def test_check_hands_over_numbers_and_policy(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    line = "check --seq-len 3000 --cp-size 4 --heads 30 --kv-heads 6 --pad-multiple 1 --auto-pad false"
    assert cli.main(line.split()) == 1
    assert calls == [(3000, 4, 30, 6, UlyssesContextParallelPolicy(pad_multiple=1, auto_pad=False).text)]
    assert capsys.readouterr().out == "report\n"


def test_kv_heads_are_left_to_the_core_where_not_given(calls: list[Any]) -> None:
    cli.main(["check", "--seq-len", "64", "--cp-size", "2", "--heads", "8"])
    assert calls == [(64, 2, 8, None, UlyssesContextParallelPolicy().text)]


@pytest.mark.parametrize(
    ("option", "value"), [("--pad-mutliple", "1"), ("--pad-multiple", "one"), ("--auto-pad", "yes")]
)
def test_a_wrong_policy_field_is_wrong_usage(
    option: str, value: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["check", "--seq-len", "64", "--cp-size", "2", "--heads", "8", option, value])
    assert caught.value.code == 2 and not calls
    assert option in capsys.readouterr().err


def test_check_and_guide_run_on_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--seq-len", "3008", "--cp-size", "4", "--heads", "8"]) == 0
    assert (
        cli.main(
            ["check", "--seq-len", "3000", "--cp-size", "4", "--heads", "30", "--kv-heads", "6", "--auto-pad", "false"]
        )
        == 1
    )
    text = capsys.readouterr().out
    assert "[CP011]" in text and "3008" in text
    assert cli.main(["guide"]) == 0 and cli.main(["guide", "--errors"]) == 0 and cli.main(["guide", "--table"]) == 0
    text = capsys.readouterr().out
    assert "CP062" in text and "context_parallel_attention" in text


@pytest.mark.parametrize(("option", "text"), [([], "guide\n"), (["--errors"], "errors\n"), (["--table"], "table\n")])
def test_guide_prints_what_the_core_renders(
    option: list[str], text: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["guide", *option]) == 0
    assert capsys.readouterr().out == text


def test_demo_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulysses_attention import demo

    monkeypatch.setattr(demo, "main", lambda argv: 7 if argv == ["--steps", "3", "--threads"] else 0)
    assert cli.main(["demo", "--steps", "3", "--threads"]) == 7
