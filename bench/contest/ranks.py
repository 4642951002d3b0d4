"""What runs in the rank processes: one call to see whether it is right, and rounds that time every contestant."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from contest.cells import TOLERANCES, Cell
from contest.contestants import Contestant
from contest.oracle import error_of, random_inputs
from ulysses_attention import SequenceLayout
from ulysses_attention.launch import post

__all__ = ["Entrant", "Failure", "Limits", "Samples", "be_quiet", "order_of_round", "set_up", "time_rounds", "try_once"]

Tensor = torch.Tensor
_ATTENTION: dict[str, Callable[..., Tensor]] = {}  # of this process: set up once


class Entrant(NamedTuple):
    """A contestant on a cell; without a contestant, torch's kernel alone. right: the file of the right values."""

    label: str
    contestant: Contestant | None
    cell: Cell
    right: str


class Failure(NamedTuple):
    label: str
    why: str


class Limits(NamedTuple):
    """When rounds end: after `seconds`, but not before `least` nor after `most`. warm_up: one more, not counted."""

    seconds: float
    least: int
    most: int
    warm_up: bool = True


class Samples(NamedTuple):
    """Of one rank, by label. Units: seconds a call; error as a part of the largest right value, the worst of all calls
    over what its tolerance allows: above 1 is wrong."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]
    error: dict[str, float]


class _Call(NamedTuple):
    """One entrant's call: run() returns out and gradients, which are compared with `wanted`."""

    run: Callable[[], list[Tensor]]
    wanted: list[Tensor]
    dtype: str


def be_quiet(rank: int, group: Any, log: str) -> None:
    """One thread; what libraries and aborting processes print goes into a file."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(f"{log}-{group.size()}-{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def set_up(rank: int, group: Any, contestants: Sequence[Contestant]) -> list[Failure]:
    """Import the libraries. Those that can't be set up are returned with the reason."""
    failed = []
    for contestant in contestants:
        if contestant.name not in _ATTENTION:
            try:
                _ATTENTION[contestant.name] = contestant.setup()
            except Exception as error:
                failed.append(Failure(contestant.name, _words(error)))
            torch.set_num_threads(1)  # some set it at import
            logging.disable(logging.WARNING)
    return failed


def try_once(rank: int, group: Any, entrant: Entrant) -> Failure | float:
    """One call: what is wrong, or its error over what its tolerance allows.

    A rank that raises posts the reason, so that it is known even if another rank waits for it forever.
    """
    try:
        call = _prepare(entrant, rank, group)
        error = _error(call, _run(call, entrant.cell))
    except Exception as raised:
        failure = Failure(entrant.label, _words(raised))
        post(failure)
        return failure
    return error


def time_rounds(rank: int, group: Any, entrants: Sequence[Entrant], limits: Limits) -> Samples:
    """Rounds in which every entrant is called once, after a barrier; each output is checked outside the timed part."""
    calls = {entrant.label: _prepare(entrant, rank, group) for entrant in entrants}
    samples = Samples({label: [] for label in calls}, {label: [] for label in calls}, dict.fromkeys(calls, 0.0))
    if limits.warm_up:
        _one_round(0, entrants, calls, group, None)
    start = time.monotonic()
    for rounds in itertools.count(1):
        _one_round(rounds, entrants, calls, group, samples)
        if rank == 0:
            post(rounds)
        if _agree_to_end(group, time.monotonic() - start >= limits.seconds, rounds, limits):
            break
    return samples


def order_of_round(number: int, count: int) -> list[int]:
    """Another one first each round, and by other steps, so that neighbours change too."""
    steps = [step for step in range(1, count) if math.gcd(step, count) == 1] or [1]
    step = steps[number % len(steps)]
    return [(number + place * step) % count for place in range(count)]


def _one_round(
    number: int, entrants: Sequence[Entrant], calls: Mapping[str, _Call], group: Any, samples: Samples | None
) -> None:
    for place in order_of_round(number, len(entrants)):
        entrant = entrants[place]
        label, call = entrant.label, calls[entrant.label]
        dist.barrier(group)
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            got = _run(call, entrant.cell)
        except Exception as error:
            post(Failure(label, _words(error)))
            raise
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if samples is not None:
            samples.wall[label].append(wall)
            samples.cpu[label].append(cpu)
            samples.error[label] = max(samples.error[label], _error(call, got))


def _agree_to_end(group: Any, is_late: bool, rounds: int, limits: Limits) -> bool:
    """As rank 0 sees it."""
    end = torch.tensor(int(rounds >= limits.most or (is_late and rounds >= limits.least)))
    dist.broadcast(end, 0, group=group)
    return bool(end)


def _run(call: _Call, cell: Cell) -> list[Tensor]:
    with torch.set_grad_enabled(cell.backward):
        return call.run()


def _error(call: _Call, got: list[Tensor]) -> float:
    """The worst of out and gradients, over what is allowed."""
    for_output, for_gradients = TOLERANCES[call.dtype]
    allowed = [for_output] + [for_gradients] * (len(call.wanted) - 1)
    errors = [error_of(x, want) / most for x, want, most in zip(got, call.wanted, allowed, strict=True)]
    return max(errors)


def _prepare(entrant: Entrant, rank: int, group: Any) -> _Call:
    values = torch.load(entrant.right, mmap=True)
    names = ["out", "dq", "dk", "dv"] if entrant.cell.backward else ["out"]
    if entrant.contestant is None:
        return _kernel_call(entrant.cell, [values[name] for name in names])
    cell = entrant.cell
    begin, count = sum(cell.lengths[:rank]), cell.lengths[rank]
    *qkv, grad_out = _shards(cell, rank)
    attention = functools.partial(_ATTENTION[entrant.contestant.name], **_options(entrant.contestant, cell))
    wanted = [values[name].narrow(1, begin, count).clone() for name in names]
    return _Call(
        functools.partial(_attend, lambda q, k, v: attention(q, k, v, group), qkv, grad_out, cell), wanted, cell.dtype
    )


@functools.lru_cache(maxsize=2)
def _shards(cell: Cell, rank: int) -> list[Tensor]:
    """The same memory for every contestant, so that where it lies makes no difference."""
    begin, count = sum(cell.lengths[:rank]), cell.lengths[rank]
    return [x.narrow(1, begin, count).contiguous() for x in random_inputs(cell)]


def _options(contestant: Contestant, cell: Cell) -> dict[str, Any]:
    options: dict[str, Any] = {"is_causal": True} if cell.is_causal else {}
    if contestant.is_ours and len(set(cell.lengths)) > 1:
        options["layout"] = SequenceLayout.from_lengths(cell.lengths)
    return options


def _kernel_call(cell: Cell, values: list[Tensor]) -> _Call:
    """torch's attention of the whole sequence and a rank's part of the heads, contiguous [B, H, S, D]."""
    heads, kv_heads = cell.heads_of_a_rank()
    counts = [heads, kv_heads, kv_heads, heads]
    *qkv, grad_out = (
        x[:, :, :n].transpose(1, 2).contiguous() for x, n in zip(random_inputs(cell), counts, strict=True)
    )
    attention = functools.partial(
        F.scaled_dot_product_attention, is_causal=cell.is_causal, enable_gqa=heads != kv_heads
    )
    wanted = [x[:, :, :n].transpose(1, 2).clone() for x, n in zip(values, [heads, *counts[:3]], strict=False)]
    return _Call(functools.partial(_attend, attention, qkv, grad_out, cell), wanted, cell.dtype)


def _attend(attention: Callable[..., Tensor], qkv: list[Tensor], grad_out: Tensor, cell: Cell) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(cell.backward) for x in qkv]
    out = attention(*leaves)
    if not cell.backward:
        return [out]
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad if leaf.grad is not None else torch.zeros(0) for leaf in leaves)]


def _words(error: Exception) -> str:
    """One short line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:300]
