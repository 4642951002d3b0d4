"""Gradients of what every rank holds alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ulysses_attention._request import resolve_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["sum_grad"]


def sum_grad(x: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None) -> torch.Tensor:
    """x, with a backward that sums its gradient over the ranks: for a tensor that every rank holds alike.

    Put it where a replicated tensor enters the part of a model that each rank computes on its own tokens: text before
    the first joint attention, keys before a cross-attention. Behind it each rank's gradient is partial, before it
    whole, and equal on every rank. Once: a parameter gradient that is summed later must not pass through it as well.

    Shapes: any → the same, a copy.
    Comm:   forward none. Backward one collective, (W − 1) · bytes of x a rank; sums in float32, in rank order. Every
            rank must run it.
    Errors: CP063 without a group.
    """
    process_group, _ = resolve_group(group)
    summed: torch.Tensor = torch.ops.ulysses.sum_grad(x, process_group.group_name)
    return summed
