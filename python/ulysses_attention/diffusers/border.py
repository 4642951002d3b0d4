"""Hooks at the places that a plan names: tensors are sharded on their way in and gathered on their way out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ulysses_attention.diffusers.plan import Compute, Gather, Rule, ShardingPlan, find
from ulysses_attention.diffusers.streams import Streams

__all__ = ["Hooked", "check_still_hooked", "install"]

Hooked = dict[str, torch.nn.Module]  # by path


def _apply(value: Any, rule: Rule, streams: Streams) -> Any:
    if isinstance(rule, Compute):
        return rule.function(value, streams)
    if isinstance(value, (tuple, list)):
        return type(value)(_apply(item, rule, streams) for item in value)
    return streams.shard(value, rule) if isinstance(value, torch.Tensor) else value


def _known_arguments(path: str, module: torch.nn.Module, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules by argument. Errors: ValueError for an argument that forward does not have and that is not optional."""
    parameters = inspect.signature(module.forward).parameters
    known = {}
    for name, rule in rules.items():
        argument = name.removesuffix("?")
        if argument in parameters:
            known[argument] = rule
        elif argument == name:
            raise ValueError(
                f"[parallelize] the plan names the argument {name!r} of {path or 'the model'!r}, which "
                f"{type(module).__name__}.forward does not have. Fix: one of {', '.join(parameters)}, or "
                f"{name + '?'!r} if some versions do not have it."
            )
    return known


def _shard_inputs(module: torch.nn.Module, rules: Mapping[str, Rule], streams: Streams) -> Callable[..., Any]:
    places = {name: place for place, name in enumerate(inspect.signature(module.forward).parameters)}

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = list(args), dict(kwargs)
        for name, rule in rules.items():
            if kwargs.get(name) is not None:
                kwargs[name] = _apply(kwargs[name], rule, streams)
            elif places[name] < len(args) and args[places[name]] is not None:
                args[places[name]] = _apply(args[places[name]], rule, streams)
        return tuple(args), kwargs

    return before


def _shard_outputs(rule: Rule | tuple[Rule | None, ...], streams: Streams) -> Callable[..., Any]:
    def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(rule, tuple):
            return _apply(output, rule, streams)
        rules = itertools.chain(rule, itertools.repeat(None))
        return tuple(item if one is None else _apply(item, one, streams) for item, one in zip(output, rules))  # noqa: B905

    return after


def _gather_output(rule: Gather, streams: Streams) -> Callable[..., Any]:
    return lambda module, args, output: streams.gather(output, rule.dim, rule.stream, rule.grad)


def install(model: torch.nn.Module, plan: ShardingPlan, streams: Streams) -> tuple[list[Any], Hooked]:
    """Registers the hooks of a plan on a model. Returns their handles, and the modules that they are on.

    Errors: ValueError for a module or an argument that the model does not have; then no hook is left.
    """
    hooks: list[Any] = []
    hooked: Hooked = {}
    try:
        for pattern, rules in plan.inputs.items():
            for path, module in find(model, pattern):
                known = _known_arguments(path, module, rules)
                before = _shard_inputs(module, known, streams)
                hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                hooked[path] = module
        for pattern, rule in plan.outputs.items():
            for path, module in find(model, pattern):
                hooks.append(module.register_forward_hook(_shard_outputs(rule, streams)))
                hooked[path] = module
        for pattern, gather in plan.gather.items():
            for path, module in find(model, pattern):
                hooks.append(module.register_forward_hook(_gather_output(gather, streams)))
                hooked[path] = module
    except BaseException:
        for hook in hooks:
            hook.remove()
        raise
    return hooks, hooked


def check_still_hooked(modules: Mapping[str, torch.nn.Module], hooked: Hooked) -> None:
    """modules: all of the model's, by path.

    Errors: RuntimeError where peft has put an adapter around a module with a hook, or taken one with a hook away.
    """
    for path, module in hooked.items():
        now = modules.get(path)
        is_inside = now is not module and any(other is module for other in modules.values())  # compiled, for instance
        if now is module or (is_inside and getattr(now, "base_layer", None) is not module):
            continue
        raise RuntimeError(
            f"[parallelize] {path!r} is another module since parallelize ({type(now).__module__}), and its tokens "
            f"would not be cut or gathered. Fix: handle.remove() first, then what replaces it (load_lora_weights, "
            f"add_adapter, unload_lora_weights), then parallelize again."
        )
