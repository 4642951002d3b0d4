"""The same call gives the same bits, forward and backward, as often as it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES
from full_calls import GRADIENT, FullCall, run_fulls

CALLS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "padded": True},
    {"text_len": 5, "lse_grad": True},
    {"text_len": 5, "position": "suffix", "valid_lens": (5, 2), "is_causal": True},
    {"mask": "full"},
    {"mask": "keys", "mask_cut": ("global", "local"), "is_causal": True},
    {"mask": "bias" + GRADIENT, "text_len": 3, "sinks": True, "softcap": 3.0},
    {"replicated": True, "kv_len": 9},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_runs(strategy: str, dtype: torch.dtype) -> None:
    calls = [FullCall(29, (6, 2), strategy=strategy, dtype=dtype, **options) for options in CALLS]
    if dtype == torch.bfloat16:  # a mask's own gradient is summed in its dtype by one rank, and that does for once
        calls = [call for call in calls if not call.mask.endswith(GRADIENT)]
    first, *others = [ua.run_ranks(lambda rank, group: run_fulls(rank, group, calls), 3) for _ in range(20)]
    for run in others:
        for rank, of_rank in enumerate(run):
            for call, numbers, wanted in zip(calls, of_rank, first[rank], strict=True):
                for name, x in numbers.items():
                    assert torch.equal(x, wanted[name]), f"{name} of rank {rank}, {call}"
