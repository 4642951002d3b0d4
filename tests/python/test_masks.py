"""Every form of mask in both strategies: output, lse and all gradients against float64 attention on one process."""

from __future__ import annotations

import itertools

import pytest
import torch

from cells import STRATEGIES
from full_calls import GRADIENT, MASKS, FullCall, check_on_threads

# Which axes of the mask a rank gets its own part of; a local query axis needs one.
CUTS = [("global", "global"), ("global", "local"), ("local", "global")]
WITHOUT_QUERY_AXIS = ("keys", "keys of all", "keys, 4-D", "heads", "hidden keys", "bias of keys", "bias of heads",
                      "bias of all")  # fmt: skip
SHARDS = {
    "even": {"seq_len": 12},
    "uneven": {"seq_len": 11},
    "padded": {"seq_len": 11, "padded": True},
    "ragged": {"seq_len": 11, "lengths": (1, 3, 7)},
    "empty": {"seq_len": 11, "lengths": (0, 11, 0)},
}


def _cuts(mask: str) -> list[tuple[str, str]]:
    return [cut for cut in CUTS if cut[0] == "global" or mask not in WITHOUT_QUERY_AXIS]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_mask_and_every_cut(strategy: str, shards: str, is_causal: bool) -> None:
    calls = [
        FullCall(mask=mask, mask_cut=cut, strategy=strategy, is_causal=is_causal, **SHARDS[shards])  # type: ignore[arg-type]
        for mask in MASKS
        for cut in _cuts(mask)
    ]
    assert len(calls) == 8 * 2 + 3 * 3
    check_on_threads(3, calls)


@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (5, 1), (2, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_heads_that_do_not_divide_and_grouped_ones(strategy: str, world: int, heads: tuple[int, int]) -> None:
    """Each rank has the masks of its own heads, also where it has several runs of them, or none."""
    calls = [
        FullCall(9, heads, mask=mask, mask_cut=cut, strategy=strategy, is_causal=is_causal)
        for mask, cut in [("full", CUTS[0]), ("full", CUTS[2]), ("heads", CUTS[1]), ("bias", CUTS[0])]
        for is_causal in (False, True)
    ]
    check_on_threads(world, calls)


@pytest.mark.parametrize("mask", ["bias of keys", "bias of heads", "bias", "bias of all", "hidden keys"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_of_a_mask_is_the_sum_over_the_ranks(strategy: str, mask: str) -> None:
    calls = [
        FullCall(11, mask=mask + GRADIENT, strategy=strategy, is_causal=is_causal, lengths=lengths, padded=padded)
        for is_causal in (False, True)
        for lengths, padded in [(None, False), (None, True), ((4, 0, 7), False)]
    ]
    calls += [FullCall(11, (3, 1), mask=mask + GRADIENT, strategy=strategy, lse_grad=True)]
    check_on_threads(3, calls)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keys_of_another_length(strategy: str) -> None:
    calls = [
        FullCall(7, kv_len=10, mask=mask, mask_cut=cut, strategy=strategy, padded=padded)
        for mask in ("keys", "rows", "bias of heads", "full")
        for cut in _cuts(mask)
        for padded in (False, True)
    ]
    check_on_threads(3, calls)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_of_another_width_and_float64(strategy: str) -> None:
    calls = [
        FullCall(7, v_head_dim=5, mask=mask, strategy=strategy, dtype=dtype)
        for mask, dtype in itertools.product(("keys", "full", "bias"), (torch.float32, torch.float64))
    ]
    check_on_threads(2, calls)


@pytest.mark.parametrize("kernel", ["math", "cpu_fused"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_kernel(strategy: str, kernel: str) -> None:
    calls = [
        FullCall(9, mask=mask, kernel=kernel, strategy=strategy, is_causal=is_causal, return_lse=return_lse)
        for mask in MASKS
        for is_causal, return_lse in ((False, True), (True, False))
    ]
    check_on_threads(2, calls)
