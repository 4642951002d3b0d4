"""sum_gradients: partial sums over each rank's tokens become the whole gradient, on every rank alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ulysses_attention as ua
from ulysses_attention import _C, gradients
from ulysses_attention.launch import ProcessRanks


def _parameter(shape: tuple[int, ...], grad: float | None, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = None if grad is None else torch.full(shape, grad, dtype=dtype)
    return parameter


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 32 << 20])
def test_every_gradient_is_the_sum_over_the_ranks(
    world: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dtypes, a scalar and an empty parameter in turns, in buckets of one parameter, of some, and of all."""
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", bucket_bytes)
    kinds = [((3, 4), torch.float32), ((2,), torch.float64), ((), torch.bfloat16), ((0, 3), torch.float32)] * 3

    def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
        parameters = [_parameter(shape, (rank + 1) * (at + 1), dtype) for at, (shape, dtype) in enumerate(kinds)]
        before = [parameter.grad for parameter in parameters]
        ua.sum_gradients(iter(parameters), group)
        assert all(parameter.grad is same for parameter, same in zip(parameters, before, strict=True))
        return before  # type: ignore[return-value]

    for grads in ua.run_ranks(on_rank, world):
        for at, ((shape, dtype), grad) in enumerate(zip(kinds, grads, strict=True)):
            assert torch.equal(grad, torch.full(shape, (at + 1) * world * (world + 1) / 2, dtype=dtype))


def test_a_gradient_whose_elements_share_memory_is_replaced() -> None:
    """torch.autograd.grad of a sum returns one number, expanded."""

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        parameter = _parameter((3,), None)
        (parameter.grad,) = torch.autograd.grad(parameter.sum(), parameter) if rank else (torch.ones(3),)
        assert parameter.grad.stride() == ((0,) if rank else (1,))
        ua.sum_gradients([parameter], group)
        return parameter.grad

    for grad in ua.run_ranks(on_rank, 2):
        assert torch.equal(grad, torch.full((3,), 2.0))


def test_strides_of_a_gradient_stay() -> None:
    values = torch.arange(6.0).view(2, 3)

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(3, 2).t())
        parameter.grad = values.t().contiguous().t()
        ua.sum_gradients([parameter], group)
        return parameter.grad

    for grad in ua.run_ranks(on_rank, 2):
        assert torch.equal(grad, 2 * values) and grad.stride() == (1, 2)


def test_a_parameter_without_a_gradient_here_counts_as_zeros_and_without_one_anywhere_stays_none() -> None:
    def on_rank(rank: int, group: Any) -> list[torch.Tensor | None]:
        frozen = _parameter((2,), 5.0).requires_grad_(False)
        parameters = [
            _parameter((2,), 3.0 if rank == 1 else None, torch.bfloat16),
            _parameter((3,), None),
            _parameter((1,), 1.0 + rank),
            frozen,
        ]
        ua.sum_gradients(parameters, group)
        return [parameter.grad for parameter in parameters]

    for only_on_one, nowhere, everywhere, frozen in ua.run_ranks(on_rank, 3):
        assert torch.equal(only_on_one, torch.full((2,), 3.0, dtype=torch.bfloat16))
        assert nowhere is None
        assert torch.equal(everywhere, torch.tensor([6.0]))
        assert torch.equal(frozen, torch.full((2,), 5.0))


@pytest.mark.parametrize("bucket_bytes", [1, 32 << 20])
def test_a_parameter_listed_twice_is_summed_once(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", bucket_bytes)

    def on_rank(rank: int, group: Any) -> float:
        tied = _parameter((1,), 1.0)
        ua.sum_gradients([tied, _parameter((1,), 1.0), tied], group)
        return tied.grad.item()

    assert ua.run_ranks(on_rank, 2) == [2.0, 2.0]


def _half_precision(rank: int, group: Any) -> torch.Tensor:
    parameter = _parameter((24,), 0.0, torch.bfloat16)
    parameter.grad = torch.tensor(list(itertools.permutations([256.0, 1.0, 1.0, -256.0])))[:, rank].bfloat16()
    ua.sum_gradients([parameter], group)
    return parameter.grad


@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_half_precision_is_rounded_once(way: str, gloo: Callable[[int], ProcessRanks]) -> None:
    """256 + 1 is 256 in bfloat16: whatever the order, some of these sums would lose a 1."""
    for grad in gloo(4).run(_half_precision) if way == "gloo" else ua.run_ranks(_half_precision, 4):
        assert torch.equal(grad, torch.full((24,), 2.0, dtype=torch.bfloat16))


def test_many_parameters_take_two_collectives() -> None:
    def on_rank(rank: int, group: Any) -> int:
        recorder = _C.Recorder()
        ua.sum_gradients([_parameter((4,), 1.0) for _ in range(50)], _C.record_group(group, recorder))
        return len(recorder.records())

    assert ua.run_ranks(on_rank, 2) == [2, 2]


# --- refused on every rank --------------------------------------------------------------------------------------------


def _errors(make: Any, world: int = 3) -> list[str]:
    """What each rank raises for make(rank); the group must work afterwards."""

    def on_rank(rank: int, group: Any) -> str:
        with pytest.raises((ValueError, RuntimeError)) as raised:
            ua.sum_gradients(make(rank), group)
        after = _parameter((1,), 1.0)
        ua.sum_gradients([after], group)
        assert after.grad.item() == world
        return f"{raised.type.__name__} {raised.value}"

    return ua.run_ranks(on_rank, world)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("fewer", lambda: [_parameter((2,), 1.0)]),
        ("none", list),
        ("another shape", lambda: [_parameter((2,), 1.0), _parameter((1, 3), 1.0)]),
        ("another order", lambda: [_parameter((3,), 1.0), _parameter((2,), 1.0)]),
        ("another dtype", lambda: [_parameter((2,), 1.0), _parameter((3,), 1.0, torch.float64)]),
        ("frozen", lambda: [_parameter((2,), 1.0), _parameter((3,), 1.0).requires_grad_(False)]),
    ],
)
def test_cp060_other_parameters_on_one_rank(what: str, other: Any) -> None:
    usual = [_parameter((2,), 1.0), _parameter((3,), 1.0)]
    errors = _errors(lambda rank: other() if rank == 1 else usual)
    assert len(set(errors)) == 1 and "[CP060]" in errors[0] and errors[0].startswith("RuntimeError"), what
    assert "rank 0 passes 2 parameters that require gradients, of 5 elements, and rank 1 " in errors[0]


def _sparse() -> list[Any]:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    return [_parameter((2,), 1.0), embedding.weight]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_sparse, "parameter 1 on rank 2 has a sparse gradient. Fix: Embedding(..., sparse=False). [CP069]"),
        (lambda: [_parameter((2,), 1.0, torch.complex64)], "parameter 0 on rank 2 is not of a real floating dtype."),
        (
            lambda: [_parameter((2,), 1.0), "head.weight"],
            "parameter 1 on rank 2 is not a tensor. Fix: sum_gradients(mod",
        ),
    ],
)
def test_cp069_what_one_rank_cannot_sum_is_refused_on_all(make: Any, text: str) -> None:
    errors = _errors(lambda rank: make() if rank == 2 else [_parameter((2,), 1.0)])
    assert len(set(errors)) == 1 and errors[0].startswith("ValueError") and text in errors[0], errors[0]


def test_cp063_without_a_group() -> None:
    with pytest.raises(ValueError, match=r"\[CP063\]"):
        ua.sum_gradients([_parameter((1,), 1.0)])
