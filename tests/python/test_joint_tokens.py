"""Joint tokens: one sequence of text and shards, against float64 attention on one process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES
from full_calls import GRADIENT, FullCall, check_on_threads, expected, run_full, together
from ulysses_attention import _C

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_position = pytest.mark.parametrize("position", ["prefix", "suffix"])
SHARDS: list[dict[str, Any]] = [
    {"seq_len": 8},
    {"seq_len": 11},
    {"seq_len": 11, "padded": True},
    {"seq_len": 9, "lengths": (0, 2, 7)},
    {"seq_len": 9, "lengths": (9, 0, 0)},
]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@each_position
@each_strategy
def test_text_and_shards_are_one_sequence(strategy: str, position: str, is_causal: bool) -> None:
    """Equal, uneven, padded and empty shards; one text token and more than the ranks."""
    calls = [
        FullCall(**shards, text_len=text, position=position, is_causal=is_causal, strategy=strategy, return_lse=lse)
        for shards, text, lse in itertools.product(SHARDS, (1, 2, 5), (True, False))
    ]
    check_on_threads(3, calls)


@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (5, 1), (2, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
@each_strategy
def test_heads_that_do_not_divide_and_grouped_ones(strategy: str, world: int, heads: tuple[int, int]) -> None:
    calls = [
        FullCall(9, heads, text_len=3, position=position, is_causal=is_causal, strategy=strategy, v_head_dim=width)
        for position, is_causal, width in itertools.product(("prefix", "suffix"), (False, True), (8, 5))
    ]
    check_on_threads(world, calls)


@pytest.mark.parametrize("valid_lens", [(5, 3), (2, 5), (0, 4), (3, 3), (0, 0), (5, 5)], ids=str)
@each_position
@each_strategy
def test_text_that_ends_early(strategy: str, position: str, valid_lens: tuple[int, int]) -> None:
    """Rows behind the end come back zero with an lse of −inf, and no query sees their keys."""
    calls = [
        FullCall(**shards, text_len=5, position=position, valid_lens=valid_lens, strategy=strategy, is_causal=causal)
        for shards, causal in itertools.product(SHARDS, (False, True))
    ]
    check_on_threads(3, calls)
    numbers = expected(calls[0], 3)  # the reference itself, by hand
    for b, end in enumerate(valid_lens):
        assert not numbers["joint_out"][b, end:].any() and not numbers["joint_dk"][b, end:].any()
        assert bool((numbers["joint_lse"][b, :, end:] == -math.inf).all())


@pytest.mark.parametrize("mask", ["keys", "rows", "full", "bias", "bias of all", "bias" + GRADIENT,
                                  "bias of all" + GRADIENT, "bias of keys" + GRADIENT])  # fmt: skip
@each_position
@each_strategy
def test_masks_have_the_axes_of_the_joined_sequence(strategy: str, position: str, mask: str) -> None:
    """Also where valid_lens hide keys besides, equal ones included: a mask counts all T tokens."""
    calls = [
        FullCall(11, text_len=4, position=position, mask=mask, valid_lens=ends, strategy=strategy, is_causal=causal)
        for ends, causal in itertools.product((None, (4, 1), (2, 2)), (False, True))
    ]
    check_on_threads(3, calls)


@each_position
@each_strategy
def test_sinks_softcap_scale_and_the_gradient_through_lse(strategy: str, position: str) -> None:
    calls = [
        FullCall(11, text_len=4, position=position, strategy=strategy, valid_lens=ends, **options)
        for ends in (None, (4, 2))
        for options in (
            {"sinks": True},
            {"softcap": 2.0, "is_causal": True},
            {"softmax_scale": 0.2},
            {"lse_grad": True},
            {"lse_grad": True, "sinks": True, "softcap": 2.0, "is_causal": True},
        )
    ]
    check_on_threads(3, calls)


@each_position
@each_strategy
def test_keys_of_another_length(strategy: str, position: str) -> None:
    check_on_threads(3, [FullCall(7, kv_len=10, text_len=3, position=position, strategy=strategy)])


@each_strategy
def test_no_text_token_at_all(strategy: str) -> None:
    """An empty text is no text, and comes back empty."""
    x = torch.randn(1, 8, 4, 8)
    empty = ua.JointTokens(*torch.zeros(3, 1, 0, 4, 8))

    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = x[:, 4 * rank : 4 * rank + 4]
        out, text = ua.ulysses_attention(mine, mine, mine, group, strategy=strategy, joint=empty)
        return out, text, ua.ulysses_attention(mine, mine, mine, group, strategy=strategy)

    for out, text, without in ua.run_ranks(on_rank, 2):
        assert text.shape == (1, 0, 4, 8) and torch.equal(out, without)


@each_position
@each_strategy
def test_the_text_has_the_same_bits_on_every_rank(strategy: str, position: str) -> None:
    """In half precision, where any other order of sums would show. together() compares the bits."""
    call = FullCall(37, (6, 3), text_len=5, position=position, strategy=strategy, dtype=torch.bfloat16, is_causal=True)
    numbers = together(call, ua.run_ranks(lambda rank, group: run_full(rank, group, call), 4))
    assert (numbers["joint_out"] - expected(call, 4)["joint_out"]).abs().max() < 0.05


@each_strategy
def test_what_is_sent(strategy: str) -> None:
    """Text is on every rank already: q, k and v of it are never sent, its output and the gradient of that are."""
    text, seq_len, heads, dim = 5, 8, 4, 8

    def on_rank(rank: int, group: Any) -> list[list[tuple[str, int]]]:
        recorder = _C.Recorder()
        recorded = _C.record_group(group, recorder)
        leaves = [torch.ones(1, seq_len // 2, heads, dim, requires_grad=True) for _ in range(3)]
        texts = [torch.ones(1, text, heads, dim, requires_grad=True) for _ in range(3)]
        out, joint_out = ua.ulysses_attention(  # type: ignore[misc]
            *leaves, recorded, strategy=strategy, joint=ua.JointTokens(*texts), agreement="off"
        )
        found = [[(record.name, record.bytes_sent) for record in recorder.records()]]
        recorder.clear()
        torch.autograd.grad([out, joint_out], leaves + texts, [torch.ones_like(out), torch.ones_like(joint_out)])
        return [*found, [(record.name, record.bytes_sent) for record in recorder.records()]]

    row = heads * dim * 4
    for forward, backward in ua.run_ranks(on_rank, 2):
        sizes = [[size for _, size in records] for records in (forward, backward)]
        if strategy == "ulysses":
            # To the other rank: q, k and v of half the heads of 4 tokens; then out of 4 tokens and the text, half the
            # heads. Backward the same ways: the gradient of out; then of q, k and v.
            exchange, restore = 3 * 4 * row // 2, (4 + text) * row // 2
            assert sizes == [[exchange, restore], [restore, exchange]]
        else:
            # K and V of 4 tokens, then the outputs of the rank's share of the text; backward its gradient, of the
            # other's share, and the partial dK and dV of the other's tokens.
            share = (3, 2)
            rank = 0 if sizes[0][1] == share[0] * row else 1
            assert sizes == [[2 * 4 * row, share[rank] * row], [share[1 - rank] * row, 2 * 4 * row]]


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
@pytest.mark.parametrize("position", ["prefix", "suffix"])
def test_lengths_that_the_ranks_tell_each_other_leave_the_text_out(position: str, strategy: str) -> None:
    """Two text tokens with v = 1 beside nine image tokens with v = 0, without a layout: every mean is 2 / 11."""
    policy = ua.UlyssesContextParallelPolicy(require_seq_divisible=False)

    def call(rank: int, group: Any) -> list[torch.Tensor]:
        zeros = torch.zeros(1, (5, 4)[rank], 4, 8)
        image = [zeros.clone().requires_grad_() for _ in range(3)]
        text = ua.JointTokens(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 4, 8), position)
        outs = ua.ulysses_attention(*image, group, policy=policy, strategy=strategy, joint=text)
        outs[0].sum().backward()
        return [out.detach() for out in outs] + [image[2].grad]

    for rank, (out, text_out, dv) in enumerate(ua.run_ranks(call, 2)):
        assert out.shape == (1, (5, 4)[rank], 4, 8) and text_out.shape == (1, 2, 4, 8)
        for value in (out, text_out):
            torch.testing.assert_close(value, torch.full_like(value, 2 / 11))
        torch.testing.assert_close(dv, torch.full_like(dv, 9 / 11))
