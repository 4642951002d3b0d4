"""Every error id has a line in the catalogue and a test."""

from __future__ import annotations

import re
from pathlib import Path

from ulysses_attention import _C


def test_every_error_id_is_named_by_a_test() -> None:
    tests = Path(__file__).resolve().parents[1]
    sources = [path.read_text() for path in tests.rglob("*") if path.suffix in (".py", ".cpp") and path.is_file()]
    named = {match for text in sources for match in re.findall(r"CP\d{3}", text)}
    assert len(_C.error_ids()) >= 44
    assert set(_C.error_ids()) - named == set()


def test_every_id_that_the_sources_raise_is_in_the_catalogue() -> None:
    repository = Path(__file__).resolve().parents[2]
    files = [*repository.glob("src/**/*.cpp"), *repository.glob("python/**/*.py")]
    raised = {found for path in files for found in re.findall(r"CP\d{3}", path.read_text())}
    assert raised - set(_C.error_ids()) == set()
