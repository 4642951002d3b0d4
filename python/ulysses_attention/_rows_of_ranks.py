"""A small table of numbers of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def rows_of_ranks(numbers: Sequence[float], group: ProcessGroup) -> list[list[float]]:
    """The numbers of every rank, in rank order.

    Shapes: n numbers, as many on every rank → cp_size rows of n.
    Dtype:  through float64: whole numbers are exact up to 2^53.
    Comm:   one all-reduce of a table [cp_size, n] that is zero but for the own row; every rank must call it.
    """
    types = [device.type for device in group._device_types]
    table = torch.zeros(group.size(), len(numbers), dtype=torch.float64)
    table[group.rank()] = torch.tensor(numbers, dtype=torch.float64)
    table = table.to("cpu" if "cpu" in types or not types else types[0])
    group.allreduce([table]).wait()
    return table.tolist()
