"""LoRA adapters put on a model by peft: their output and gradients over ranks are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import FAMILIES, TEXT, wake
from same_model import OneProcess, one_process, over_threads


def _with_lora(name: str, **inputs: Any) -> OneProcess:
    from peft import LoraConfig

    model: Any = FAMILIES[name].model()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    wake(model)
    return one_process(model, FAMILIES[name].inputs(TEXT, True) | inputs)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_adapters_train_as_on_one_process(name: str) -> None:
    wanted = _with_lora(name)
    assert wanted.gradients and all("lora_" in parameter for parameter in wanted.gradients)
    for parameter, gradient in wanted.gradients.items():
        assert gradient.abs().max() > 0, parameter
    over_threads(wanted, 2)


def test_the_scale_of_an_adapter_in_the_call_is_followed() -> None:
    whole, scaled = _with_lora("flux"), _with_lora("flux", joint_attention_kwargs={"scale": 0.5})
    assert not torch.allclose(whole.out, scaled.out, atol=1e-2)
    over_threads(scaled, 2)


def test_an_adapter_added_to_a_parallelized_model() -> None:
    """peft replaces the projections below an attention, not its processor: nothing has to be done again."""
    from peft import LoraConfig

    from same_model import assert_gradients, assert_output, call_and_backward, sum_over_ranks
    from ulysses_attention import run_ranks
    from ulysses_attention.diffusers import parallelize

    wanted = _with_lora("wan")
    models: list[Any] = [FAMILIES["wan"].model() for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        model = models[rank].requires_grad_(False)
        with parallelize(model, group):
            model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
            out, gradients = call_and_backward(wake(model), wanted.inputs)
            assert_output(out, wanted.out)
            assert_gradients(sum_over_ranks(gradients, group), wanted.gradients)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("before", [False, True])
def test_an_adapter_around_the_last_projection_put_on_or_taken_off_later_is_refused(before: bool) -> None:
    """The hook that gathers stays with the module that peft replaces."""
    from peft import LoraConfig

    from same_model import assert_output, call_without_gradient, family
    from ulysses_attention import run_ranks
    from ulysses_attention.diffusers import parallelize

    adapter = LoraConfig(r=2, target_modules=["proj_out"])
    wanted = family("flux")
    models: list[Any] = [FAMILIES["flux"].model() for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        model = models[rank]
        if before:
            model.add_adapter(adapter)
        with parallelize(model, group):
            model.unload_lora() if before else model.add_adapter(adapter)
            with pytest.raises(RuntimeError, match=r"'proj_out' is another module since.*Fix: handle.remove\(\) first"):
                call_without_gradient(model, wanted.inputs)
        with parallelize(model, group):  # a new adapter changes nothing
            assert_output(call_without_gradient(model, wanted.inputs), wanted.out)

    run_ranks(on_rank, 2)
