"""Which plan a model gets: that of its family, one from its own declaration, or an error that shows how to write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from ulysses_attention.diffusers.families import FAMILIES, UNSUPPORTED
from ulysses_attention.diffusers.plan import (
    LOCAL,
    Attend,
    Gather,
    Rule,
    Shard,
    ShardingPlan,
    attention_modules,
    is_cross,
    matches,
)
from ulysses_attention.diffusers.template import template

__all__ = ["own_plan", "plan_for"]

TEXT_WORDS = ("encoder", "txt", "text", "prompt", "context")


def plan_for(model: torch.nn.Module) -> ShardingPlan:
    """Errors: NotImplementedError, with a plan to start from, for a model that no plan is known for."""
    for kind in type(model).__mro__:
        if kind.__name__ in FAMILIES:
            return FAMILIES[kind.__name__]
    name = type(model).__name__
    if getattr(model, "_cp_plan", None):
        return own_plan(model)
    why = f" ({UNSUPPORTED[name]})" if name in UNSUPPORTED else ""
    unknown = (
        f"[parallelize] no plan is known for {name}{why}. Known: {', '.join(sorted(FAMILIES))}, and models with a "
        f"context parallel plan of their own.\n"
    )
    draft = template(model)
    if not draft:
        raise NotImplementedError(
            f"{unknown}No attention with a processor that can be set was found in {name}, so no plan can be written "
            f"for it. Fix: a model with a list of blocks whose attentions have set_processor."
        )
    raise NotImplementedError(
        f"{unknown}Fix: say how it is cut and pass plan=plan; then compare: verify(model, inputs, group, plan=plan). "
        f"From its modules, to be checked against its forward:\n\n{draft}"
    )


def _stream(argument: str) -> str:
    return "text" if any(word in argument for word in TEXT_WORDS) else "audio" if "audio" in argument else "image"


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _shard(declared: Any, stream: str) -> Shard:
    """A rule from the model's ContextParallelInput. Of a list, all are cut alike."""
    first = _listed(declared)[0]
    return Shard(first.split_dim, stream, ndim=first.expected_dims)


def own_plan(model: torch.nn.Module) -> ShardingPlan:
    """The plan that a model of diffusers declares for diffusers' own context parallelism, as ours.

    It does not say which tokens meet in an attention, so that the ranks exchange their numbers in every call.
    """
    inputs: dict[str, dict[str, Shard]] = {}
    outputs: dict[str, Rule | tuple[Rule | None, ...]] = {}
    gather: dict[str, Gather] = {}
    for path, declared in model._cp_plan.items():  # type: ignore[union-attr,operator]
        if not isinstance(declared, dict):
            gather[path] = Gather(_listed(declared)[0].gather_dim, _stream(path))
            continue
        by_name = {name: _shard(value, _stream(name)) for name, value in declared.items() if isinstance(name, str)}
        # Each output is a stream of its own: what its tokens are is not said, and equal lengths are cut alike.
        by_index = {n: _shard(value, f"{path}[{n}]") for n, value in declared.items()
                    if isinstance(n, int)}  # fmt: skip
        if by_name:
            inputs[path] = by_name
        if by_index:
            outputs[path] = tuple(by_index.get(index) for index in range(max(by_index) + 1))
    sharded = {rule.stream for by_name in inputs.values() for rule in by_name.values()}
    attention: dict[str, Attend | Literal["local"]] = {
        path: LOCAL if is_cross(path, module) and "text" not in sharded else Attend(())
        for path, module in attention_modules(dict(model.named_modules()))
    }
    # A module that shards its own input leaves the rest of the model whole, and its gradients are no partial sums.
    is_whole_between = any(matches(pattern, path) for path in gather for pattern in inputs)
    check = _without_gradients if is_whole_between else None
    return ShardingPlan(inputs=inputs, outputs=outputs, gather=gather, attention=attention, replicate=(), check=check)


def _without_gradients(model: torch.nn.Module, arguments: Mapping[str, Any]) -> str:
    if not torch.is_grad_enabled():
        return ""
    return (
        f"the context parallel plan that {type(model).__name__} declares gathers tokens between its modules, which is "
        f"right for outputs and not for gradients. Fix: torch.no_grad(); to train, a plan that gathers at the end of "
        f"the model only, compared by verify(model, inputs, group, plan=plan)."
    )
