"""kv_role="replicated": k and v whole on every rank, attended without a single message."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES, UNEVEN
from full_calls import GRADIENT, MASKS, FullCall, check_on_threads, leaves_of, options_of
from ulysses_attention import _C

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.mark.parametrize("world", [1, 2, 3])
@each_strategy
def test_any_number_of_keys(strategy: str, world: int) -> None:
    """Causal compares the global position of a query with that of a key, whatever rank has the query."""
    calls = [
        FullCall(11, heads, kv_len=kv_len, replicated=True, strategy=strategy, is_causal=is_causal, padded=padded)
        for heads, kv_len, is_causal, padded in itertools.product(
            ((4, 2), (3, 3), (5, 1)), (1, 5, 11, 20), (False, True), (False, True)
        )
    ]
    check_on_threads(world, calls)


@pytest.mark.parametrize("cut", [("global", "global"), ("local", "global")], ids=["whole", "own rows"])
@each_strategy
def test_masks(strategy: str, cut: tuple[str, str]) -> None:
    calls = [
        FullCall(11, kv_len=6, replicated=True, mask=mask, mask_cut=cut, strategy=strategy, is_causal=is_causal)
        for mask, is_causal in itertools.product(MASKS, (False, True))
    ]
    check_on_threads(3, calls)


@each_strategy
def test_gradients_of_masks_sinks_and_lse_are_partial(strategy: str) -> None:
    calls = [
        FullCall(11, kv_len=6, replicated=True, mask=mask + GRADIENT, strategy=strategy, lengths=lengths, sinks=True,
                 lse_grad=True, softcap=2.0)
        for mask, lengths in itertools.product(("bias", "bias of heads", "bias of keys"), (None, (0, 4, 7)))
    ]  # fmt: skip
    check_on_threads(3, calls)


def record_everything(rank: int, group: Any, call: FullCall) -> list[str]:
    """The collectives of a forward and a backward, agreement left out."""
    recorder = _C.Recorder()
    recorded = _C.record_group(group, recorder)
    mine = leaves_of(call, group.size(), rank)
    options = options_of(call, group.size(), rank, mine) | {"agreement": "off"}
    out, lse = ua.ulysses_attention(mine["q"], mine["k"], mine["v"], recorded, **options)
    leaves = [x for name, x in mine.items() if x.requires_grad and "joint" not in name]
    torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    return [record.name for record in recorder.records()]


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"mask": "keys"}, {"mask": "full", "mask_cut": ("local", "global")}, {"padded": True},
     {"mask": "bias" + GRADIENT, "sinks": True, "softcap": 3.0}],
    ids=str,
)  # fmt: skip
@each_strategy
def test_no_collective_forward_or_backward(strategy: str, options: dict[str, Any]) -> None:
    call = FullCall(11, kv_len=6, replicated=True, strategy=strategy, **options)
    assert ua.run_ranks(lambda rank, group: record_everything(rank, group, call), 3) == [[]] * 3
    sharded = FullCall(11, kv_len=6, strategy=strategy)
    assert all(ua.run_ranks(lambda rank, group: record_everything(rank, group, sharded), 3))  # it does count


@each_strategy
def test_the_uneven_policy_without_a_layout(strategy: str) -> None:
    """Here the lengths of the queries do travel, for their positions; keys have the same length on every rank."""
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 7, 4, 8)

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        mine = q[:, :2] if rank == 0 else q[:, 2:]
        out = ua.ulysses_attention(
            mine, k, k, group, policy=UNEVEN, strategy=strategy, kv_role="replicated", is_causal=True
        )
        assert isinstance(out, torch.Tensor)
        return out

    alone = ua.run_ranks(lambda rank, group: ua.ulysses_attention(q, k, k, group, is_causal=True), 1)
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, k)), attn_mask=torch.ones(5, 7, dtype=torch.bool).tril()
    ).transpose(1, 2)
    for out in (torch.cat(ua.run_ranks(on_rank, 2), 1), alone[0]):
        assert (out - whole).abs().max() < 1e-5


@each_strategy
def test_no_key_at_all(strategy: str) -> None:
    """An empty condition: zeros, an lse of −inf, zero gradients."""
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 0, 4, 8)

    def on_rank(rank: int, group: Any) -> tuple[torch.Tensor, ...]:
        mine = q[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()
        out, lse = ua.ulysses_attention(mine, k, k, group, strategy=strategy, kv_role="replicated", return_lse=True)
        return out.detach(), lse.detach(), torch.autograd.grad(out, mine, torch.ones_like(out))[0]

    for out, lse, dq in ua.run_ranks(on_rank, 2):
        assert not out.any() and not dq.any() and bool((lse == -float("inf")).all())
