"""Step caches of diffusers under context parallelism."""

from __future__ import annotations

from typing import Any

__all__ = ["check_cache"]

#: They skip by the number of the step, which is the same on every rank, and keep what is inside the sharded part.
BY_STEP = ("PyramidAttentionBroadcastConfig",)


def check_cache(model: Any) -> None:
    """Errors: NotImplementedError for a cache that may skip on one rank and not on another, which then wait."""
    config = getattr(model, "_cache_config", None)
    name = type(config).__name__
    if config is not None and name not in BY_STEP:
        raise NotImplementedError(
            f"[parallelize] the cache {name} decides from the values of a rank's own tokens, or was not proved not to: "
            f"one rank would skip a block in which another waits. Fix: model.disable_cache(), or "
            f"{', '.join(BY_STEP)}, which decides by the step."
        )
