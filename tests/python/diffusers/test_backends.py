"""The attention backend of diffusers stays the caller's choice: it is called with the keys of every rank."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from same_model import (
    assert_gradients,
    assert_output,
    call_and_backward,
    call_without_gradient,
    family,
    over_threads,
    sum_over_ranks,
)
from ulysses_attention import run_ranks
from ulysses_attention.diffusers import parallelize

MATH = "_native_math"
Shapes = list[tuple[int, int]]  # tokens of queries and of keys, of each call


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shapes]:
    """The calls of diffusers' math backend; afterwards the default backend is active again."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    calls: Shapes = []
    original = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
    active = _AttentionBackendRegistry._active_backend

    def counting(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        calls.append((query.shape[1], key.shape[1]))
        return original(query=query, key=key, value=value, attn_mask=attn_mask, **options)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName._NATIVE_MATH, counting)
    yield calls
    _AttentionBackendRegistry.set_active_backend(active)


def _same_by(name: str, change: Callable[[Any], Any], **options: Any) -> None:
    """change(model) sets a backend on a parallelized model; a context that it returns lasts for the call."""
    wanted = family(name)
    models = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        with parallelize(models[rank], group, **options):
            change(models[rank])
            out, gradients = call_and_backward(models[rank], wanted.inputs)
            assert_output(out, wanted.out)
            assert_gradients(sum_over_ranks(gradients, group), wanted.gradients)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
@pytest.mark.parametrize(("name", "tokens"), [("flux", 28), ("qwen", 22), ("cosmos", 27), ("hunyuan", 34)])
def test_a_backend_chosen_later_for_all_models(name: str, tokens: int, strategy: str, seen: Shapes) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend(MATH):
        _same_by(name, lambda model: None, strategy=strategy)
    assert (tokens in {keys for _, keys in seen}) and (strategy == "allgather_kv" or (tokens, tokens) in seen)
    seen.clear()
    _same_by(name, lambda model: None, strategy=strategy)
    assert not seen


def test_a_backend_chosen_later_for_one_model(seen: Shapes) -> None:
    _same_by("flux", lambda model: model.set_attention_backend(MATH))
    assert set(seen) == {(28, 28)}


def test_a_backend_under_gradient_checkpointing(seen: Shapes) -> None:
    def change(model: Any) -> None:
        model.set_attention_backend(MATH)
        model.enable_gradient_checkpointing()

    _same_by("flux", change)
    assert set(seen) == {(28, 28)}


def test_a_backend_with_text_shorter_than_the_ranks(seen: Shapes) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend(MATH):
        over_threads(family("qwen", 3), 4)
    assert 18 in {keys for _, keys in seen}  # 15 of the image, and the text once


def test_a_backend_chosen_while_parallel_stays_after_remove(seen: Shapes) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    wanted, model = family("flux"), copy.deepcopy(family("flux").model)

    def on_rank(rank: int, group: Any) -> None:
        with parallelize(model, group):
            model.set_attention_backend(MATH)  # type: ignore[operator]

    run_ranks(on_rank, 1)
    with attention_backend("native"):
        assert_output(call_without_gradient(model, wanted.inputs), wanted.out)
    assert set(seen) == {(28, 28)}


def test_kernel_by_name_goes_before_the_backend(seen: Shapes) -> None:
    _same_by("flux", lambda model: model.set_attention_backend(MATH), kernel="math")
    assert not seen


@pytest.mark.parametrize("name", ["flux", "sd3", "hunyuan"])
def test_kernel_as_a_function(name: str) -> None:
    calls = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> Any:
        calls.append(k.shape[1])
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        scale = q.size(3) ** -0.5 if call.softmax_scale is None else call.softmax_scale
        scores = heads[0] @ heads[1].transpose(2, 3) * scale
        if call.attn_mask is not None:
            scores = scores.masked_fill(~call.attn_mask, -torch.inf)
        return (scores.softmax(-1) @ heads[2]).transpose(1, 2), scores.logsumexp(-1)

    _same_by(name, lambda model: None, kernel=attend)
    assert max(calls) == {"flux": 28, "sd3": 22, "hunyuan": 34}[name]


def test_two_models_with_two_groups() -> None:
    """Model A over ranks 0 and 1, model B over 0 alone: each attends to its own tokens, called in turn."""
    a, b = family("flux"), family("wan")
    models = [(copy.deepcopy(a.model), copy.deepcopy(b.model)) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        ours, alone = models[rank]

        def on_its_own(_: int, own: Any) -> None:
            with parallelize(ours, group) as first, parallelize(alone, own) as second:
                for _ in range(2):
                    assert_output(call_without_gradient(ours, a.inputs), a.out)
                    assert_output(call_without_gradient(alone, b.inputs), b.out)
                assert first.sharded_lengths() == [(21, 11 - rank), (7, 4 - rank)]
                assert second.sharded_lengths() == [(27, 27)]

        run_ranks(on_its_own, 1)

    run_ranks(on_rank, 2)


@dataclasses.dataclass
class Asks:
    """A processor that asks its attention for one thing more."""

    option: dict[str, Any]

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from_projections = [f(hidden_states).unflatten(-1, (3, 16)) for f in (attn.to_q, attn.to_k, attn.to_v)]
        return dispatch_attention_fn(*from_projections, **self.option).flatten(2)


with contextlib.suppress(ImportError):
    from diffusers.models.attention_dispatch import dispatch_attention_fn


@pytest.mark.parametrize("option", [{"dropout_p": 0.1}, {"is_causal": True}, {"attention_kwargs": {"window": 3}}])
def test_what_attention_over_ranks_does_not_honour_is_refused(option: dict[str, Any]) -> None:
    wanted = family("wan")
    models: list[Any] = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> str:
        for block in models[rank].blocks:
            block.attn1.set_processor(Asks(option))
        with parallelize(models[rank], group), pytest.raises(NotImplementedError) as raised:
            call_without_gradient(models[rank], wanted.inputs)
        return str(raised.value)

    ((name, value),) = option.items()
    for text in run_ranks(on_rank, 2):
        assert f"{name}={value}" in text and "Fix: leave them out" in text


def test_a_mask_with_a_row_for_each_query_is_refused() -> None:
    wanted = family("wan")
    models: list[Any] = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> str:
        tokens = 14 - rank
        for block in models[rank].blocks:
            block.attn1.set_processor(Asks({"attn_mask": torch.ones(2, 1, tokens, tokens, dtype=torch.bool)}))
        with parallelize(models[rank], group), pytest.raises(NotImplementedError) as raised:
            call_without_gradient(models[rank], wanted.inputs)
        return str(raised.value)

    for rank, text in enumerate(run_ranks(on_rank, 2)):
        assert f"[2, 1, {14 - rank}, {14 - rank}] has a row for each query" in text and "Fix: a mask over keys" in text
