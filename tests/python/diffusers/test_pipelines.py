"""Whole pipelines over Gloo ranks give what one process gives: latents, images, videos."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipelines import PIPELINES
from ulysses_attention import check_same
from ulysses_attention.diffusers import FAMILIES, parallelize, verify
from ulysses_attention.launch import ProcessRanks

Gloo = Callable[[int], ProcessRanks]
TOLERANCE = 1e-4
each_pipeline = pytest.mark.parametrize("name", PIPELINES)
two_and_four = pytest.mark.parametrize("world", [2, 4])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def local_only(model: Any) -> Any:
    """The plan of a model, but every attention sees the tokens of its own rank only."""
    return dataclasses.replace(FAMILIES[type(model).__name__], attention={"**": "local"})


@dataclasses.dataclass
class Seen:
    """What a rank found: its latents, and differences to the same pipeline on one process."""

    latents: torch.Tensor
    latents_error: float
    decoded_error: float
    unguided_error: float
    local_only_error: float
    guidance_moves: float
    restored_error: float
    lengths: list[tuple[int, int]]


def compare(rank: int, group: Any, name: str) -> Seen:
    tiny = PIPELINES[name]()
    latents, decoded, unguided = tiny(), tiny(output_type="pt"), tiny(**tiny.unguided)
    with parallelize(tiny.pipe, group) as handle:
        own = tiny()
        lengths = handle.sharded_lengths()
        decoded_error = difference(tiny(output_type="pt"), decoded)
        unguided_error = difference(tiny(**tiny.unguided), unguided)
    with parallelize(tiny.pipe, group, plan=local_only(tiny.pipe.transformer)):
        local_only_error = difference(tiny(), latents)
    moves, restored = difference(latents, unguided), difference(tiny(), latents)
    return Seen(
        own, difference(own, latents), decoded_error, unguided_error, local_only_error, moves, restored, lengths
    )


@each_pipeline
@two_and_four
def test_a_pipeline_gives_what_one_process_gives(gloo: Gloo, name: str, world: int) -> None:
    seen = gloo(world).run(compare, name)
    for rank in seen:
        assert rank.local_only_error > 1e-2 and rank.guidance_moves > 1e-2  # what is compared can be wrong
        assert rank.latents_error <= TOLERANCE and rank.decoded_error <= TOLERANCE
        assert rank.unguided_error <= TOLERANCE
        assert rank.restored_error == 0.0
        assert torch.equal(rank.latents, seen[0].latents)
    for stream in zip(*(rank.lengths for rank in seen), strict=True):
        assert {tokens for tokens, _ in stream} == {sum(own for _, own in stream)}  # every token on one rank
    assert len({own for rank in seen for tokens, own in rank.lengths if tokens > 7}) == 2  # uneven


def decode_on_rank_0(rank: int, group: Any, name: str) -> tuple[bool, float]:
    """Whether this rank's VAE ran, and the difference of what the rank got to one process."""
    tiny, decoded = PIPELINES[name](), []
    kind = {"output_type": "pt" if rank == 0 else "latent"}
    whole = tiny(**kind)
    decode = tiny.pipe.vae.decode
    tiny.pipe.vae.decode = lambda *args, **kwargs: decoded.append(rank) or decode(*args, **kwargs)
    with parallelize(tiny.pipe, group):
        error = difference(tiny(**kind), whole)
    return bool(decoded), error


@each_pipeline
def test_one_rank_alone_may_decode(gloo: Gloo, name: str) -> None:
    for rank, (decoded, error) in enumerate(gloo(4).run(decode_on_rank_0, name)):
        assert decoded == (rank == 0) and error <= TOLERANCE


def inputs_of_the_first_step(tiny: Any, seed: int) -> dict[str, Any]:
    """What the pipeline hands its transformer."""
    seen: list[dict[str, Any]] = []
    hook = tiny.pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    tiny(seed)
    hook.remove()
    return seen[0]


def other_latents_on_the_last_rank(rank: int, group: Any, name: str) -> tuple[str, str, float]:
    """What verify and check_same say where one rank has drawn other noise, and verify with the same noise."""
    tiny = PIPELINES[name]()
    texts = []
    inputs = inputs_of_the_first_step(tiny, seed=int(rank == group.size() - 1))
    for check in (
        lambda: verify(tiny.pipe.transformer, inputs, group),
        lambda: check_same({"latents": inputs["hidden_states"]}, group),
    ):
        with pytest.raises(RuntimeError) as raised:
            check()
        texts.append(str(raised.value))
    same = verify(tiny.pipe.transformer, inputs_of_the_first_step(tiny, seed=0), group)
    assert same.ok, str(same)
    return texts[0], texts[1], same.output_error


@each_pipeline
def test_other_latents_on_one_rank_are_named(gloo: Gloo, name: str) -> None:
    for by_verify, by_check, error in gloo(2).run(other_latents_on_the_last_rank, name):
        assert "[CP068]" in by_verify and "hidden_states" in by_verify and "encoder_hidden_states" not in by_verify
        assert "[CP068]" in by_check and "latents" in by_check
        assert error <= 1e-5
