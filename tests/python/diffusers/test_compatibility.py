"""docs/compatibility.md: its column of the installed version is what the proof gives here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
from collections.abc import Callable

import pytest

import compat_page
from compat_proof import WORLD, proof_of, run_family
from ulysses_attention.doctor.markdown import Notes
from ulysses_attention.launch import ProcessRanks

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"
ADAPTERS = [name for name in compat_page.LIBRARIES if importlib.util.find_spec(f"ulysses_attention.{name}")]
CASES = [(library, family) for library in ADAPTERS for family in proof_of(library)[0]]


@pytest.mark.parametrize(("library", "family"), CASES)
def test_the_page_says_what_the_installed_version_does(
    library: str, family: str, gloo: Callable[[int], ProcessRanks]
) -> None:
    column = compat_page.column_of(PAGE.read_text(), library, importlib.metadata.version(library))
    cell = run_family(gloo(WORLD), proof_of(library)[1], family)
    assert column[family] == compat_page.cell_text(cell, Notes()).split(" [")[0], cell


@pytest.mark.parametrize("library", ADAPTERS)
def test_the_page_has_no_family_that_is_not_proved(library: str) -> None:
    column = compat_page.column_of(PAGE.read_text(), library, importlib.metadata.version(library))
    assert set(column) == set(proof_of(library)[0])
    assert not {"wrong output", "wrong gradients", "failed", "insensitive"} & set(column.values())
