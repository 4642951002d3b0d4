"""The gate itself: it fails backends that forget the other ranks' keys or refuse too much, and passes a right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import test_seed_contract
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


class RefusesGroups(Right):
    """Says clearly that it does not serve what every backend must."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        if q.size(2) != k.size(2):
            raise NotImplementedError("grouped KV heads are not supported")
        return super().attend(q, k, v, call)


@pytest.mark.parametrize("world", [2, 4])
def test_the_gate_fails_a_local_kv_backend(
    world: int, gloo: Callable[[int], ProcessRanks], registered: Callable[[type], str]
) -> None:
    def gate(backend: type) -> None:
        assert_matches_single_card(gloo(world), registered(backend), "allgather_kv", worlds=gloo)

    gate(Right)
    own = "each rank attends only to its own tokens: keys 8-15 never influence queries 0-7"
    with pytest.raises(AssertionError, match=rf'backend "LocalByAttend".*on {world} ranks differs from one:\n{own} '):
        gate(LocalByAttend)
    with pytest.raises(AssertionError, match=r'backend "LocalByExchange".*differs from one(.|\n)*CP053'):
        gate(LocalByExchange)


def test_the_gate_fails_a_backend_that_refuses_what_it_must_serve(
    gloo: Callable[[int], ProcessRanks], registered: Callable[[type], str]
) -> None:
    with pytest.raises(AssertionError, match=r"\ngrouped_kv/allgather_kv/W2/\S+ is refused: .*are not supported"):
        assert_matches_single_card(gloo(2), registered(RefusesGroups), "allgather_kv", worlds=gloo)


def test_registering_a_bad_backend_fails_the_build(
    ranks: Callable[..., ProcessRanks], registered: Callable[[type], str]
) -> None:
    build_gate = test_seed_contract.test_ulysses_matches_single_card
    build_gate(ranks, 2, "allgather_kv")
    registered(LocalByAttend)
    with pytest.raises(AssertionError, match=r'backend "LocalByAttend".*\neach rank attends only to its own tokens'):
        build_gate(ranks, 2, "allgather_kv")
