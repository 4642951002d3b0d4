"""merge_attention: values, gradients, rows without keys, errors, tracing."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from ulysses_attention import merge_attention

INF = float("inf")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention of [B, S, H, D] and its lse [B, H, S]; without keys 0 and −inf."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.size(-1))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1).nan_to_num(neginf=0.0)).exp()
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def inputs(dtype: torch.dtype = torch.float64, keys: int = 29) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((2, 5, 3, 8), (2, keys, 3, 8), (2, keys, 3, 8))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> tuple[list, list]:
    pairs = [attention(q, *kv) for kv in zip(k.split(lengths, 1), v.split(lengths, 1), strict=True)]
    return [out for out, _ in pairs], [lse for _, lse in pairs]


@pytest.mark.parametrize("lengths", [(29,), (1, 28), (10, 0, 12, 7)])
def test_parts_of_the_keys_give_the_whole_with_its_gradients(lengths: tuple[int, ...]) -> None:
    results = []
    for merged in (False, True):
        leaves = [x.requires_grad_() for x in inputs()]
        out, lse = merge_attention(*parts(*leaves, lengths)) if merged else attention(*leaves)
        (out.sin().sum() + lse.square().sum()).backward()
        results.append([out, lse, *(x.grad for x in leaves)])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_gradcheck_and_second_derivative() -> None:
    outs, lses = parts(*inputs(), (9, 20))
    leaves = [x.detach().requires_grad_() for x in (*outs, *lses)]
    assert torch.autograd.gradcheck(lambda a, b, c, d: merge_attention([a, b], [c, d]), leaves)
    assert torch.autograd.gradgradcheck(lambda a, b, c, d: merge_attention([a, b], [c, d]), leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_outs_dtype_comes_back_and_lse_stays_float32(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    expected_out, expected_lse = attention(q.double(), k.double(), v.double())
    outs, lses = parts(q.double(), k.double(), v.double(), (9, 20))
    out, lse = merge_attention([x.to(dtype) for x in outs], [x.float() for x in lses])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-6)


def one_row(out: float, lse: float) -> list[torch.Tensor]:
    tensors = (torch.full((1, 1, 1, 1), out), torch.full((1, 1, 1), lse))
    return [x.double().requires_grad_() for x in tensors]


def merge_rows(*rows: list[torch.Tensor]) -> list[float]:
    """Out, lse, then the gradients of out + lse for each row's out and lse."""
    out, lse = merge_attention([row[0] for row in rows], [row[1] for row in rows])
    (out.sum() + lse.sum()).backward()
    return [out.item(), lse.item(), *(x.grad.item() for row in rows for x in row)]


def test_rows_without_keys_take_no_weight_and_give_no_nan() -> None:
    assert merge_rows(one_row(0, -INF), one_row(5, 2)) == [5, 2, 0, 0, 1, 1]
    assert merge_rows(one_row(5, 2), one_row(0, -INF)) == [5, 2, 1, 1, 0, 0]
    assert merge_rows(one_row(0, -INF), one_row(0, -INF)) == [0, -INF, 0, 0, 0, 0]
    assert merge_rows(one_row(0, -INF)) == [0, -INF, 0, 0]


def test_a_result_a_hundred_higher_decides_in_both_orders() -> None:
    small = math.exp(-100)
    for swapped in (False, True):
        rows = [one_row(1, 0), one_row(5, 100)]
        out, lse = merge_rows(*(reversed(rows) if swapped else rows))[:2]
        assert (out, lse) == (5, 100)
        assert [x.grad.item() for x in rows[1]] == [1, pytest.approx(1)]
        assert [x.grad.item() for x in rows[0]] == [pytest.approx(small), pytest.approx((1 - 5 + 1) * small)]


def test_what_does_not_fit_is_refused_with_its_sizes() -> None:
    out, lse = torch.zeros(2, 5, 3, 8), torch.zeros(2, 3, 5)
    for outs, lses, text in (
        ([], [], r"there are 0 outs and 0 lses.*\[CP024\]"),
        ([out], [lse, lse], r"there are 1 outs and 2 lses.*\[CP024\]"),
        ([out[0]], [lse], r"outs\[0\] has 3 dimensions.*\[CP020\]"),
        ([out, out[:, :4]], [lse, lse], r"outs\[1\] has sizes \[2, 4, 3, 8\].*\[CP024\]"),
        ([out], [lse.mT], r"Fix: lses\[0\].transpose\(1, 2\).*\[CP024\]"),
        ([out, out.half()], [lse, lse], r"outs\[1\] is float16, outs\[0\] float32.*\[CP021\]"),
    ):
        with pytest.raises(ValueError, match=r"(?s)^\[merge_attention\] .*" + text):
            merge_attention(outs, lses)


@pytest.mark.slow
def test_one_graph_for_every_length_equals_eager() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *xs: merge_attention(xs[:2], xs[2:]), fullgraph=True, dynamic=True, backend=counter)
    for length in (29, 12, 40):
        grads = []
        for call in (lambda *xs: merge_attention(xs[:2], xs[2:]), compiled):
            q, k, v = inputs(torch.float32, keys=length)
            q = q.repeat(1, length, 1, 1)
            outs, lses = parts(q, k, v, (length - 4, 4))
            leaves = [x.detach().requires_grad_() for x in (*outs, *lses)]
            out, lse = call(*leaves)
            (out.square().sum() + lse.sum()).backward()
            grads.append([out, lse, *(x.grad for x in leaves)])
        for got, expected in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_inductor_and_opcheck() -> None:
    outs, lses = parts(*inputs(torch.float32), (9, 20))
    compiled = torch.compile(merge_attention, fullgraph=True)
    for got, expected in zip(compiled(outs, lses), merge_attention(outs, lses), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    opcheck(torch.ops.ulysses.merge_attention.default, (outs, lses))
