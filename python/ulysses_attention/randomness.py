"""Random numbers of a sharded sequence that do not depend on how many ranks hold it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ulysses_attention.layout import SequenceLayout

__all__ = ["token_dropout", "token_noise"]

# Note [Counter]
# The number of an element is a hash of the seed and of the element's place in the whole tensor: SplitMix64's output
# function at state seed + place · gamma. No state, nothing drawn for other ranks' tokens, and whoever asks for the
# element (another number of ranks, another device, a recomputation) gets the same one.
_MASK64 = (1 << 64) - 1
_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Seed = int | Sequence[int]


def token_noise(
    shape: Sequence[int],
    layout: SequenceLayout,
    rank: int,
    *,
    seed: Seed | None = None,
    generator: torch.Generator | None = None,
    dim: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """This rank's rows of standard normal noise for the whole sequence, zero in padding rows.

    Put together, the real rows of all ranks are the same numbers for every number of ranks.

        noise = token_noise((2, 4096, 64), layout, rank, seed=(seed, step))

    shape:     of the whole tensor; shape[dim] is layout.seq_len.
    seed:      an integer or several, each of which matters (the run's, the step, the data-parallel rank): numbers by a
               counter, of this rank's rows only.
    generator: instead of a seed: torch.randn of the whole shape, what one process draws from it, of which the rank's
               rows are taken. In the same state on every rank; each advances as that of one process does.

    Shapes: → [.., padded_lengths[rank], ..].
    Comm:   none. Memory: with a generator the whole tensor; with a seed four times the rank's rows in float64.
    Errors: CP012 if shape has another length, CP015, CP069 without exactly one of seed and generator.
    Source: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014); Box and Muller 1958.
    """
    if (seed is None) == (generator is None):
        raise ValueError("[token_noise] seed and generator: one of them. Fix: seed=0 with generator=None. [CP069]")
    dim = _check_whole("token_noise", shape, layout, dim)
    if dtype not in _DTYPES:
        raise ValueError(f"[token_noise] dtype={dtype} is no float. Fix: torch.float32. [CP069]")
    if generator is not None:
        whole = torch.randn(*shape, generator=generator, dtype=dtype, device=generator.device).to(device)
        return layout.shard(whole, rank, dim=dim).contiguous()
    folded = _fold("token_noise", seed)
    states, real = _states(shape, layout, rank, dim, torch.device(device))
    radius = _uniform(states, folded).double().add_(1).mul_(2.0**-53).log_().mul_(-2).sqrt_()  # of (0, 1]
    angle = _uniform(states, _mix_int(folded)).double().mul_(2.0**-53 * 2 * math.pi)
    return radius.mul_(angle.cos_()).mul_(real).to(dtype)


def token_dropout(
    x: torch.Tensor,
    p: float,
    seed: Seed,
    layout: SequenceLayout,
    rank: int,
    dim: int = 1,
    *,
    training: bool = True,
) -> torch.Tensor:
    """Dropout whose mask does not depend on the number of ranks: an element is dropped on whichever rank holds it.

        x = x + token_dropout(self.mlp(x), 0.1, (seed, step, layer), layout, rank, training=self.training)

    seed:   an integer or several: another mask for every step, layer and data-parallel rank needs them in it. No
            generator is read or advanced, so that a recomputation (activation checkpointing) drops the same.
    Shapes: x [.., padded_lengths[rank], ..] → the same; where it drops, padding rows are zero and kept elements are
            divided by 1 − p.
    Comm:   none, backward neither. Time and memory: a few int64 operations an element, on a CPU several times
            torch's dropout.
    Errors: CP012 if x has other rows than the layout gives the rank, CP015, CP069 for p outside 0 to 1 or a seed
            that is not of integers.
    Source: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"[token_dropout] p={p} is no probability. Fix: 0.1, or any of 0 to 1. [CP069]")
    layout._check_rank(rank)
    if x.size(dim) != layout.padded_lengths[rank]:
        raise ValueError(
            f"[token_dropout] x has {x.size(dim)} rows in dim {dim} and the layout {layout.padded_lengths[rank]} for "
            f"rank {rank}. Fix: pass the rows of layout.shard, or SequenceLayout.from_lengths([{x.size(dim)}]) and "
            f"rank 0 for a whole one. [CP012]"
        )
    folded = _fold("token_dropout", seed)
    if not training or p == 0.0:
        return x
    dim %= x.dim()
    shape = [*x.shape[:dim], layout.seq_len, *x.shape[dim + 1 :]]
    states, real = _states(shape, layout, rank, dim, x.device)
    keep = (_uniform(states, folded) >= round(p * 2.0**53)) & real
    return torch.where(keep, x / (1.0 - p if p < 1.0 else 1.0), torch.zeros((), dtype=x.dtype, device=x.device))


def _check_whole(name: str, shape: Sequence[int], layout: SequenceLayout, dim: int) -> int:
    if not -len(shape) <= dim < len(shape) or shape[dim] != layout.seq_len:
        along = [at for at, size in enumerate(shape) if size == layout.seq_len]
        fix = f"dim={along[0]}" if along else f"the whole tensor's shape, with {layout.seq_len} tokens in one dim"
        raise ValueError(
            f"[{name}] shape {list(shape)} does not have the layout's {layout.seq_len} tokens in dim {dim}. "
            f"Fix: {fix}. [CP012]"
        )
    return dim % len(shape)


def _fold(name: str, seed: Seed | None) -> int:
    """One 64-bit number of all of them, in which order and each number matter."""
    parts = [seed] if isinstance(seed, int) else seed
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, int) for part in parts):
        raise ValueError(f"[{name}] seed={seed!r} is not of integers. Fix: seed=0, or seed=(0, step, layer). [CP069]")
    state = len(parts)
    for part in parts:
        state = _mix_int((state + (part & _MASK64) + _GAMMA) & _MASK64)
    return state


def _mix_int(z: int) -> int:
    z = (z ^ z >> 30) * _MIX1 & _MASK64
    z = (z ^ z >> 27) * _MIX2 & _MASK64
    return z ^ z >> 31


def _signed(z: int) -> int:
    """The int64 with these 64 bits."""
    return z - (1 << 64) if z >> 63 else z


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """z >> by as of uint64: the upper bits clear."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _uniform(states: torch.Tensor, seed: int) -> torch.Tensor:
    """_mix_int of every state + seed, its upper 53 bits: 0 to 2**53 − 1. int64 wraps as uint64 does."""
    z = states + _signed(seed)
    z.bitwise_xor_(_shift(z, 30)).mul_(_signed(_MIX1))
    z.bitwise_xor_(_shift(z, 27)).mul_(_signed(_MIX2))
    return _shift(z.bitwise_xor_(_shift(z, 31)), 11)


def _states(
    shape: Sequence[int], layout: SequenceLayout, rank: int, dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """place · gamma of the rank's elements, and which rows are real. Note [Counter]."""
    positions = torch.tensor(layout.positions(rank), dtype=torch.int64, device=device)
    place = torch.zeros([1] * len(shape), dtype=torch.int64, device=device)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = positions if axis == dim else torch.arange(shape[axis], device=device)
        place = place + (along * stride).view([-1] + [1] * (len(shape) - axis - 1))
        stride *= shape[axis]
    real = (positions >= 0).view([-1] + [1] * (len(shape) - dim - 1))
    return place * _signed(_GAMMA), real
