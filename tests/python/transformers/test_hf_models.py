"""Language models on 2 and 4 ranks: loss, logits and every parameter's gradient are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from tiny_models import alone, assert_same, inputs_of, local_only, new_model, on_ranks, real_rows

FAMILIES = ["llama", "qwen3", "gemma3", "gemma2", "gpt_oss", "deepseek_v3"]


def assert_equals_one_process(make: Any, given: dict[str, Any], world: int, **options: Any) -> None:
    expected = alone(make(), given)
    rows = real_rows(given)
    moved = (local_only(make(), given, world) - expected.logits)[rows].abs().max()
    assert moved > 1e-2  # so the values show what attention sees
    assert_same(on_ranks(world, make, given, **options), expected, given)


@pytest.mark.parametrize("kind", ["plain", "right", "left", "partly"])
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_one_process(name: str, kind: str) -> None:
    assert_equals_one_process(functools.partial(new_model, name), inputs_of(kind), 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_four_ranks_equal_one_process(name: str) -> None:
    assert_equals_one_process(functools.partial(new_model, name), inputs_of("right"), 4)


@pytest.mark.parametrize("kind", ["plain", "left"])
def test_allgather_kv_equals_one_process(kind: str) -> None:
    assert_equals_one_process(functools.partial(new_model, "llama"), inputs_of(kind), 4, strategy="allgather_kv")


def test_the_cap_and_the_sinks_show_in_these_results() -> None:
    given = inputs_of("plain")
    capped, uncapped = new_model("gemma2"), new_model("gemma2", attn_logit_softcapping=None)
    assert (alone(capped, given).logits - alone(uncapped, given).logits).abs().max() > 1e-2
    model = new_model("gpt_oss")
    before = alone(model, given)
    assert all(before.grads[f"model.layers.{layer}.self_attn.sinks"].abs().max() > 1e-4 for layer in (0, 1))
