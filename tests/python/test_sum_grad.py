"""sum_grad: the gradient of what every rank holds alike, summed once over the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES
from oracle import max_error
from probes import joint_oracle, normal
from ulysses_attention import _C

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def _value_and_grad(rank: int, group: Any, dtype: torch.dtype, times: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(6.0).view(2, 3).to(dtype).t().requires_grad_()  # strided
    y = x
    for _ in range(times):
        y = ua.sum_grad(y, group)
    return y.detach(), torch.autograd.grad((y * (rank + 1)).sum(), x)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_value_is_x_and_the_gradient_is_the_sum(world: int, dtype: torch.dtype) -> None:
    for value, grad in ua.run_ranks(lambda rank, group: _value_and_grad(rank, group, dtype), world):
        assert torch.equal(value, torch.arange(6.0).view(2, 3).t().to(dtype)) and value.dtype == dtype
        assert torch.equal(grad, torch.full((3, 2), world * (world + 1) / 2, dtype=dtype))


def test_a_gradient_that_has_passed_twice_is_counted_for_every_rank() -> None:
    """Why it is said to be used once: behind the second one, each rank already holds the whole."""
    for _, grad in ua.run_ranks(lambda rank, group: _value_and_grad(rank, group, torch.float32, times=2), 3):
        assert torch.equal(grad, torch.full((3, 2), 3 * 6.0))


def test_forward_sends_nothing_and_backward_sends_x_once() -> None:
    def on_rank(rank: int, group: Any) -> tuple[list[Any], list[tuple[str, int]]]:
        recorder = _C.Recorder()
        recorded = _C.record_group(group, recorder)
        x = torch.zeros(5, 3).requires_grad_()
        y = ua.sum_grad(x, recorded)
        forward = recorder.records()
        torch.autograd.grad(y.sum(), x)
        return forward, [record.bytes_sent for record in recorder.records()]

    assert ua.run_ranks(on_rank, 3) == [([], [2 * 5 * 3 * 4])] * 3


def test_sums_of_half_precision_are_rounded_once() -> None:
    """256 + 1 + 1 is 258 in bfloat16; summed in bfloat16 each 1 would be lost."""

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        x = torch.zeros(1, dtype=torch.bfloat16).requires_grad_()
        return torch.autograd.grad(ua.sum_grad(x, group), x, torch.tensor([(256.0, 1.0, 1.0)[rank]]).bfloat16())[0]

    for grad in ua.run_ranks(on_rank, 3):
        assert grad.item() == 258.0


def test_without_a_gradient_it_is_still_x() -> None:
    x = torch.randn(3)
    for y in ua.run_ranks(lambda rank, group: ua.sum_grad(x, group), 2):
        assert torch.equal(y, x) and not y.requires_grad


def test_cp063_without_a_group() -> None:
    with pytest.raises(ValueError, match=r"\[CP063\]"):
        ua.sum_grad(torch.zeros(1))


@pytest.mark.parametrize("position", ["prefix", "suffix"])
@each_strategy
def test_text_behind_it_gets_the_whole_gradient_on_every_rank(strategy: str, position: str) -> None:
    """A projection of the text in front of joint attention: its weight's gradient is whole, with equal bits on all
    ranks, and that of the shards as it was."""
    text, image = normal(3, 4, seed=1), normal(8, 4)
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 3

    def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
        *shards, w_out = (x[:, 4 * rank : 4 * rank + 4] for x in image)
        leaves = [x.clone().requires_grad_() for x in shards]
        project = weight.clone().requires_grad_()
        tokens = [ua.sum_grad(x @ project, group) for x in text[:3]]
        joint = ua.JointTokens(*tokens, position=position)  # type: ignore[arg-type]
        out, joint_out = ua.ulysses_attention(*leaves, group, strategy=strategy, joint=joint)  # type: ignore[misc]
        loss = (out * w_out).sum() + (joint_out * text[3]).sum() / 2  # the text's loss is every rank's: its share
        return list(torch.autograd.grad(loss, [project, *leaves]))

    ranks = ua.run_ranks(on_rank, 2)
    assert torch.equal(ranks[0][0], ranks[1][0])

    project = weight.double().requires_grad_()
    numbers = joint_oracle(image, (*(x.double() @ project.detach() for x in text[:3]), text[3]), position)
    tokens = [x.double() @ project for x in text[:3]]
    wanted = torch.autograd.grad(tokens, project, [numbers["joint_" + name] for name in ("dq", "dk", "dv")])[0]
    assert max_error(ranks[0][0], wanted) < 1e-5 * wanted.abs().max()
    for index, name in enumerate(("dq", "dk", "dv")):
        assert max_error(torch.cat([part[index + 1] for part in ranks], 1), numbers[name]) < 1e-5


@each_strategy
def test_replicated_keys_and_sinks_behind_it(strategy: str) -> None:
    q, k, v, weights = normal(8, 4, 2, kv_len=5)

    def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
        rows = slice(4 * rank, 4 * rank + 4)
        leaves = [k.clone().requires_grad_(), v.clone().requires_grad_(), torch.zeros(4).requires_grad_()]
        keys, values, sinks = (ua.sum_grad(x, group) for x in leaves)
        out = ua.ulysses_attention(
            q[:, rows], keys, values, group, strategy=strategy, kv_role="replicated", sinks=sinks
        )
        return list(torch.autograd.grad(out, leaves, weights[:, rows]))  # type: ignore[arg-type]

    ranks = ua.run_ranks(on_rank, 2)
    leaves = [k.double().requires_grad_(), v.double().requires_grad_(), torch.zeros(4).double().requires_grad_()]
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), leaves[0].repeat_interleave(2, 2)) * 8**-0.5
    logits = torch.cat([scores, leaves[2].view(1, 4, 1, 1).expand(1, 4, 8, 1)], 3)
    out = torch.einsum("bhij,bjhd->bihd", logits.softmax(3)[..., :-1], leaves[1].repeat_interleave(2, 2))
    for index, wanted in enumerate(torch.autograd.grad(out, leaves, weights.double())):
        assert torch.equal(ranks[0][index], ranks[1][index])
        assert max_error(ranks[0][index], wanted) < 1e-5
