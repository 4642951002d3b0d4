"""The torch.distributed backend "ulysses_shm": ranks that are processes of one host, over shared memory."""

from __future__ import annotations

import torch.distributed as dist

from ulysses_attention import _C

__all__ = ["register"]


def register() -> None:
    """Make init_process_group(backend="ulysses_shm"), new_group and DeviceMesh know it, for CPU tensors.

    "gloo" stays the backend that torch takes for the CPU when none is named.
    """
    dist.Backend.register_backend(_C.SHM_BACKEND, _C.make_shm_backend, devices=["cpu"])
