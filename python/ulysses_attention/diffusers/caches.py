"""Step caches and other hooks of diffusers under context parallelism."""

from __future__ import annotations

from typing import Any

__all__ = ["check_cache"]

#: It skips by the number of the step, which is the same on every rank, and keeps what is inside the sharded part.
BY_STEP = "PyramidAttentionBroadcastConfig"
#: Files of diffusers.hooks whose hooks move weights or skip by the step: each is right with a part of the tokens.
RIGHT = ("hooks", "group_offloading", "layerwise_casting", "pyramid_attention_broadcast")


def _unproved(model: Any) -> set[str]:
    """The names of caches and hooks of diffusers on a model, of which ranks may make different things."""
    config = getattr(model, "_cache_config", None)
    found = set() if config is None else {type(config).__name__} - {BY_STEP}
    for module in model.modules():
        for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values():
            package, _, file = type(hook).__module__.rpartition(".")
            if package == "diffusers.hooks" and file not in RIGHT:
                found.add(type(hook).__name__)
    return found


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
