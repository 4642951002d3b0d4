"""Is a model over ranks the same model as on one process: output, the gradient of every parameter, and what is left."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from compat_proof import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, SENSITIVE, call, call_and_backward, gradient_errors
from families import FAMILIES, TEXT
from ulysses_attention import run_ranks
from ulysses_attention.diffusers import parallelize
from ulysses_attention.diffusers.choose import plan_for

Gradients = dict[str, torch.Tensor]


def call_without_gradient(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return call(model, inputs)


@dataclasses.dataclass(frozen=True)
class OneProcess:
    model: torch.nn.Module
    inputs: dict[str, Any]
    out: torch.Tensor
    gradients: Gradients


def one_process(model: torch.nn.Module, inputs: dict[str, Any]) -> OneProcess:
    out, gradients = call_and_backward(model, inputs)
    model.zero_grad()
    assert torch.isfinite(out).all()
    return OneProcess(model, inputs, out, gradients)


@functools.cache
def family(name: str, text: int = TEXT, masked: bool = True) -> OneProcess:
    """A family's tiny model on one process. What it returns is shared: copy the model to change it."""
    return one_process(FAMILIES[name].model(), FAMILIES[name].inputs(text, masked))


def sum_over_ranks(gradients: Gradients, group: Any) -> Gradients:
    for gradient in gradients.values():
        group.allreduce([gradient]).wait()
    return gradients


def assert_output(out: torch.Tensor, wanted: torch.Tensor) -> None:
    assert out.shape == wanted.shape
    error = float((out - wanted).abs().max() / wanted.abs().max())
    assert error <= OUTPUT_TOLERANCE, f"output differs by {error:.1e} of the largest"


def assert_gradients(gradients: Gradients, wanted: Gradients) -> None:
    assert gradients.keys() == wanted.keys()
    errors = gradient_errors(gradients, wanted)
    wrong = {name: error for name, error in errors.items() if not error <= GRADIENT_TOLERANCE}
    assert not wrong, wrong


def rebound_modules() -> list[str]:
    return [name for name in sys.modules if ".rebound_" in name]


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def processors_of(model: torch.nn.Module) -> dict[str, Any]:
    return {path: m.processor for path, m in model.named_modules() if hasattr(m, "set_processor")}


def on_rank(group: Any, model: torch.nn.Module, wanted: OneProcess, options: Mapping[str, Any]) -> None:
    """The whole proof on one rank, on a model of its own."""
    before = processors_of(model)
    alone = call_without_gradient(model, wanted.inputs)  # on as many threads as below, so that bits can be compared
    plan = options.get("plan") or plan_for(model)
    local_only = dataclasses.replace(plan, attention={"**": "local"})
    with parallelize(model, group, **{**options, "plan": local_only}):
        moved = (call_without_gradient(model, wanted.inputs) - wanted.out).abs().max()
    assert moved > SENSITIVE, f"attention to a rank's own tokens moves the output by {moved:.1e} only"

    handle = parallelize(model, group, **options)
    out, gradients = call_and_backward(model, wanted.inputs)
    assert_output(out, wanted.out)
    assert_gradients(sum_over_ranks(gradients, group), wanted.gradients)
    assert handle.sharded_lengths()
    handle.remove()
    assert processors_of(model) == before and hooks_of(model) == 0
    assert torch.equal(call_without_gradient(model, wanted.inputs), alone)


def over_threads(
    wanted: OneProcess, world: int, prepare: Callable[[torch.nn.Module], None] | None = None, **options: Any
) -> None:
    """The proof on so many ranks, each with a copy of the model."""
    models = [copy.deepcopy(wanted.model) for _ in range(world)]
    for model in models:
        if prepare is not None:
            prepare(model)
    run_ranks(lambda rank, group: on_rank(group, models[rank], wanted, options), world)
    assert not rebound_modules()


def on_process(rank: int, group: Any, name: str, options: Mapping[str, Any]) -> None:
    """The proof for a family on one process of a world."""
    wanted = family(name)
    on_rank(group, copy.deepcopy(wanted.model), wanted, options)
    assert not rebound_modules()
