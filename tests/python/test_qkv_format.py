"""qkv_format: the same numbers in another order of dimensions, by views."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES
from full_calls import DIMS, FullCall, check_on_threads, run_full
from probes import normal
from refusals import assert_refused

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_format = pytest.mark.parametrize("qkv_format", ["bhsd", "sbhd"])


@each_format
@each_strategy
def test_every_kind_of_call(strategy: str, qkv_format: str) -> None:
    """q, k, v, joint tokens, outputs and gradients in the format; lse and masks as ever."""
    calls = [
        FullCall(**shards, qkv_format=qkv_format, strategy=strategy, is_causal=is_causal, **options)
        for shards, is_causal, options in itertools.product(
            [{"seq_len": 8}, {"seq_len": 11}, {"seq_len": 11, "padded": True}],
            (False, True),
            [
                {},
                {"text_len": 3},
                {"text_len": 3, "position": "suffix", "valid_lens": (1, 3), "return_lse": False},
                {"mask": "full", "sinks": True, "lse_grad": True},
                {"kv_len": 5, "replicated": True, "v_head_dim": 6},
            ],
        )
    ]
    check_on_threads(3, calls)


@each_format
@each_strategy
def test_the_bits_are_those_of_bshd(strategy: str, qkv_format: str) -> None:
    calls = [FullCall(11, text_len=3, mask="keys", strategy=strategy, qkv_format=f) for f in ("bshd", qkv_format)]
    for one, other in ua.run_ranks(lambda rank, group: [run_full(rank, group, call) for call in calls], 2):
        for name, x in one.items():
            assert torch.equal(x, other[name]), name


@pytest.mark.parametrize("qkv_format", DIMS)
def test_nothing_is_copied_on_the_way_to_the_kernel(qkv_format: str) -> None:
    """Where the whole q, k and v are local, the kernel reads the caller's own memory, and out is put in order by
    strides alone."""
    dim = DIMS[qkv_format]
    seen: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        seen.append((q.data_ptr(), k.data_ptr(), v.data_ptr(), *q.stride()))
        return (q + v.mean()).contiguous()

    def on_rank(rank: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        given = [x.transpose(1, dim).contiguous() for x in normal(6, 4, batch=2)[:3]]
        with torch.no_grad():
            out = ua.ulysses_attention(*given, group, kernel=attend, kv_role="replicated", qkv_format=qkv_format)
        assert isinstance(out, torch.Tensor)
        return given, out

    for world in (1, 2):
        seen.clear()
        for given, out in ua.run_ranks(on_rank, world):
            assert out.shape == given[0].shape
            assert out.transpose(1, dim).is_contiguous()
            addresses = tuple(x.data_ptr() for x in given)
            assert (*addresses, *given[0].transpose(1, dim).stride()) in seen


@each_format
@each_strategy
def test_out_keeps_the_memory_order_that_the_exchange_gave(strategy: str, qkv_format: str) -> None:
    dim = DIMS[qkv_format]
    q, k, v = (x.transpose(1, dim) for x in normal(8, 4, batch=2)[:3])

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        mine = (x.narrow(dim, 4 * rank, 4) for x in (q, k, v))
        out = ua.ulysses_attention(*mine, group, strategy=strategy, qkv_format=qkv_format)
        assert isinstance(out, torch.Tensor)
        return out

    for out in ua.run_ranks(on_rank, 2):
        assert out.size(dim) == 4 and out.transpose(1, dim).is_contiguous()


@each_format
@each_strategy
def test_a_policy_of_ones_own_names_the_dimension_of_the_format(strategy: str, qkv_format: str) -> None:
    dim = DIMS[qkv_format]
    policies = [ua.UlyssesContextParallelPolicy(output_restore_dim=d, pad_multiple=1) for d in range(3)]

    def on_rank(rank: int, group: Any) -> list[Any]:
        found: list[Any] = []
        for policy in policies:
            mine = (x[:, 4 * rank : 4 * rank + 4].transpose(1, dim) for x in normal(8, 4)[:3])
            try:
                options = {"policy": policy, "strategy": strategy, "qkv_format": qkv_format}
                found.append(ua.ulysses_attention(*mine, group, **options))
            except ValueError as error:
                found.append(error)
        return found

    ranks = ua.run_ranks(on_rank, 2)
    for d in range(3):
        of_ranks = [found[d] for found in ranks]
        if d == dim:
            assert all(out.size(dim) == 4 for out in of_ranks)
        else:
            assert_refused(of_ranks, ValueError, "CP005", f"output_restore_dim={d}", qkv_format)


@each_format
def test_a_tensor_in_another_format_is_found_by_its_length(qkv_format: str) -> None:
    layout = ua.SequenceLayout.from_lengths([5, 6])

    def on_rank(rank: int, group: Any) -> Any:
        x = torch.zeros(1, layout.lengths[rank], 4, 8)  # bshd
        try:
            return ua.ulysses_attention(x, x, x, group, layout=layout, qkv_format=qkv_format)
        except Exception as error:
            return error

    assert_refused(ua.run_ranks(on_rank, 2), ValueError, "CP012", "layout.padded_lengths[0]=5")
