"""Padding takes no weight, moves no diagonal, and no keyword that describes it is swallowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ulysses_attention as ua
from oracle import oracle_with_grads
from probes import assert_equal, assert_rows, attend, each_strategy, normal, padded_to, per_token, uniform
from ulysses_attention import _C

ONES = per_token([1.0] * 5)
KERNELS = ["auto", *_C.kernel_names()]


@each_strategy
def test_b27_padded_keys_take_no_weight(strategy: str) -> None:
    """Zero keys that pad a sequence still took softmax weight: 0.625 came out where everything is 1.

    Source: https://github.com/chengzeyi/ParaAttention/pull/36
    """
    got = attend(4, uniform(ONES), torch.ones(1, 5, 4, 8), strategy=strategy, layout=padded_to(8, 5, 4))
    assert_rows(got["out"], [1.0] * 5)
    assert_rows(got["dv"], [1.0] * 5)
    *qkv, weights = normal(5)
    got = attend(4, tuple(qkv), weights, strategy=strategy, layout=padded_to(8, 5, 4))
    assert_equal(got, oracle_with_grads(*qkv, weights))


def _runs_on_cpu(kernel: str) -> bool:
    return not kernel.startswith("cuda")


@pytest.mark.parametrize("kernel", KERNELS)
@each_strategy
def test_b29_no_kernel_forgets_the_padding(strategy: str, kernel: str) -> None:
    """Some kernels took any keyword and dropped it, so that the mask of the padding was never applied.

    Source: https://github.com/NVIDIA/TensorRT-LLM/pull/14044
    """

    wide = uniform(per_token([1.0] * 5, head_dim=16))  # of a head size that every kernel takes

    def call() -> torch.Tensor:
        return attend(2, wide, strategy=strategy, kernel=kernel, layout=padded_to(6, 5, 2))["out"]

    if kernel in ("auto", "math", "cpu_fused"):
        assert_rows(call(), [1.0] * 5)
        return
    missing = "needs AVX2" if kernel == "cpu_flash" else "runs on device cuda, not cpu"
    try:
        out = call()
    except NotImplementedError as error:
        assert missing in str(error) and str(error).endswith("[CP032]"), error
    else:
        assert _runs_on_cpu(kernel)
        assert_rows(out, [1.0] * 5)


@pytest.mark.parametrize("kernel", KERNELS)
@each_strategy
def test_b29_a_kernel_applies_the_mask_or_says_that_it_cannot(strategy: str, kernel: str) -> None:
    values = uniform(per_token([1.0] * 5 + [0.0]))
    seen = torch.tensor([[True] * 5 + [False]])

    def call() -> torch.Tensor:
        return attend(2, values, strategy=strategy, kernel=kernel, attn_mask=seen)["out"]

    if kernel in ("auto", "math"):
        assert_rows(call(), [1.0] * 6)
        return
    try:
        out = call()
    except NotImplementedError as error:
        assert str(error).endswith("[CP032]"), error
    else:
        assert _runs_on_cpu(kernel)
        assert_rows(out, [1.0] * 6)


def _error_of(x: torch.Tensor, group: Any, **options: Any) -> Exception | None:
    try:
        ua.ulysses_attention(x, x, x, group, **options)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize(
    ("options", "exception", "named"),
    [
        ({"atn_mask": torch.ones(1, 4)}, TypeError, "'atn_mask'"),
        ({"key_padding_mask": torch.ones(1, 4)}, TypeError, "'key_padding_mask'"),
        ({"kernel": "maths"}, ValueError, 'kernel="maths"'),
    ],
    ids=["atn_mask", "key_padding_mask", "maths"],
)
@each_strategy
def test_b29_a_misspelt_word_is_an_error_on_every_rank(
    strategy: str, options: dict[str, Any], exception: type[Exception], named: str
) -> None:
    x = torch.zeros(1, 2, 4, 8)
    for error in ua.run_ranks(lambda rank, group: _error_of(x, group, strategy=strategy, **options), 2):
        assert type(error) is exception and named in str(error), error


class _WithoutMasks(ua.UlyssesAttentionProcessor):
    """A backend that declares nothing."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        return torch.zeros_like(q)


@each_strategy
def test_b29_a_backend_that_does_not_declare_masks_gets_none(strategy: str) -> None:
    ua.register_backend("without_masks", _WithoutMasks)
    try:
        policy = ua.UlyssesContextParallelPolicy(backend_name="without_masks")
        with pytest.raises(NotImplementedError, match=r"attn_mask.*\[CP050\]"):
            attend(2, uniform(per_token([1.0] * 6)), strategy=strategy, policy=policy, attn_mask=torch.ones(1, 6) > 0)
    finally:
        ua.unregister_backend("without_masks")


@each_strategy
def test_b30_padding_does_not_move_the_diagonal(strategy: str) -> None:
    """The obvious repair of a padded request, cutting the keys to the valid ones, shifts the causal diagonal.

    Source: https://github.com/vllm-project/vllm-omni/pull/6995
    """
    layout = padded_to(8, 5, 2)
    assert layout.lengths == (4, 1)
    assert_rows(attend(2, uniform(ONES), strategy=strategy, layout=layout)["out"], [1.0] * 5)
    counted = uniform(per_token(range(5)))
    out = attend(2, counted, strategy=strategy, layout=layout, is_causal=True)["out"]
    assert_rows(out, [i / 2 for i in range(5)])
    *qkv, weights = normal(5)
    got = attend(2, tuple(qkv), weights, strategy=strategy, layout=layout, is_causal=True)
    assert_equal(got, oracle_with_grads(*qkv, weights, is_causal=True))


@each_strategy
def test_b30_a_mask_of_the_padding_does_not_move_the_diagonal_either(strategy: str) -> None:
    counted, valid = uniform(per_token(range(8))), torch.arange(8).view(1, 8) < 5
    out = attend(2, counted, strategy=strategy, attn_mask=valid, is_causal=True)["out"]
    assert_rows(out, [i / 2 for i in range(5)] + [2.0] * 3)  # slots behind see the five valid keys
