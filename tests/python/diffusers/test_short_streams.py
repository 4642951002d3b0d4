"""Streams with fewer tokens than ranks: short text is whole on every rank, a short image is refused on every rank."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from families import FAMILIES
from same_model import call_without_gradient, family, over_threads
from ulysses_attention import run_ranks
from ulysses_attention.diffusers import FAMILIES as PLANS
from ulysses_attention.diffusers import parallelize


@pytest.mark.parametrize(("text", "world"), [(7, 8), (3, 4)])
@pytest.mark.parametrize("name", ["flux", "chroma", "qwen", "hunyuan", "sd3"])
def test_text_shorter_than_the_ranks(name: str, text: int, world: int) -> None:
    over_threads(family(name, text), world)


@pytest.mark.parametrize("name", ["chroma", "qwen", "hunyuan"])
def test_short_text_without_a_mask(name: str) -> None:
    over_threads(family(name, 3, masked=False), 4)


@pytest.mark.parametrize("name", ["flux", "qwen", "sd3"])
def test_short_text_by_gathered_keys(name: str) -> None:
    over_threads(family(name, 3), 4, strategy="allgather_kv")


def test_hunyuan_of_an_image_with_short_text() -> None:
    over_threads(family("hunyuan_i2v", 3), 4)


def test_audio_shorter_than_the_ranks() -> None:
    assert family("ltx2_short_audio").inputs["audio_hidden_states"].size(1) == 3
    over_threads(family("ltx2_short_audio"), 8)


def test_audio_that_a_rank_without_it_could_not_rotate_is_refused_on_every_rank() -> None:
    wanted = family("ltx2_split_rope")
    models = [copy.deepcopy(wanted.model) for _ in range(6)]

    def refused(rank: int, group: Any) -> str:
        with parallelize(models[rank], group), pytest.raises(ValueError) as raised:
            call_without_gradient(models[rank], wanted.inputs)
        return str(raised.value)

    for text in run_ranks(refused, 6):
        assert "5 audio tokens are fewer than cp_size=6. Fix: a group of at most 5 ranks" in text
    over_threads(wanted, 5)


@pytest.mark.parametrize(("name", "tokens", "world"), [("flux", 21, 22), ("qwen", 15, 16), ("sd3", 15, 16)])
def test_image_shorter_than_the_ranks_is_refused_on_every_rank(name: str, tokens: int, world: int) -> None:
    wanted = family(name)
    models = [copy.deepcopy(wanted.model) for _ in range(world)]

    def refused(rank: int, group: Any) -> str:
        with parallelize(models[rank], group), pytest.raises(ValueError) as raised:
            call_without_gradient(models[rank], wanted.inputs)
        return str(raised.value)

    texts = run_ranks(refused, world)
    assert len(set(texts)) == 1
    assert (
        f"'image' has {tokens} tokens, fewer than cp_size={world}. Fix: a group of at most {tokens} ranks" in texts[0]
    )
    limit = re.search(r"at most (\d+) ranks", texts[0])
    assert limit is not None and int(limit[1]) == tokens


def test_the_ranks_that_the_fix_names_are_right() -> None:
    assert "image" not in PLANS[FAMILIES["sd3"].kind].replicate
    over_threads(family("sd3"), 15)
