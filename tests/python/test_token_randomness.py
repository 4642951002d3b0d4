"""token_noise and token_dropout: the numbers of a token do not depend on how many ranks there are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ulysses_attention as ua

SEQ_LEN = 19
EXACT = ua.UlyssesContextParallelPolicy(require_seq_divisible=False)
PADDED = ua.UlyssesContextParallelPolicy()
WHOLE = ua.SequenceLayout.from_lengths([SEQ_LEN])


def _layouts() -> list[ua.SequenceLayout]:
    """1 to 4 ranks, padded and uneven, one of them with empty shards."""
    layouts = [ua.SequenceLayout(SEQ_LEN, world, policy) for world in (1, 2, 3, 4) for policy in (EXACT, PADDED)]
    return [*layouts, ua.SequenceLayout.from_lengths([0, 1, 18, 0])]


def _shape(dim: int) -> list[int]:
    shape = [3, 4, 5]
    shape.insert(dim, SEQ_LEN)
    return shape


def _whole_of(parts: list[torch.Tensor], layout: ua.SequenceLayout, dim: int) -> torch.Tensor:
    """Put together; padding rows must be zero."""
    real = []
    for part, length, rows in zip(parts, layout.lengths, layout.padded_lengths, strict=True):
        assert part.size(dim) == rows and not part.narrow(dim, length, rows - length).any()
        real.append(part.narrow(dim, 0, length))
    return torch.cat(real, dim)


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("source", ["seed", "generator"])
def test_noise_is_the_same_for_every_number_of_ranks(source: str, dim: int, dtype: torch.dtype) -> None:
    dim %= 4
    shape = _shape(dim)

    def draw(layout: ua.SequenceLayout, rank: int) -> torch.Tensor:
        how: Any = {"seed": 3} if source == "seed" else {"generator": torch.Generator().manual_seed(3)}
        return ua.token_noise(shape, layout, rank, dim=dim, dtype=dtype, **how)

    expected = draw(WHOLE, 0)
    assert expected.dtype == dtype and list(expected.shape) == shape and expected.unique().numel() > 200
    for layout in _layouts():
        assert torch.equal(_whole_of([draw(layout, rank) for rank in range(layout.cp_size)], layout, dim), expected)


def test_noise_of_a_generator_is_what_one_process_draws() -> None:
    layout = ua.SequenceLayout(SEQ_LEN, 3)
    generators = [torch.Generator().manual_seed(8) for _ in range(4)]
    for _ in range(2):  # the generators advance alike
        expected = torch.randn(2, SEQ_LEN, 3, generator=generators[3])
        parts = [ua.token_noise((2, SEQ_LEN, 3), layout, r, generator=generators[r]) for r in range(3)]
        assert torch.equal(_whole_of(parts, layout, 1), expected)


def test_noise_of_a_seed_is_standard_normal() -> None:
    noise = ua.token_noise((64, SEQ_LEN, 200), WHOLE, 0, seed=1, dtype=torch.float64).flatten()
    count = noise.numel()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        spread = {1: 1.0, 2: 2.0, 3: 15.0, 4: 96.0}[power] ** 0.5 / count**0.5
        assert abs(noise.pow(power).mean().item() - moment) < 5 * spread
    below = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.5])
    expected = 0.5 * (1 + torch.erf(below.double() / math.sqrt(2)))
    assert ((noise[:, None] < below).double().mean(0) - expected).abs().max() < 2.5 / count**0.5
    for lag in (1, 200, SEQ_LEN * 200):  # neighbours in each dimension
        assert abs((noise[:-lag] * noise[lag:]).mean().item()) < 5 / count**0.5
    other = ua.token_noise((64, SEQ_LEN, 200), WHOLE, 0, seed=2, dtype=torch.float64).flatten()
    for one, two in ((noise, other), (noise.square() - 1, other.square() - 1)):  # also the sizes of two seeds
        assert abs((one * two).mean().item()) < 5 * (one.var() * two.var() / count).sqrt()


def test_every_number_of_a_seed_matters() -> None:
    seeds = [0, 1, -1, 1 << 40, (0, 0), (0, 1), (1, 0), (0, 0, 0), [5, 6]]
    drawn = [ua.token_noise((1, SEQ_LEN, 8), WHOLE, 0, seed=seed) for seed in seeds]
    for at, one in enumerate(drawn):
        assert all(not torch.isclose(one, other).any() for other in drawn[:at])
    assert torch.equal(drawn[0], ua.token_noise((1, SEQ_LEN, 8), WHOLE, 0, seed=(0,)))


def test_the_counter_is_splitmix64() -> None:
    """The published function from state 0: its first outputs, https://prng.di.unimi.it/splitmix64.c, in C's uint64."""
    from ulysses_attention import randomness

    states = torch.arange(1, 4) * randomness._signed(randomness._GAMMA)
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert randomness._uniform(states, 0).tolist() == [number >> 11 for number in known]
    assert [randomness._mix_int(number * randomness._GAMMA & randomness._MASK64) for number in (1, 2, 3)] == known


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "seed and generator: one of them. Fix: seed=0 with generator=None. [CP069]"),
        ({"seed": 0, "generator": torch.Generator()}, "seed and generator: one of them"),
        ({"seed": 0.5}, "seed=0.5 is not of integers. Fix: seed=0, or seed=(0, step, layer). [CP069]"),
        ({"seed": ()}, "seed=() is not of integers"),
        ({"seed": 0, "dtype": torch.int64}, "dtype=torch.int64 is no float. Fix: torch.float32. [CP069]"),
        ({"seed": 0, "dim": 2}, "does not have the layout's 19 tokens in dim 2. Fix: dim=1. [CP012]"),
        ({"seed": 0, "dim": 3}, "does not have the layout's 19 tokens in dim 3. Fix: dim=1. [CP012]"),
    ],
)
def test_cp069_cp012_noise_that_is_not_asked_for_rightly(options: Any, text: str) -> None:
    with pytest.raises(ValueError) as raised:
        ua.token_noise((2, SEQ_LEN, 8), WHOLE, 0, **options)
    assert text in str(raised.value)


@pytest.mark.parametrize("source", ["seed", "generator"])
def test_cp015_noise_for_a_rank_that_is_none(source: str) -> None:
    how: Any = {"seed": 3} if source == "seed" else {"generator": torch.Generator()}
    with pytest.raises(ValueError, match=r"\[CP015\]"):
        ua.token_noise((2, SEQ_LEN, 8), WHOLE, 1, **how)


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_dropout_is_the_same_for_every_number_of_ranks_forward_and_backward(dim: int) -> None:
    dim %= 4
    x, weights = torch.randn(2, *_shape(dim), generator=torch.Generator().manual_seed(1))

    def drop(layout: ua.SequenceLayout, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = (layout.shard(x, rank, dim=dim) + 1.0).requires_grad_()  # padding rows are not zero behind a bias
        out = ua.token_dropout(own, 0.4, (2, 3), layout, rank, dim)
        return out.detach(), torch.autograd.grad((out * layout.shard(weights, rank, dim=dim)).sum(), own)[0]

    out, grad = drop(WHOLE, 0)
    kept = out != 0
    assert 0.5 < kept.double().mean() < 0.7
    assert torch.equal(out, torch.where(kept, (x + 1.0) / 0.6, torch.zeros(())))
    assert torch.equal(grad, torch.where(kept, weights / 0.6, torch.zeros(())))
    for layout in _layouts():
        parts = [drop(layout, rank) for rank in range(layout.cp_size)]
        assert torch.equal(_whole_of([part[0] for part in parts], layout, dim), out)
        assert torch.equal(_whole_of([part[1] for part in parts], layout, dim), grad)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_that_p_says_in_every_dimension(p: float) -> None:
    kept = (ua.token_dropout(torch.ones(50, SEQ_LEN, 100), p, 4, WHOLE, 0) > 0).double()
    for dims, count in (((0, 1, 2), 1), ((1, 2), 50), ((0, 2), SEQ_LEN), ((0, 1), 100)):
        spread = (p * (1 - p) / (kept.numel() / count)) ** 0.5
        assert (kept.mean(dims) - (1 - p)).abs().max() < 5 * spread
    other = (ua.token_dropout(torch.ones(50, SEQ_LEN, 100), p, (4, 1), WHOLE, 0) > 0).double()
    assert abs((kept * other).mean().item() - (1 - p) ** 2) < 5 / kept.numel() ** 0.5  # another seed is independent


def test_dropout_is_off_in_evaluation_and_for_0_and_all_for_1() -> None:
    x = torch.randn(2, SEQ_LEN, 3)
    assert ua.token_dropout(x, 0.5, 0, WHOLE, 0, training=False) is x
    assert ua.token_dropout(x, 0.0, 0, WHOLE, 0) is x
    assert torch.equal(ua.token_dropout(x, 1.0, 0, WHOLE, 0), torch.zeros_like(x))


def test_what_is_dropped_may_be_nan() -> None:
    x = torch.full((1, SEQ_LEN, 8), torch.nan, requires_grad=True)
    out = ua.token_dropout(x, 0.5, 0, WHOLE, 0)
    out.sum().backward()
    assert torch.equal(out == 0, x.grad == 0) and 20 < (out == 0).sum() < 130


def test_dropout_reads_no_generator() -> None:
    before = torch.get_rng_state()
    ua.token_dropout(torch.ones(1, SEQ_LEN, 8), 0.5, 0, WHOLE, 0)
    ua.token_noise((1, SEQ_LEN, 8), WHOLE, 0, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dropout_keeps_the_dtype_and_the_mask(dtype: torch.dtype) -> None:
    x = torch.ones(2, SEQ_LEN, 8)
    out = ua.token_dropout(x.to(dtype), 0.5, 0, WHOLE, 0)
    assert out.dtype == dtype and torch.equal(out.float(), ua.token_dropout(x, 0.5, 0, WHOLE, 0))


@pytest.mark.parametrize(
    ("p", "seed", "rows", "rank", "text"),
    [
        (-0.1, 0, 16, 0, "p=-0.1 is no probability. Fix: 0.1, or any of 0 to 1. [CP069]"),
        (math.nan, 0, 16, 0, "p=nan is no probability"),
        (0.5, "x", 16, 0, "seed='x' is not of integers"),
        (0.5, 0, SEQ_LEN, 0, "x has 19 rows in dim 1 and the layout 16 for rank 0. Fix: pass the rows of layout.shard"),
        (0.0, 0, 3, 1, "x has 3 rows in dim 1 and the layout 16 for rank 1"),  # also where nothing is dropped
        (0.5, 0, 16, 2, "[CP015]"),
    ],
)
def test_cp069_cp012_cp015_dropout_that_is_not_asked_for_rightly(
    p: float, seed: Any, rows: int, rank: int, text: str
) -> None:
    layout = ua.SequenceLayout(SEQ_LEN, 2)
    assert layout.padded_lengths == (16, 16)
    with pytest.raises(ValueError) as raised:
        ua.token_dropout(torch.ones(2, rows, 3), p, seed, layout, rank)
    assert text in str(raised.value)
