"""The oracle itself: against one plain formula, and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

import oracle


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("chunk", [1, 1 << 18])
def test_chunks_give_the_plain_formula(monkeypatch: pytest.MonkeyPatch, is_causal: bool, chunk: int) -> None:
    monkeypatch.setattr(oracle, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(1)
    q, k, v, weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in [(2, 150, 4, 8), (2, 70, 2, 8), (2, 70, 2, 5), (2, 150, 4, 5)]
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1].repeat_interleave(2, 2)) * 0.3
    if is_causal:
        scores = scores.masked_fill(torch.ones(150, 70).tril() == 0, -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), leaves[2].repeat_interleave(2, 2))
    wanted = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, weights), strict=True))
    wanted.update(out=out.detach(), lse=scores.detach().logsumexp(-1))
    got = oracle.oracle_with_grads(q, k, v, weights, is_causal, 0.3)
    assert got.keys() == wanted.keys()
    for name, reference in wanted.items():
        assert oracle.max_error(got[name], reference) < 1e-13, name


def test_no_keys() -> None:
    q, k = torch.ones(1, 3, 2, 4), torch.ones(1, 0, 1, 4)
    got = oracle.oracle_with_grads(q, k, k, q)
    assert got["out"].eq(0).all() and got["lse"].eq(-math.inf).all() and got["dq"].eq(0).all()
    assert got["dk"].shape == got["dv"].shape == k.shape


def test_errors_count_nan_and_shape() -> None:
    zero = torch.zeros(2)
    assert oracle.max_error(torch.tensor([0.0, math.nan]), zero) == math.inf
    assert oracle.max_error(torch.zeros(3), zero) == math.inf
    assert oracle.max_error(torch.tensor([-math.inf, 1.0]), torch.tensor([-math.inf, 1.5])) == 0.5
    assert oracle.max_error(torch.tensor([-math.inf]), torch.tensor([0.0])) == math.inf
