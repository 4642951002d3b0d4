"""Gradient checkpointing: blocks run again in backward, with the tokens of the forward that they belong to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from families import FAMILIES
from same_model import (
    assert_gradients,
    assert_output,
    call,
    call_and_backward,
    family,
    over_threads,
    sum_over_ranks,
)
from ulysses_attention import run_ranks
from ulysses_attention.diffusers import parallelize

NAMES = [name for name in FAMILIES if name not in ("chroma", "z_image_30_heads", "ltx2_short_audio", "qwen_controlnet")]


def _checkpoint(model: Any) -> None:
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("name", NAMES)
def test_same_gradients(name: str) -> None:
    over_threads(family(name), 2, _checkpoint)


def test_chroma_without_its_mask() -> None:
    over_threads(family("chroma", masked=False), 2, _checkpoint)


@pytest.mark.parametrize("name", ["flux", "hunyuan"])
def test_short_text(name: str) -> None:
    over_threads(family(name, 3), 4, _checkpoint)


def test_chroma_with_a_mask_is_refused() -> None:
    """diffusers drops the mask in its single-stream blocks then, on one process too."""
    wanted = family("chroma")
    models: list[Any] = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        _checkpoint(models[rank])
        with parallelize(models[rank], group):
            with pytest.raises(NotImplementedError, match=r"drops Chroma's attention_mask .*Fix: model\.disable_grad"):
                call(models[rank], wanted.inputs)
            with torch.no_grad():
                assert_output(call(models[rank], wanted.inputs), wanted.out)
            models[rank].disable_gradient_checkpointing()
            assert_gradients(sum_over_ranks(call_and_backward(models[rank], wanted.inputs)[1], group), wanted.gradients)

    run_ranks(on_rank, 2)


def _shorter(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {"hidden_states": inputs["hidden_states"][:, :16], "img_ids": inputs["img_ids"][:16]}


def test_two_forwards_of_other_lengths_before_one_backward_are_refused() -> None:
    wanted = family("flux")
    models: list[Any] = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> str:
        model = models[rank]
        _checkpoint(model)
        with parallelize(model, group):
            total = call(model, wanted.inputs).sum() + call(model, _shorter(wanted.inputs)).sum()
            with pytest.raises(RuntimeError, match="Fix: call backward after each forward") as raised:
                total.backward()
            # Afterwards the next step is as any other.
            gradients = sum_over_ranks(call_and_backward(model, wanted.inputs)[1], group)
            assert_gradients(gradients, wanted.gradients)
        return str(raised.value)

    for text in run_ranks(on_rank, 2):
        assert "'image': 21" in text and "'image': 16" in text


def test_two_forwards_before_one_backward() -> None:
    """Of one length with checkpointing, of any length without: the gradients are the sum."""
    wanted = family("flux")
    reference = copy.deepcopy(wanted.model)
    (call(reference, wanted.inputs).sum() + call(reference, _shorter(wanted.inputs)).sum()).backward()
    of_both = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    reference = copy.deepcopy(wanted.model)
    (2 * call(reference, wanted.inputs).sum()).backward()
    of_same = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    models: list[Any] = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        model = models[rank]
        with parallelize(model, group):
            (call(model, wanted.inputs).sum() + call(model, _shorter(wanted.inputs)).sum()).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            assert_gradients(sum_over_ranks(gradients, group), of_both)
            model.zero_grad()
            _checkpoint(model)
            (call(model, wanted.inputs).sum() + call(model, wanted.inputs).sum()).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            assert_gradients(sum_over_ranks(gradients, group), of_same)

    run_ranks(on_rank, 2)
