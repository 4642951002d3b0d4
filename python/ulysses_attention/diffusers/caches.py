"""Step caches and other hooks of diffusers under context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["check_cache", "check_not_cut_by_diffusers"]

#: It skips by the number of the step, which is the same on every rank, and keeps what is inside the sharded part.
BY_STEP = "PyramidAttentionBroadcastConfig"
#: Files of diffusers.hooks whose hooks move weights or skip by the step: each is right with a part of the tokens.
RIGHT = ("hooks", "group_offloading", "layerwise_casting", "pyramid_attention_broadcast")


def _hooks(model: Any) -> Iterator[tuple[str, str]]:
    """The hooks of diffusers on a model: the file that they stand in, and their class."""
    for module in model.modules():
        for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values():
            package, _, file = type(hook).__module__.rpartition(".")
            if package == "diffusers.hooks":
                yield file, type(hook).__name__


def _unproved(model: Any) -> set[str]:
    """The names of caches and hooks on a model, of which ranks may make different things."""
    config = getattr(model, "_cache_config", None)
    found = set() if config is None else {type(config).__name__} - {BY_STEP}
    return found | {name for file, name in _hooks(model) if file not in RIGHT}


def check_not_cut_by_diffusers(model: Any) -> None:
    """Errors: ValueError where diffusers' own context parallelism is on."""
    if getattr(model, "_parallel_config", None) is not None or any(f == "context_parallel" for f, _ in _hooks(model)):
        raise ValueError(
            f"[parallelize] diffusers' own context parallelism is enabled on {type(model).__name__}; tokens would be "
            f"cut twice. Fix: a model on which enable_parallelism was not called."
        )


def check_cache(model: Any) -> None:
    """Errors: NotImplementedError for a cache that may skip on one rank and not on another, which then wait, and for
    another hook that reads or cuts tokens."""
    unproved = _unproved(model)
    if unproved:
        raise NotImplementedError(
            f"[parallelize] {', '.join(sorted(unproved))} of diffusers on {type(model).__name__} decides from the "
            f"values of a rank's own tokens, so that one rank would skip a block in which another waits, or was not "
            f"proved not to. Fix: model.disable_cache(); {BY_STEP} decides by the step and may stay."
        )
