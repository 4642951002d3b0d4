"""Query heads that ranks do not divide, and fewer KV heads: each query head reads its own, and none is repeated."""

from __future__ import annotations

import torch

from oracle import oracle_with_grads
from probes import (
    Tensors,
    assert_equal,
    assert_refused_before_data,
    assert_rows,
    attend,
    each_strategy,
    normal,
    uniform,
)
from ulysses_attention import _C


def _assert_right(world: int, seq_len: int, heads: int, kv_heads: int, strategy: str) -> None:
    *qkv, weights = normal(seq_len, heads, kv_heads)
    got = attend(world, tuple(qkv), weights, strategy=strategy)
    assert got["out"].shape == (1, seq_len, heads, 8)
    assert got["dk"].shape == got["dv"].shape == (1, seq_len, kv_heads, 8)
    assert_equal(got, oracle_with_grads(*qkv, weights))


def _of_kv_head(seq_len: int, heads: int, kv_heads: int) -> Tensors:
    """The uniform probe with the number of its KV head for every value."""
    v = torch.arange(float(kv_heads)).view(1, 1, kv_heads, 1).expand(1, seq_len, kv_heads, 8)
    return uniform(v.contiguous(), heads)


@each_strategy
def test_b12_thirty_heads_on_four_ranks(strategy: str) -> None:
    """A model of 30 heads could not use 4 ranks.

    Source: https://github.com/vipshop/cache-dit/pull/546
    """
    _assert_right(4, 8, 30, 30, strategy)


@each_strategy
def test_b13_any_degree_takes_any_head_count(strategy: str) -> None:
    """Nothing explained which two degrees are legal: here forty heads on three ranks are right.

    Source: https://github.com/Wan-Video/Wan2.1/issues/109
    """
    _assert_right(3, 9, 40, 40, strategy)


@each_strategy
def test_b13_degrees_that_do_not_make_the_world_are_refused(strategy: str) -> None:
    """U = 2 and R = 2 in a world of eight: as a size it names 4 and 8, as two degrees it is not offered."""
    assert_refused_before_data(
        8,
        lambda rank: {"strategy": strategy, "cp_size": 2 * 2},
        ValueError,
        "CP026",
        "cp_size=4",
        "the group has 8 ranks",
    )
    assert_refused_before_data(
        8, lambda rank: {"strategy": strategy, "ulysses_degree": 2}, NotImplementedError, "CP047", "cp_size 8"
    )


@each_strategy
def test_b15_twenty_eight_heads_on_eight_ranks(strategy: str) -> None:
    """Nothing said what happens with 28 heads, 4 of keys, on 8 ranks.

    Source: https://github.com/DAMO-NLP-SG/LongPO/issues/5
    """
    _assert_right(8, 16, 28, 4, strategy)


def test_b15_the_guide_says_so_in_one_line() -> None:
    guide = _C.render_guide()
    for feature in ("uneven_heads", "grouped_kv", "fewer_kv_heads_than_ranks", "fewer_heads_than_ranks"):
        (line,) = [line for line in guide.splitlines() if line.startswith(f"| `{feature}` |")]
        assert line.count(" yes: ") == 2, line


@each_strategy
def test_b16_kv_heads_serve_blocks_of_query_heads(strategy: str) -> None:
    """The degree was capped at the number of KV heads.

    Source: https://github.com/verl-project/verl/issues/1226
    """
    out = attend(4, _of_kv_head(8, heads=8, kv_heads=2), strategy=strategy)["out"]
    assert_rows(out, torch.tensor([0.0] * 4 + [1.0] * 4).view(1, 1, 8, 1))  # in blocks, not interleaved
    _assert_right(10, 20, 40, 8, strategy)


@each_strategy
def test_b17_the_ratio_of_query_and_kv_heads_survives(strategy: str) -> None:
    """Query and KV heads were padded each on its own, 28 of 7 became 28 of 8, and heads read their neighbour's keys.

    Source: https://github.com/vllm-project/vllm-omni/pull/5716
    """
    out = attend(2, _of_kv_head(8, heads=28, kv_heads=7), strategy=strategy)["out"]
    assert_rows(out, torch.arange(28).div(4, rounding_mode="floor").view(1, 1, 28, 1))


@each_strategy
def test_b18_grouped_heads_in_float32_and_no_hybrid_mesh(strategy: str) -> None:
    """On a mesh of two degrees the inner kernel wanted as many KV heads as query heads.

    Source: https://github.com/vllm-project/vllm-omni/pull/5716
    """
    assert_refused_before_data(
        4, lambda rank: {"strategy": strategy, "ulysses_degree": 2}, NotImplementedError, "CP047", "hybrid_degree"
    )
    _assert_right(4, 8, 4, 2, strategy)
