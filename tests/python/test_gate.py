"""The gate itself: it fails a backend that forgets the other ranks' keys, and passes one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gate import assert_matches_single_card
from ulysses_attention import UlyssesAttentionProcessor, register_backend, unregister_backend
from ulysses_attention.launch import ProcessRanks


def _softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2) for x in (k, v))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(q.size(3) ** -0.5).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


class Right(UlyssesAttentionProcessor):
    """Attends to everything it gets."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        return _softmax(q, k, v)


class LocalByAttend(UlyssesAttentionProcessor):
    """Gets every rank's keys and reads those at its own queries' positions."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        own = slice(int(call.q_positions[0]), int(call.q_positions[-1]) + 1)
        return _softmax(q, k[:, own], v[:, own])


class LocalByExchange(Right):
    """Exchanges nothing."""

    def exchange(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, group: Any) -> Any:
        return q, k, v


@pytest.fixture
def registered() -> Iterator[Callable[[type], str]]:
    names = []

    def register(backend: type) -> str:
        names.append(backend.__name__)
        register_backend(names[-1], backend)
        return names[-1]

    yield register
    for name in names:
        unregister_backend(name)


@pytest.mark.parametrize("world", [2, 4])
def test_the_gate_fails_a_local_kv_backend(
    world: int, gloo: Callable[[int], ProcessRanks], registered: Callable[[type], str]
) -> None:
    assert_matches_single_card(gloo(world), registered(Right), "allgather_kv")
    with pytest.raises(AssertionError, match=r'backend "LocalByAttend".*differs from one(.|\n)*out is off by'):
        assert_matches_single_card(gloo(world), registered(LocalByAttend), "allgather_kv")
    with pytest.raises(AssertionError, match=r'backend "LocalByExchange".*differs from one(.|\n)*CP053'):
        assert_matches_single_card(gloo(world), registered(LocalByExchange), "allgather_kv")
