"""Text on every rank and an image in shards: each token counts once, and what is replicated is not exchanged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from oracle import oracle, oracle_with_grads
from probes import (
    Tensors,
    assert_equal,
    assert_refused_before_data,
    assert_rows,
    attend,
    attend_joint,
    each_strategy,
    joint_oracle,
    normal,
    per_token,
    plain_with_grads,
    uniform,
)
from ulysses_attention import _C


def _with_ones(qkv: Tensors) -> Tensors:
    return (*qkv, torch.ones_like(qkv[0]))


def _text_and_image(num_text: int, num_image: int) -> tuple[Tensors, Tensors]:
    """The uniform probe: text holds 1 and the image 0, so the output is the text's share of the weight."""
    return _with_ones(uniform(per_token([1.0] * num_text))), _with_ones(uniform(per_token([0.0] * num_image)))


@pytest.mark.parametrize("world", [2, 4])
@each_strategy
def test_b31_text_counts_once_on_any_number_of_ranks(strategy: str, world: int) -> None:
    """One exchange for text and image copied the text once per rank: 0.5 on two ranks, 0.67 on four, for a third.

    Source: https://github.com/vllm-project/vllm-omni/pull/377
    """
    text, image = _text_and_image(2, 4)
    got = attend_joint(world, image, text, "prefix", strategy=strategy)
    assert_rows(got["out"], [1 / 3] * 4)
    assert_rows(got["joint_out"], [1 / 3] * 2)
    for name in ("lse", "joint_lse"):
        assert (got[name] - math.log(6)).abs().max() < 1e-5
    assert_rows(got["dv"], [1.0] * 4)  # six queries, of which each gives a sixth to each key
    assert_rows(got["joint_dv"], [1.0] * 2)


@pytest.mark.parametrize("position", ["prefix", "suffix"])
@pytest.mark.parametrize("world", [2, 4])
@each_strategy
def test_b31_text_and_image_are_one_sequence(strategy: str, world: int, position: str) -> None:
    text, image = normal(3, 4, 2, batch=2, seed=1), normal(9, 4, 2, batch=2)
    got = attend_joint(world, image, text, position, strategy=strategy)
    assert_equal(got, joint_oracle(image, text, position))


@each_strategy
def test_b33_text_behind_the_image(strategy: str) -> None:
    """Text appended behind the image was joined at the wrong step, and the picture had artefacts.

    Source: https://github.com/xdit-project/xDiT/pull/611
    """
    text, image = _text_and_image(2, 8)
    got = attend_joint(4, image, text, "suffix", strategy=strategy)
    assert_rows(got["out"], [0.2] * 8)
    assert_rows(got["joint_out"], [0.2] * 2)
    for position in ("prefix", "suffix"):
        text, image = normal(2, seed=1), normal(8)
        assert_equal(attend_joint(4, image, text, position, strategy=strategy), joint_oracle(image, text, position))


@each_strategy
def test_b33_on_a_mesh_of_two_degrees_it_is_refused(strategy: str) -> None:
    x = torch.zeros(1, 2, 4, 8)

    def call(rank: int) -> dict[str, Any]:
        return {"strategy": strategy, "joint": ua.JointTokens(x, x, x, position="suffix"), "ulysses_degree": 2}

    assert_refused_before_data(4, call, NotImplementedError, "CP047", "hybrid_degree")


@each_strategy
def test_b35_replicated_keys_count_once(strategy: str) -> None:
    """Cross-attention exchanged text that every rank has: P times as many keys, ln 12 in the lse where ln 6 is right.

    Source: https://github.com/vllm-project/vllm-omni/issues/1219
    """
    q, k, v = torch.zeros(2, 8, 4, 8), torch.zeros(2, 6, 4, 8), per_token(range(6), batch=2)
    options: dict[str, Any] = {"strategy": strategy, "kv_role": "replicated"}
    got = attend(2, (q, k, v), **options)
    assert (got["lse"] - math.log(6)).abs().max() < 1e-5
    assert_rows(got["out"], [2.5] * 8)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    got = attend(2, (q, k, v), attn_mask=valid, **options)
    assert (got["lse"] - torch.tensor([6, 4]).log().view(2, 1, 1)).abs().max() < 1e-5
    assert_rows(got["out"], torch.tensor([2.5, 1.5]).view(2, 1, 1, 1))
    *qkv, weights = normal(8, 4, 2, kv_len=6, batch=2)
    assert_equal(attend(2, tuple(qkv), weights, **options), oracle_with_grads(*qkv, weights))
    masked = plain_with_grads(*qkv, weights, seen=valid[:, None, None])
    assert_equal(attend(2, tuple(qkv), weights, attn_mask=valid, **options), masked)


@each_strategy
def test_b36_replicated_keys_of_any_number_and_no_collective(strategy: str) -> None:
    """The 769 keys of a text and an image condition do not divide, and they never needed to.

    Source: https://github.com/huggingface/diffusers/pull/12909
    """
    q, k, v, weights = normal(8, kv_len=769)

    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, list[Any]]:
        recorder = _C.Recorder()
        recorded = _C.record_group(group, recorder)
        leaves = [x.clone().requires_grad_() for x in (q[:, 2 * rank : 2 * rank + 2], k, v)]
        out = ua.ulysses_attention(*leaves, recorded, strategy=strategy, kv_role="replicated", agreement="off")
        torch.autograd.grad(out, leaves, weights[:, 2 * rank : 2 * rank + 2])
        return out.detach(), recorder.records()

    outs, records = zip(*ua.run_ranks(on_rank, 4), strict=True)
    assert records == ([],) * 4
    assert_equal({"out": torch.cat(outs, 1)}, {"out": oracle(q, k, v)[0]})
    got = attend(4, (q, k, v), weights, strategy=strategy, kv_role="replicated")
    assert_equal(got, oracle_with_grads(q, k, v, weights))


@each_strategy
def test_b38_the_causal_triangle_lies_on_the_joined_sequence(strategy: str) -> None:
    """The triangle was laid on the block of text and image keys, so that text in front was partly hidden.

    Source: https://github.com/vllm-project/vllm-omni/issues/673
    """
    text, image = _text_and_image(2, 4)
    got = attend_joint(2, image, text, "prefix", strategy=strategy, is_causal=True)
    assert_rows(got["out"], [2 / 3, 1 / 2, 2 / 5, 1 / 3])
    assert_rows(got["joint_out"], [1.0, 1.0])
    got = attend_joint(2, image, text, "suffix", strategy=strategy, is_causal=True)
    assert_rows(got["out"], [0.0] * 4)  # what stands behind is not seen
    assert_rows(got["joint_out"], [1 / 5, 2 / 6])


@pytest.mark.parametrize("position", ["prefix", "suffix"])
@each_strategy
def test_b38_causal_text_and_image_are_one_sequence(strategy: str, position: str) -> None:
    text, image = normal(3, 4, 2, seed=1), normal(7, 4, 2)
    got = attend_joint(3, image, text, position, strategy=strategy, is_causal=True)
    assert_equal(got, joint_oracle(image, text, position, is_causal=True))
