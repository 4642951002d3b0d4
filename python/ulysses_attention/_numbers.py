"""Small numbers of every rank, for the helpers of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ulysses_attention._request import resolve_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def one_group(name: str, group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    process_group, several = resolve_group(group)
    if several:
        raise ValueError(
            f"[{name}] a mesh of several dimensions does not say over which. Fix: one of them, mesh['cp'], or all "
            f"ranks as a mesh of one dimension. [CP063]"
        )
    return process_group


def rows_of_ranks(numbers: Sequence[float], group: ProcessGroup) -> list[list[float]]:
    """The numbers of every rank, in rank order. One all-reduce of a table that is zero but for the own row."""
    types = [device.type for device in group._device_types]
    table = torch.zeros(group.size(), len(numbers), dtype=torch.float64)
    table[group.rank()] = torch.tensor(numbers, dtype=torch.float64)
    table = table.to("cpu" if "cpu" in types or not types else types[0])
    group.allreduce([table]).wait()
    return table.tolist()
