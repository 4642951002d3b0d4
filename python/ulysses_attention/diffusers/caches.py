"""Step caches and other hooks of diffusers under context parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["check_hooks"]

#: It skips by the number of the step, which is the same on every rank, and keeps what is inside the sharded part.
BY_STEP = "PyramidAttentionBroadcastConfig"
#: Files of diffusers.hooks whose hooks move weights or skip by the step: each is right with a part of the tokens.
RIGHT = ("hooks", "group_offloading", "layerwise_casting", "pyramid_attention_broadcast")


def _hooks(modules: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """The hooks of diffusers on modules: the file that they stand in, and their class."""
    for module in modules:
        for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values():
            package, _, file = type(hook).__module__.rpartition(".")
            if package == "diffusers.hooks":
                yield file, type(hook).__name__


def check_hooks(model: Any, modules: Iterable[Any]) -> None:
    """modules: all of the model's.

    Errors: ValueError where diffusers' own context parallelism is on; NotImplementedError for a cache that may skip on
    one rank and not on another, which then wait, and for another hook that reads or cuts tokens.
    """
    hooks = list(_hooks(modules))
    if getattr(model, "_parallel_config", None) is not None or any(file == "context_parallel" for file, _ in hooks):
        raise ValueError(
            f"[parallelize] diffusers' own context parallelism is enabled on {type(model).__name__}; tokens would be "
            f"cut twice. Fix: a model on which enable_parallelism was not called."
        )
    config = getattr(model, "_cache_config", None)
    unproved = {name for file, name in hooks if file not in RIGHT}
    if config is not None:
        unproved |= {type(config).__name__} - {BY_STEP}
    if unproved:
        raise NotImplementedError(
            f"[parallelize] {', '.join(sorted(unproved))} of diffusers on {type(model).__name__} decides from the "
            f"values of a rank's own tokens, so that one rank would skip a block in which another waits, or was not "
            f"proved not to. Fix: model.disable_cache(); {BY_STEP} decides by the step and may stay."
        )
