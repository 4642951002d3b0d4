"""A setting is honoured or refused, and parallelism is never silently off."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from oracle import oracle
from probes import (
    assert_equal,
    assert_refused_before_data,
    assert_rows,
    attend,
    each_strategy,
    normal,
    per_token,
    uniform,
)


def test_b89_defaults_attend_to_the_whole_sequence() -> None:
    """A mode chosen without its sizes left communication off: 1.5 on rank 0 and 5.5 on rank 1, where both have 3.5.

    Source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2665
    """
    values = uniform(per_token(range(8)))

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        return ua.ulysses_attention(*(x[:, 4 * rank : 4 * rank + 4] for x in values), group)

    for out in ua.run_ranks(on_rank, 2):
        assert_rows(out, [3.5] * 4)


@pytest.mark.parametrize(
    ("options", "exception", "error_id", "named"),
    [
        ({"strategy": "hybrid"}, ValueError, "CP030", 'strategy="hybrid"'),
        ({"outer": "allgather_kv"}, NotImplementedError, "CP047", "ulysses_degree=None"),
        ({"ulysses_degree": 1}, NotImplementedError, "CP047", "ulysses_degree=None"),
    ],
)
def test_b89_a_mode_without_its_sizes_is_an_error(
    options: dict[str, Any], exception: type[Exception], error_id: str, named: str
) -> None:
    assert_refused_before_data(2, lambda rank: options, exception, error_id, named)


@each_strategy
def test_b90_a_scale_of_the_callers_own_is_used(strategy: str) -> None:
    """A custom softmax scale was ignored as soon as the parallel path was on: 0.7311 came out for 0.8808.

    Source: https://github.com/PrimeIntellect-ai/prime-rl/issues/2588
    """
    q, k = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)
    q[..., 0], k[:, 0, :, 0] = 1.0, 2.0
    v = per_token([1.0, 0.0], head_dim=4)
    got = attend(2, (q, k, v), torch.ones_like(v), strategy=strategy, softmax_scale=1.0)
    first = math.exp(2.0) / (math.exp(2.0) + 1.0)
    assert round(first, 4) == 0.8808
    assert_rows(got["out"], [first] * 2)
    assert_rows(got["dv"], [2 * first, 2 * (1 - first)])
    slope = 4 * first * (1 - first)  # of four equal numbers of a value, by the first score
    for name, other in (("dq", [2.0 * slope] * 2), ("dk", [2 * slope, -2 * slope])):
        assert_rows(got[name][..., :1], other)


def _attend_by_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
    """A kernel of the caller's own, which takes every length from what it is handed."""
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)


@each_strategy
def test_b93_local_lengths_reach_no_kernel(strategy: str) -> None:
    """The local length was handed on as a keyword, and the kernel used it where the tensor had grown.

    Source: https://github.com/NVIDIA/TensorRT-LLM/pull/13486
    """
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        local = {name: torch.tensor([0, 4]), "strategy": strategy}
        assert_refused_before_data(2, lambda rank, local=local: local, NotImplementedError, "CP045", "packed_sequences")

    def with_a_maximum(rank: int) -> dict[str, Any]:
        return {"strategy": strategy, "max_seqlen_q": 4}

    assert all(type(error) is TypeError for error in _errors(with_a_maximum))
    halved = {"strategy": strategy, "layout": ua.SequenceLayout.from_lengths([2, 2])}  # rows are four on each rank
    assert_refused_before_data(2, lambda rank: halved, ValueError, "CP012", "S_local=4", "=2")
    inputs = normal(8)[:3]
    got = attend(2, inputs, strategy=strategy)
    assert_equal(got, dict(zip(("out", "lse"), oracle(*inputs), strict=True)))

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        shards = (x[:, 4 * rank : 4 * rank + 4] for x in inputs)
        return ua.ulysses_attention(*shards, group, strategy=strategy, kernel=_attend_by_rows)

    assert_equal({"out": torch.cat(ua.run_ranks(on_rank, 2), 1)}, {"out": oracle(*inputs)[0]})


def _errors(options_of: Any) -> list[Any]:
    def on_rank(rank: int, group: Any) -> Any:
        x = torch.zeros(1, 4, 4, 8)
        try:
            return ua.ulysses_attention(x, x, x, group, **options_of(rank))
        except Exception as error:
            return error

    return ua.run_ranks(on_rank, 2)
