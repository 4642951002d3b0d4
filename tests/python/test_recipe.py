"""The function to copy: against float64 attention of one process, and its length check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ulysses_attention.recipe import context_parallel_attention

WORLD = 4


def _inputs(seq_len: int, num_kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(2, seq_len, 4, 8), (2, seq_len, num_kv_heads, 8), (2, seq_len, num_kv_heads, 8), (2, seq_len, 4, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]  # q, k, v, weights of the loss


def _oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) / q.shape[3] ** 0.5
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(group, 2))
    return [out, *torch.autograd.grad((out * weights.double()).sum(), (q, k, v))]


def _forward_backward(rank: int, group: Any, seq_len: int, num_kv_heads: int) -> list[torch.Tensor]:
    rows = -(-seq_len // WORLD)
    padded = [
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows * WORLD - seq_len)) for x in _inputs(seq_len, num_kv_heads)
    ]
    q, k, v, weights = (x[:, rank * rows : (rank + 1) * rows] for x in padded)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = context_parallel_attention(q, k, v, seq_len=seq_len, group=group)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]


def _length_error(rank: int, group: Any, lengths: list[int]) -> str:
    x = torch.zeros(1, lengths[rank], 2, 4)
    try:
        context_parallel_attention(x, x, x, group=group)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("seq_len", "num_kv_heads"), [(32, 4), (30, 2), (13, 1)])
def test_matches_single_process_attention(gloo: Any, seq_len: int, num_kv_heads: int) -> None:
    expected = _oracle(*_inputs(seq_len, num_kv_heads))
    results = gloo(WORLD).run(_forward_backward, seq_len, num_kv_heads)
    for want, parts in zip(expected, zip(*results, strict=True), strict=True):
        got = torch.cat(parts, dim=1)[:, :seq_len].double()
        assert (got - want).abs().max() <= 1e-5 * max(1.0, float(want.detach().abs().max()))


def test_unequal_lengths_are_refused_on_every_rank_and_the_fix_works(gloo: Any) -> None:
    messages = gloo(WORLD).run(_length_error, [8, 8, 8, 7])
    for message in messages:
        assert "[[8, 8], [8, 8], [8, 8], [7, 7]]" in message
        assert "from 31 to 32 tokens" in message and "seq_len=31" in message
    gloo(WORLD).run(_forward_backward, 31, 4)  # the group is still usable; 31 padded to 32


def test_is_at_most_thirty_lines() -> None:
    import inspect

    assert len(inspect.getsource(context_parallel_attention).splitlines()) <= 30
