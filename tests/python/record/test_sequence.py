"""Lengths that do not divide: no token is lost, whatever the shards."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import UNEVEN, Cell, assert_right, run_cells
from oracle import Numbers, oracle_with_grads
from probes import (
    Tensors,
    assert_equal,
    assert_refused_before_data,
    assert_rows,
    attend,
    each_strategy,
    normal,
    padded_to,
    per_token,
    uniform,
)
from refusals import assert_text

STRICT = ua.UlyssesContextParallelPolicy(auto_pad=False)


@pytest.mark.parametrize("layout", [ua.SequenceLayout(9, 2), ua.SequenceLayout(9, 2, UNEVEN)], ids=["padded", "uneven"])
@each_strategy
def test_b01_a_length_that_does_not_divide_is_attended(strategy: str, layout: ua.SequenceLayout) -> None:
    """Any length that the ranks do not divide ended in a bare assertion.

    Source: https://github.com/huggingface/diffusers/pull/12988
    """
    out = attend(2, uniform(per_token(range(9))), strategy=strategy, layout=layout)["out"]
    assert out.shape == (1, 9, 4, 8)
    assert_rows(out, [4.0] * 9)
    qkv, weights = normal(9)[:3], normal(9)[3]
    assert_equal(attend(2, qkv, weights, strategy=strategy, layout=layout), oracle_with_grads(*qkv, weights))


def test_b01_the_refusal_names_the_length_the_degree_and_the_next_legal_length() -> None:
    with pytest.raises(ValueError) as caught:
        ua.SequenceLayout(9, 2, STRICT)
    assert_text(str(caught.value), "CP010", "seq_len=9", "cp_size=2", "pad to 16 (8 per rank)")
    layout = ua.SequenceLayout(9, 2, UNEVEN)
    x = torch.zeros(1, 8, 4, 8)

    def call(rank: int) -> dict[str, Any]:
        return {"q": x, "k": x, "v": x, "policy": STRICT, "layout": layout}

    assert_refused_before_data(2, call, ValueError, "CP010", "seq_len=9", "cp_size=2", "pad to 16 (8 per rank)")


@each_strategy
def test_b02_shards_of_other_lengths_are_right_or_refused_with_the_lengths(strategy: str) -> None:
    """Local shards of different length gave numbers, no error, and the numbers were wrong.

    Source: https://github.com/deepspeedai/DeepSpeed/issues/7384
    """
    layout = ua.SequenceLayout.from_lengths([5, 4])
    values, (*qkv, weights) = uniform(per_token(range(9))), normal(9)
    assert_rows(attend(2, values, strategy=strategy, layout=layout)["out"], [4.0] * 9)
    assert_equal(attend(2, tuple(qkv), weights, strategy=strategy, layout=layout), oracle_with_grads(*qkv, weights))

    def without_a_layout(rank: int, group: Any) -> Any:
        shards = [layout.shard(x, rank) for x in values]
        exchanged = ua.ulysses_attention(*shards, group, strategy=strategy, policy=UNEVEN)
        try:
            return exchanged, ua.ulysses_attention(*shards, group, strategy=strategy)
        except RuntimeError as error:
            return exchanged, str(error)

    for exchanged, text in ua.run_ranks(without_a_layout, 2):
        assert_rows(exchanged, [4.0] * exchanged.size(1))
        assert isinstance(text, str), "no error"
        assert_text(text, "CP013", "[5, 4]", "SequenceLayout.from_lengths([5, 4])")


@pytest.mark.parametrize("policy", [None, UNEVEN], ids=["padded", "uneven"])
@each_strategy
def test_b04_no_token_is_lost_between_shard_and_gather(
    strategy: str, policy: ua.UlyssesContextParallelPolicy | None
) -> None:
    """Sharding by floor division dropped the last tokens without a word: 8 rows of 3.5 for 10 of 4.5.

    Source: https://github.com/ByteDance-Seed/VeOmni/issues/61
    """
    layout = ua.SequenceLayout(10, 4, policy)
    values = uniform(per_token(range(10)))

    def on_rank(rank: int, group: Any) -> Tensors:
        shards = [layout.shard(x, rank) for x in values]
        out = ua.ulysses_attention(*shards, group, strategy=strategy, layout=layout)
        return layout.gather(out, group, grad="slice"), layout.gather(shards[2], group, grad="slice")

    for out, tokens in ua.run_ranks(on_rank, 4):
        assert out.shape == (1, 10, 4, 8)
        assert_rows(out, [4.5] * 10)
        assert torch.equal(tokens, values[2])


@functools.lru_cache(maxsize=1)
def _image_tokens() -> tuple[Tensors, Numbers]:
    inputs = normal(6889)
    return inputs, oracle_with_grads(*inputs)


@each_strategy
def test_b05_the_tokens_of_a_square_image_on_four_ranks(strategy: str) -> None:
    """The 6889 tokens of a 1328 × 1328 image could not run: the buffers of the exchange disagreed in length.

    Source: https://github.com/vllm-project/vllm-omni/issues/492
    """
    (*qkv, weights), reference = _image_tokens()
    got = attend(4, tuple(qkv), weights, strategy=strategy)
    assert got["out"].shape == (1, 6889, 4, 8)
    assert_equal(got, reference)


@each_strategy
def test_b07_the_last_real_token_of_a_padded_sequence_counts(strategy: str) -> None:
    """Seven tokens padded to eight were computed as six: the mean of the squares became 11 or 13.667 for 13.

    Source: https://github.com/NVIDIA/TransformerEngine/issues/1930
    """
    squares = uniform(per_token([j * j for j in range(7)]))
    got = attend(2, squares, torch.ones(1, 7, 4, 8), strategy=strategy, layout=padded_to(8, 7, 2))
    assert_rows(got["out"], [13.0] * 7)  # the padded row is seen to be 0, and not NaN, by attend
    assert_rows(got["dv"], [1.0] * 7)  # seven queries, of which each gives a seventh to each key


@each_strategy
def test_b09_what_forward_accepts_backward_accepts(strategy: str) -> None:
    """The odd half-shard of a balanced causal split failed, and in backward only.

    Source: https://github.com/jzhang38/EasyContext/issues/47
    """
    with pytest.raises(NotImplementedError, match=r"head_tail.*\[CP049\]"):  # before there is a call
        ua.SequenceLayout(7, 2, order="head_tail")
    *qkv, weights = normal(7)
    got = attend(2, tuple(qkv), weights, strategy=strategy, is_causal=True)
    assert_equal(got, oracle_with_grads(*qkv, weights, is_causal=True))


@pytest.mark.parametrize("seq_len", [1, 3, 4])
@each_strategy
def test_b10_tiny_inputs_keep_shape_and_dtype(strategy: str, seq_len: int) -> None:
    """Four tokens of head size 4 on two ranks came back in another shape.

    Source: https://github.com/pytorch/pytorch/issues/159706
    """
    cells = [
        Cell(seq_len, (heads, heads), strategy, layout=layout, dtype=torch.bfloat16, head_dim=4)
        for heads in (1, 2)
        for layout in ("uneven", "padded", "exchanged")
    ]
    ranks = ua.run_ranks(lambda rank, group: run_cells(rank, group, cells), 2)
    assert_right(cells, ranks)
    for rank, parts in enumerate(ranks):
        for cell, numbers in zip(cells, parts, strict=True):
            rows = cell.layouts(2)[0].padded_lengths[rank]
            assert numbers["out"].dtype == torch.bfloat16
            assert numbers["out"].shape == (1, rows, cell.heads[0], 4)


@each_strategy
def test_b11_a_hybrid_mesh_is_refused_and_the_flat_group_takes_any_length(strategy: str) -> None:
    """A mesh of two degrees could not run a length that does not divide, because one of its paths takes no mask.

    Source: https://github.com/vllm-project/vllm-omni/pull/1379
    """
    assert_refused_before_data(
        4, lambda rank: {"strategy": strategy, "ulysses_degree": 2}, NotImplementedError, "CP047", "hybrid_degree"
    )
    assert_rows(attend(4, uniform(per_token(range(10))), strategy=strategy)["out"], [4.5] * 10)
