"""Calls in your own script: is this attention right over this group, and are these tensors equal on every rank?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ulysses_attention import _C
from ulysses_attention._C import AttentionCheck
from ulysses_attention._request import resolve_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AttentionCheck", "check_attention", "check_same"]


def check_attention(
    fn: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    is_causal: bool = False,
) -> AttentionCheck:
    """Ask fn(q, k, v) the doctor's plain case on small local shards and say `ok`, or in one sentence what is wrong.

    fn:     any context-parallel attention, of this library or not: q, k, v [B, S_local, H, D] → out like q.
    is_causal: what fn is meant to be: a query sees the keys up to its own global position, or all of them.
    Returns an AttentionCheck with ok, diagnosis and the largest errors of out, dq, dk and dv against float64; equal on
    every rank. str() of it is the line to print.
    Dtype:  q, k and v are float32 on the CPU, made here; the group must carry CPU tensors (Gloo, thread ranks).
    Comm:   one call of fn, one backward, and a few small collectives; some dozens where fn is wrong, to find out why.
            Every rank must call it. Seconds.
    Errors: CP063 without a group. What fn raises is not an error but the diagnosis.
    """
    if not callable(fn):
        raise TypeError(
            f"[check_attention] {type(fn).__name__} cannot be called. Fix: a function of q, k and v, for a backend "
            f"lambda q, k, v: backend.forward(q, k, v, group)"
        )
    return _C.check_attention(fn, resolve_group(group)[0], is_causal)


def check_same(tensors: Mapping[str, torch.Tensor], group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Raise on every rank if a tensor that must be equal on all of them is not: noise, weights, text embeddings.

    tensors: by name; dense, any dtype and shape. Equal means bit for bit: dtype, shape and values.
    Comm:   one small collective, two more if anything differs; every rank must call it. Checksums travel, no data.
    Errors: RuntimeError (CP068) naming each tensor that differs and the ranks that differ from the majority, or from
            rank 0 where there is none; the group stays usable. CP063 without a group.
    """
    _C.check_same(dict(tensors), resolve_group(group)[0])
