"""The doctor names every wrong backend by what it does, under any name, and accuses no right one."""

from __future__ import annotations

import json
import random
import re
import string
from pathlib import Path
from typing import Any

import pytest

import backend_cases
from ulysses_attention.doctor.run import examine

#: Per mutant: kind and sentence of each finding. "#" is a number without a closed form, "*" the rest of a text.
SENTENCES: dict[str, dict[str, str]] = json.loads((backend_cases.TESTS / "mutant_sentences.json").read_text())
MUTANTS = {path.stem: path for path in backend_cases.MUTANTS}
#: One rank waits for good where the number of tokens is odd: only such a case, or the hang limit counts 12 times.
ONE_CASE = {"waits_forever": "uneven_shards/W2/float32/S15-H4-B2"}


def _examine(path: Path, cases: str = "", quick: bool = True) -> Any:
    module = backend_cases.load(path)
    return examine(getattr(module, "Backend", None) or module.attention, quick=quick, cases=cases)


def _pattern(sentence: str) -> str:
    return re.escape(sentence).replace(r"\#", r"\d+(\.\d+)?(e-\d+)?").replace(r"\*", ".*")


def _assert_named(report: Any, expected: dict[str, str]) -> None:
    assert report["exit_status"] == 1
    given = {finding["kind"]: finding["sentence"] for finding in report["findings"]}
    assert set(given) == set(expected), given
    for kind, sentence in expected.items():
        assert re.fullmatch(_pattern(sentence), given[kind], re.DOTALL), given[kind]


def _renamed(path: Path, folder: Path) -> Path:
    """The file under a random name, its class and function names replaced by random ones."""
    chance = random.Random(path.stem)
    word = lambda: "".join(chance.choices(string.ascii_lowercase, k=9))  # noqa: E731
    text = path.read_text()
    text = re.sub(r'\A"""(.|\n)*?"""', '""""""', text)  # the docstring tells the fault
    for name in sorted(set(re.findall(r"^class (\w+)|^def (\w+)", text, re.MULTILINE)), reverse=True):
        name = name[0] or name[1]
        if name not in ("attention", "Backend"):
            text = re.sub(rf"\b{name}\b", word(), text)
    copy = folder / f"{word()}.py"
    copy.write_text(text)
    return copy


def test_every_mutant_has_its_sentences() -> None:
    assert set(SENTENCES) == set(MUTANTS)
    assert len(MUTANTS) >= 30


@pytest.mark.parametrize("name", MUTANTS)
def test_the_doctor_names_the_fault(name: str) -> None:
    _assert_named(_examine(MUTANTS[name], ONE_CASE.get(name, "")), SENTENCES[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_the_same_sentences_under_other_names(name: str, tmp_path: Path) -> None:
    _assert_named(_examine(_renamed(MUTANTS[name], tmp_path), ONE_CASE.get(name, "")), SENTENCES[name])


@pytest.mark.parametrize("path", backend_cases.RIGHT, ids=lambda path: path.stem)
def test_no_right_backend_is_accused(path: Path) -> None:
    report = _examine(path, quick=False)
    assert report["findings"] == []
    assert report["exit_status"] == 0
    assert report["summary"]["ok"] >= 60, "so many cases that it was really asked"
