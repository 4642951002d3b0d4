"""Output and gradients on Gloo processes against float64 attention: every pair of values, then long sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from cells import HEADS, STRATEGIES, Cell, assert_right, run_cells
from ulysses_attention.launch import ProcessRanks

WORLDS = (1, 2, 3, 4)
DIMENSIONS: dict[str, Sequence[Any]] = {
    "world": WORLDS,
    "seq_len": (1, 3, 7, 32, 64),
    "heads": HEADS,
    "strategy": STRATEGIES,
    "is_causal": (False, True),
    "batch": (1, 2),
    "layout": ("uneven", "padded", "exchanged"),
    "return_lse": (False, True),
    "dtype": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "storage": ("contiguous", "head_major", "sliced"),
}


def pairs_of(row: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}


def every_pair(dimensions: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every two values of two dimensions meet at least once; greedy, the same on every run."""
    names = list(dimensions)
    left = {
        (a, x, b, y): None  # a dict keeps the order, so the rows do not depend on hashing
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(dimensions[a], dimensions[b])
    }
    rows = []
    while left:
        a, x, b, y = next(iter(left))
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(dimensions[name], key=lambda value: _gain({**row, name: value}, name, left, names))
        row = {name: row[name] for name in names}
        for pair in pairs_of(row):
            left.pop(pair, None)
        rows.append(row)
    return rows


def _gain(row: Mapping[str, Any], name: str, left: Mapping[Any, None], names: list[str]) -> int:
    """How many pairs still left to cover the value of `name` adds."""
    ordered = {other: row[other] for other in names if other in row}
    return sum(pair in left for pair in pairs_of(ordered) if name in (pair[0], pair[2]))


def check(ranks: ProcessRanks, cells: list[Cell]) -> None:
    assert_right(cells, ranks.run(run_cells, cells))


def test_the_rows_hold_every_pair() -> None:
    met = set().union(*(pairs_of(row) for row in every_pair(DIMENSIONS)))
    for a, b in itertools.combinations(DIMENSIONS, 2):
        for x, y in itertools.product(DIMENSIONS[a], DIMENSIONS[b]):
            assert (a, x, b, y) in met
    assert len(every_pair(DIMENSIONS)) < 60


@pytest.mark.parametrize("world", WORLDS)
def test_every_pair_of_values(gloo: Callable[[int], ProcessRanks], world: int) -> None:
    rows = [row for row in every_pair(DIMENSIONS) if row["world"] == world]
    cells = [Cell(**{name: value for name, value in row.items() if name != "world"}) for row in rows]
    check(gloo(world), cells)


def _long_cells(seq_len: int, world: int) -> list[Cell]:
    """Six cells: each head count once, every other value at least twice; batch 2 where there are few heads."""
    options = [
        ((8, 8), "ulysses", True, 1, "padded"),
        ((30, 30), "ulysses", True, 1, "uneven"),
        ((12, 3), "allgather_kv", True, 1, "exchanged"),
        ((8, 1), "allgather_kv", False, 1, "padded"),
        ((3, 3), "ulysses", False, 2, "exchanged"),
        ((2, 1), "allgather_kv", True, 2, "uneven"),
    ]
    return [Cell(seq_len, heads, s, causal, batch, layout) for heads, s, causal, batch, layout in options]


@pytest.mark.parametrize("world", [2, 4])
def test_257_tokens(gloo: Callable[[int], ProcessRanks], world: int) -> None:
    check(gloo(world), _long_cells(257, world))


def test_3000_tokens(gloo: Callable[[int], ProcessRanks]) -> None:
    """Half of the cells on 2 processes, half on 4: in each half every strategy, layout and batch."""
    cells = _long_cells(3000, 4)
    check(gloo(2), [cells[2], cells[4], cells[0]])
    check(gloo(4), [cells[1], cells[3], cells[5]])
