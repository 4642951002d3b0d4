"""The contract that every context-parallel backend must keep: the four checks, by the names they are known under."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ulysses_attention as ua
from gate import assert_matches_single_card
from ulysses_attention.launch import ProcessRanks


def test_seq_divisibility_guard() -> None:
    policy = ua.UlyssesContextParallelPolicy()
    assert policy.validate_config(seq_len=3000, cp_size=4) != []
    assert policy.validate_config(3008, 4) == []
    assert policy.padded_seq_len(3000, 4) == 3008

    literal = ua.UlyssesContextParallelPolicy(pad_multiple=1)
    assert literal.validate_config(3001, 4) != []
    assert literal.padded_seq_len(3001, 4) == 3004
    assert literal.padded_seq_len(3000, 4) == 3000


def test_kv_must_be_global_contract() -> None:
    policy = ua.UlyssesContextParallelPolicy()
    assert policy.kv_must_be_global is True
    assert "kv_global_gathered" in policy.required_checks

    x = torch.zeros(1, 4, 2, 8)
    for forbidden in (policy.replace(kv_must_be_global=False), policy.replace(required_checks=("seq_divisible",))):
        with pytest.raises(ValueError, match=r"\[CP00[34]\]"):
            ua.run_ranks(lambda rank, group, p=forbidden: ua.ulysses_attention(x, x, x, group, policy=p), 2)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.multi_gpu(n)) for n in (2, 4)])
@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
def test_ulysses_matches_single_card(ranks: Callable[..., ProcessRanks], world: int, strategy: str) -> None:
    for backend in ua.backends():
        assert_matches_single_card(ranks(world), backend, strategy)


def test_output_restore_dim() -> None:
    policy = ua.UlyssesContextParallelPolicy()
    assert policy.output_restore_dim == 1

    def shape_of_output(rank: int, group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
        out = ua.ulysses_attention(*(torch.zeros(2, 5 + 0 * rank, 3, 8) for _ in range(3)), group)
        assert isinstance(out, torch.Tensor)
        return tuple(out.shape)

    assert ua.run_ranks(shape_of_output, 2) == [(2, 5, 3, 8)] * 2
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"output_restore_dim=2.*=1.*\[CP005\]"):
        wrong = policy.replace(output_restore_dim=2)
        ua.run_ranks(lambda rank, group: ua.ulysses_attention(x, x, x, group, policy=wrong), 2)
