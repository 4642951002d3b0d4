"""Our own CPU kernel under the whole operation: bits, its choice, and what its files export."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import Cell, run_cells
from oracle import Numbers
from refusals import arguments, assert_refused, outcomes
from ulysses_attention import _C
from ulysses_attention.launch import ProcessRanks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OBJECTS = Path(__file__).resolve().parents[2] / "build/dev/src/ulysses/CMakeFiles/ulysses_cpu_flash.dir"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_ours(dtype: torch.dtype) -> bool:
    """Whether calls get our kernel here; else the same is asked of torch's op, as far as it holds there."""
    return _C.auto_kernel(name_of(dtype)) == "cpu_flash"


CELLS = [
    Cell(seq_len, heads, strategy, is_causal, 2, "uneven", dtype, head_dim=32)
    for strategy, dtype, is_causal, (seq_len, heads) in itertools.product(
        ("ulysses", "allgather_kv"), DTYPES, (False, True), [(7, (3, 3)), (150, (4, 2)), (601, (2, 1))]
    )
    if strategy == "ulysses" or is_ours(dtype)  # with torch's op, rows depend on the queries beside them
]


def _assert_same_bits(ranks: Sequence[Sequence[Numbers]], alone: Sequence[Numbers]) -> None:
    for index, cell in enumerate(CELLS):
        lengths = cell.layouts(len(ranks))[0].lengths
        for name in ("out", "lse", "dq"):
            dim = 2 if name == "lse" else 1
            parts = [part[index][name].narrow(dim, 0, n) for part, n in zip(ranks, lengths, strict=True)]
            assert torch.equal(torch.cat(parts, dim), alone[index][name]), f"{name}, {len(ranks)} ranks, {cell}"


def _on_threads(world: int, cells: Sequence[Cell]) -> list[list[Numbers]]:
    return ua.run_ranks(lambda rank, group: run_cells(rank, group, cells), world)


@pytest.fixture(scope="module")
def alone() -> list[Numbers]:
    """One process, the whole sequence and all heads."""
    return _on_threads(1, CELLS)[0]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sharded_queries_and_heads_give_the_bits_of_one_process(world: int, alone: list[Numbers]) -> None:
    _assert_same_bits(_on_threads(world, CELLS), alone)


def test_processes_give_the_bits_of_one_process(gloo: Callable[[int], ProcessRanks], alone: list[Numbers]) -> None:
    _assert_same_bits(gloo(2).run(run_cells, CELLS), alone)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_first_tensors_give_the_bits_of_contiguous_ones(dtype: torch.dtype, strategy: str, world: int) -> None:
    """q, k and v of a convolution: [B, C, S] in memory."""
    channels = [torch.randn(2, 4 * 16, 30, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    strided = [x.transpose(1, 2).unflatten(2, (4, 16)) for x in channels]

    def attend(given: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
            leaves = [x.detach().requires_grad_() for x in given]
            out = ua.ulysses_attention(*leaves, group, strategy=strategy)
            assert isinstance(out, torch.Tensor)
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

        return ua.run_ranks(on_rank, world)

    for got, want in zip(attend(strided), attend([x.contiguous() for x in strided]), strict=True):
        assert strided[0].stride(3) != 1 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _bits(kernel: str, dtype: torch.dtype = torch.float32) -> Numbers:
    cell = Cell(40, (4, 2), dtype=dtype, head_dim=16, kernel=kernel)
    return _on_threads(2, [cell])[0][0]


def _equal(a: Numbers, b: Numbers) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_processor_without_the_features_runs_torchs_op(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, usual = _bits("cpu_fused", dtype), _bits("auto", dtype)
    assert _equal(usual, fused) != is_ours(dtype)
    monkeypatch.setenv("ULYSSES_CPU_FEATURES", "none")
    assert _C.auto_kernel(name_of(dtype)) == "cpu_fused"
    assert _equal(_bits("auto", dtype), fused)


def test_the_variable_names_the_kernel_of_calls_that_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    math, fused = _bits("math"), _bits("cpu_fused")
    assert not _equal(math, fused)
    monkeypatch.setenv("ULYSSES_KERNEL", "math")
    assert _equal(_bits("auto"), math)
    assert _equal(_bits("cpu_fused"), fused)


def test_a_backend_of_its_own_code_is_not_asked_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_KERNEL", "math")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: ua.AttendCall) -> torch.Tensor:
        return torch.zeros_like(q)

    results = outcomes(2, lambda rank: arguments(kernel=attend))
    assert all(isinstance(out, torch.Tensor) and not out.any() for out in results), results


def _refused(exception: type[Exception], error_id: str, *values: str, **changes: Any) -> str:
    return assert_refused(outcomes(2, lambda rank: arguments(**changes)), exception, error_id, *values)


def test_an_unknown_name_in_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_KERNEL", "cpu_flahs")
    text = _refused(ValueError, "CP031", 'ULYSSES_KERNEL="cpu_flahs"', "cpu_fused, math")
    assert 'Fix: ULYSSES_KERNEL="cpu_flash"' in text  # the likeliest first


def test_an_unknown_feature_in_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_CPU_FEATURES", "avx10")
    _refused(ValueError, "CP031", 'ULYSSES_CPU_FEATURES="avx10"', "none, avx2, avx512, avx512_bf16, amx")


def test_a_named_kernel_says_which_features_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_CPU_FEATURES", "none")
    missing = "needs AVX2 or AVX-512 for float32, and this processor offers none of AVX2, AVX-512 and AMX"
    _refused(NotImplementedError, "CP032", "kernel=cpu_flash", missing, dtype=torch.float32, kernel="cpu_flash")
    monkeypatch.setenv("ULYSSES_KERNEL", "cpu_flash")
    _refused(NotImplementedError, "CP032", "ULYSSES_KERNEL=cpu_flash", missing, dtype=torch.float32)


def test_a_named_kernel_says_which_head_dims_it_takes() -> None:
    why = "16, 32, 48, … 256, not 8" if is_ours(torch.float32) else "needs AVX2"
    _refused(NotImplementedError, "CP032", "head_dim=8", why, dtype=torch.float32, kernel="cpu_flash")


def test_files_for_newer_processors_export_nothing_that_others_could_be_linked_to() -> None:
    """A weak symbol, as of an inline function, may be the copy that all of the library's code calls."""
    objects = sorted(OBJECTS.glob("kernels/cpu_flash/avx*.o"))
    for path in objects:
        listing = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        symbols = [line.split(maxsplit=2) for line in listing.splitlines() if line[:1] != " "]
        exported = [name for _, kind, name in symbols if kind.isupper()]
        assert exported and all("::flash::kAvx" in name for name in exported), (path, exported)
        assert not [name for _, kind, name in symbols if kind in "wWvVuV"], path
    assert len(objects) == 3 or not is_ours(torch.bfloat16), objects
