"""Any one of the tensors may be all that trains: each rank's backward runs, also where a rank has no work."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cells import STRATEGIES
from full_calls import GRADIENT, FullCall, check_on_threads
from honest_attention import attend

SHARDS: list[dict[str, Any]] = [
    {"seq_len": 11},
    {"seq_len": 11, "lengths": (0, 4, 7)},
    {"seq_len": 5, "heads": (2, 1)},  # fewer heads than ranks
]


@pytest.mark.parametrize("kernel", ["auto", attend], ids=["kernel", "function"])
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_tensor_alone(strategy: str, name: str, kernel: Any) -> None:
    calls = [
        FullCall(**shards, mask="bias" + GRADIENT, sinks=True, strategy=strategy, kernel=kernel, trains=(name,), **more)
        for shards, more in itertools.product(SHARDS, ({}, {"kv_len": 6, "replicated": True}, {"lse_grad": True}))
    ]
    check_on_threads(3, calls)


@pytest.mark.parametrize("kernel", ["auto", attend], ids=["kernel", "function"])
@pytest.mark.parametrize("name", ["q", "k", "v", "joint_q", "joint_k", "joint_v"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_tensor_of_a_call_with_text(strategy: str, name: str, kernel: Any) -> None:
    calls = [
        FullCall(**shards, text_len=text, position=position, strategy=strategy, kernel=kernel, trains=(name,))
        for shards, text, position in itertools.product(SHARDS, (1, 4), ("prefix", "suffix"))
    ]
    check_on_threads(3, calls)
