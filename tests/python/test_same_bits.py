"""Bit for bit what one process computes with torch's fused kernel, because heads are independent.

The same of our own kernel: test_cpu_flash.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES, Cell, inputs, run_cells
from oracle import Numbers, max_error, tolerance
from ulysses_attention.launch import ProcessRanks

MHA, GQA = [(8, 8), (3, 3)], [(12, 3), (8, 1), (30, 6)]
CELLS = [
    Cell(seq_len, heads, "ulysses", is_causal, 2, layout, dtype, head_dim=16, kernel="cpu_fused")
    for seq_len, (heads, dtype, layout), is_causal in itertools.product(
        (1, 7, 33, 300),
        [
            (MHA[0], torch.float32, "padded"),
            (MHA[1], torch.float32, "uneven"),
            (MHA[0], torch.bfloat16, "uneven"),
            (MHA[1], torch.float64, "padded"),
            (GQA[0], torch.float32, "uneven"),
            (GQA[1], torch.bfloat16, "padded"),
            (GQA[2], torch.float32, "exchanged"),
        ],
        (False, True),
    )
]


def _sdpa(cell: Cell) -> Numbers:
    """torch's attention of one process over the whole sequence."""
    q, k, v, weights = inputs(cell)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), is_causal=cell.is_causal, enable_gqa=cell.heads[0] != cell.heads[1]
    ).transpose(1, 2)
    dq, dk, dv = torch.autograd.grad(out, leaves, weights)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def _join(cell: Cell, ranks: Sequence[Numbers], name: str) -> torch.Tensor:
    lengths = cell.layouts(len(ranks))[0].lengths
    dim = 2 if name == "lse" else 1
    return torch.cat([part[name].narrow(dim, 0, n) for part, n in zip(ranks, lengths, strict=True)], dim)


def _assert_same_bits(ranks: Sequence[Sequence[Numbers]], alone: Sequence[Numbers]) -> None:
    for index, cell in enumerate(CELLS):
        parts, reference = [part[index] for part in ranks], _sdpa(cell)
        assert torch.equal(_join(cell, parts, "out"), reference["out"]), f"out, {len(ranks)} ranks, {cell}"
        assert torch.equal(_join(cell, parts, "lse"), alone[index]["lse"]), f"lse, {len(ranks)} ranks, {cell}"
        if cell.heads[0] != cell.heads[1]:
            continue  # a KV head's gradient is a sum over query heads, whose order follows the ranks
        for name in ("dq", "dk", "dv"):
            assert torch.equal(_join(cell, parts, name), reference[name]), f"{name}, {len(ranks)} ranks, {cell}"


def _on_threads(world: int, cells: Sequence[Cell]) -> list[list[Numbers]]:
    return ua.run_ranks(lambda rank, group: run_cells(rank, group, cells), world)


@pytest.fixture(scope="module")
def alone() -> list[Numbers]:
    """The op itself in a group of one, for the lse, which torch's public attention keeps to itself."""
    whole = [dataclasses.replace(cell, layout="uneven") for cell in CELLS]
    return _on_threads(1, whole)[0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_on_threads(world: int, alone: list[Numbers]) -> None:
    _assert_same_bits(_on_threads(world, CELLS), alone)


@pytest.mark.parametrize("world", [2, 4])
def test_on_gloo(gloo: Callable[[int], ProcessRanks], world: int, alone: list[Numbers]) -> None:
    _assert_same_bits(gloo(world).run(run_cells, CELLS), alone)


def test_both_strategies_give_the_same_numbers() -> None:
    cells = [cell for cell in CELLS if cell.dtype in (torch.float32, torch.float64)]
    results = {}
    for strategy in STRATEGIES:
        mine = [dataclasses.replace(cell, strategy=strategy) for cell in cells]
        results[strategy] = _on_threads(3, mine)
    for index, cell in enumerate(cells):
        for name in ("out", "lse", "dq", "dk", "dv"):
            one, other = (_join(cell, [part[index] for part in results[s]], name) for s in STRATEGIES)
            assert max_error(one, other) <= tolerance(cell.dtype, other), f"{name}, {cell}"
