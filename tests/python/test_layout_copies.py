"""A layout among the arguments of a forward: wrappers copy it by its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ulysses_attention as ua
from ulysses_attention.launch import ProcessRanks

PADDED = ua.SequenceLayout(13, 2, ua.UlyssesContextParallelPolicy(pad_multiple=1), cp_rank=1)


@pytest.mark.parametrize("layout", [PADDED, ua.SequenceLayout.from_lengths([3, 0, 4])])
def test_a_layout_made_from_the_fields_of_another_is_that_layout(layout: ua.SequenceLayout) -> None:
    assert dataclasses.replace(layout) == layout
    assert dataclasses.replace(layout, cp_rank=0) == ua.SequenceLayout(**{**dataclasses.asdict(layout), "cp_rank": 0})


@pytest.mark.parametrize("wrong", [{"seq_len": 12}, {"cp_size": 3}, {"padded_lengths": (6, 7)}, {"order": "head_tail"}])
def test_cp012_fields_that_contradict_each_other(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\[7, 6\] in \[.*\] rows are not seq_len=.*Fix: SequenceL.*\[CP012\]"):
        dataclasses.replace(PADDED, **wrong)


class Rows(torch.nn.Linear):
    """Keeps the layout that it is called with."""

    def forward(self, x: torch.Tensor, layout: ua.SequenceLayout) -> torch.Tensor:  # type: ignore[override]
        self.layout = layout
        return super().forward(x)


def _under_mixed_precision(rank: int, group: Any) -> bool:
    model = Rows(4, 4)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    out = model(torch.ones(2, 7, 4), PADDED)
    return out.dtype == torch.bfloat16 and model.layout == PADDED


def test_fully_shard_with_mixed_precision_hands_the_layout_on(gloo: Callable[[int], ProcessRanks]) -> None:
    assert gloo(2).run(_under_mixed_precision) == [True, True]
