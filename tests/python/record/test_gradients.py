"""Backward belongs to the forward: dq, dk and dv of the local tokens, complete on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import UNEVEN
from oracle import Numbers, max_error, oracle_with_grads
from probes import (
    Tensors,
    assert_equal,
    assert_refused_before_data,
    attend,
    each_strategy,
    normal,
    plain,
)


@each_strategy
def test_b52_backward_uses_the_keys_that_forward_used(strategy: str) -> None:
    """Backward took the local keys for every step: forward was right, gradients were wrong, and nothing failed.

    Source: https://github.com/huggingface/diffusers/issues/14265
    """
    inputs = normal(8, heads=2)
    got, reference = attend(2, inputs[:3], inputs[3], strategy=strategy), oracle_with_grads(*inputs)
    for name in ("dq", "dk", "dv"):
        for mine, right in zip(got[name].chunk(2, 1), reference[name].chunk(2, 1), strict=True):
            assert max_error(mine, right) < 1e-4


# --- a norm before attention ------------------------------------------------------------------------------------------


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _with_norms(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor, attention: Callable[..., Any]
) -> Numbers:
    """Gradients of q, k, v and of the two norms' weights."""
    scales = [torch.linspace(0.5, 1.5, 8, dtype=q.dtype).requires_grad_() for _ in range(2)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(_normed(leaves[0], scales[0]), _normed(leaves[1], scales[1]), leaves[2])
    grads = torch.autograd.grad(out, [*leaves, *scales], weights)
    return dict(zip(("dq", "dk", "dv", "of_q_norm", "of_k_norm"), grads, strict=True))


@pytest.mark.parametrize("world", [2, 4])
@each_strategy
def test_b54_gradients_of_a_norm_before_attention_a_hundred_times(strategy: str, world: int) -> None:
    """The gradient of the key's norm was taken before the exchange had finished.

    Source: https://github.com/ByteDance-Seed/VeOmni/issues/420
    """
    inputs = normal(8)
    reference = _with_norms(*(x.double() for x in inputs), lambda q, k, v: plain(q, k, v)[0])
    layout = ua.SequenceLayout(8, world, UNEVEN)

    def on_rank(rank: int, group: Any) -> list[Numbers]:
        shards = [layout.shard(x, rank) for x in inputs]
        call = functools.partial(ua.ulysses_attention, cp_group=group, strategy=strategy)
        return [_with_norms(*shards, call) for _ in range(100)]

    ranks = ua.run_ranks(on_rank, world)
    for repeats in ranks:
        for repeat in repeats:
            assert all(torch.equal(x, repeats[0][name]) for name, x in repeat.items())
    first = [repeats[0] for repeats in ranks]
    got = {name: torch.cat([numbers[name] for numbers in first], 1) for name in ("dq", "dk", "dv")}
    sums = {name: torch.stack([numbers[name] for numbers in first]).sum(0) for name in ("of_q_norm", "of_k_norm")}
    assert_equal({**got, **sums}, reference)


@each_strategy
def test_b55_gradients_of_causal_attention_are_those_of_one_process(strategy: str) -> None:
    """Gradients differed from one process's by more than 100 percent, although forward agreed.

    Source: https://github.com/NVIDIA/TransformerEngine/issues/1557
    """
    inputs = normal(16, heads=2, head_dim=16)
    got = attend(2, inputs[:3], inputs[3], strategy=strategy, is_causal=True)
    reference = oracle_with_grads(*inputs, is_causal=True)
    for name, x in got.items():
        assert (x - reference[name]).norm() <= 1e-5 * reference[name].norm(), name


@pytest.mark.parametrize(("real", "rows"), [(9, 12), (7, 8), (8, 8), (3, 8)])
@each_strategy
def test_b57_a_shard_that_is_nearly_all_padding_has_finite_gradients(strategy: str, real: int, rows: int) -> None:
    """Sequences so short that one rank's piece was all padding made dK and dV explode.

    Source: https://github.com/NVIDIA/TransformerEngine/issues/2186
    """
    *qkv, weights = normal(real)
    layout = ua.SequenceLayout(real, 2, ua.UlyssesContextParallelPolicy(pad_multiple=rows // 2))
    assert sum(layout.padded_lengths) == rows
    got = attend(2, tuple(qkv), weights, strategy=strategy, layout=layout, is_causal=True)  # padded rows: exactly 0
    assert_equal(got, oracle_with_grads(*qkv, weights, is_causal=True))


@each_strategy
def test_b57_packed_sequences_are_refused(strategy: str) -> None:
    packed = {"cu_seqlens_q": torch.tensor([0, 9, 16, 24]), "strategy": strategy}
    assert_refused_before_data(2, lambda rank: packed, NotImplementedError, "CP045", "packed_sequences")


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"dropout_p": 0.1, "dropout_seed": 7}, {"dropout_seed": 7}])
@each_strategy
def test_b58_dropout_is_refused_and_none_is_right(strategy: str, options: dict[str, Any]) -> None:
    """Backward did not replay the random state of forward, and its gradients belonged to another mask.

    Source: https://github.com/zhuzilin/ring-flash-attention/issues/36
    """
    call = {**options, "strategy": strategy}
    assert_refused_before_data(2, lambda rank: call, NotImplementedError, "CP042", "dropout", "dropout_p=0.0")
    inputs: Tensors = normal(8)
    got = attend(2, inputs[:3], inputs[3], strategy=strategy, dropout_p=0.0)  # as in evaluation
    assert_equal(got, oracle_with_grads(*inputs))
