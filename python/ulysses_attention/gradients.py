"""Gradients summed over the ranks: of what every rank holds alike, and of parameters."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ulysses_attention._request import one_group, resolve_group
from ulysses_attention._rows_of_ranks import rows_of_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["sum_grad", "sum_gradients"]

_BUCKET_BYTES = 32 << 20


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


class _Slot(NamedTuple):
    """Where one parameter's local gradient lies: of a DTensor the local shard."""

    parameter: torch.Tensor
    local: torch.Tensor  # of the parameter, for shape, dtype and device
    grad: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """In which it is summed: never below float32, so that a half-precision sum is rounded once."""
        return torch.promote_types(self.local.dtype, torch.float32)


_PROBLEMS = {
    1: "is not a tensor. Fix: sum_gradients(model.parameters(), group)",
    2: "has a sparse gradient. Fix: Embedding(..., sparse=False)",
    3: "is not of a real floating dtype. Fix: leave it out, or torch.view_as_real its parameter",
    4: "is a DTensor over ranks of this same group: its wrapper has combined the gradient already. Fix: leave "
    "sum_gradients out, and say averaged_over=group.size() to token_mean_loss",
    5: "has a DTensor gradient that is neither Shard nor Replicate. Fix: gradient.redistribute(...) first",
}


def sum_gradients(parameters: Iterable[torch.Tensor], group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Sum the .grad of parameters over the ranks, in place: from partial sums over each rank's tokens to the whole.

    Once, after the last backward of a step and before clipping and the optimizer:

        loss = token_mean_loss(loss_sum, token_count, group)
        loss.backward()
        sum_gradients(model.parameters(), group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    Not for parameters whose gradients DDP or fully_shard over the same ranks combines; beside one over other ranks
    (data parallel), yes. A DTensor's local shard is summed.
    A parameter that has a gradient on some rank counts as zeros on the others and has the sum on all; with none on any,
    .grad stays None. Which parameters take part is the same on every rank by their requires_grad, not by their .grad.
    A parameter that is listed twice is summed once. The result has the same bits on every rank.

    Shapes: any.
    Dtype:  summed in the parameter's dtype, half precision in float32 and rounded once.
    Comm:   one small collective, in which the ranks compare what they pass, and one all-reduce a bucket of 32 MiB: of
            all parameters that require gradients, float32 at least. Every rank must call it.
    Errors: CP060 if the ranks pass other parameters, CP063 without a group, CP069 for gradients that cannot be summed;
            on every rank, before data moves.
    Source: of the sums: PyTorch DDP (arXiv 2006.15704) §3.2, without its overlap with backward.
    """
    process_group = one_group("sum_gradients", group)
    slots, problem = _slots(parameters, process_group)
    _agree(slots, problem, process_group)
    with torch.no_grad():
        for bucket in _buckets(slots):
            _sum_bucket(bucket, process_group)


def _slots(parameters: Iterable[torch.Tensor], group: ProcessGroup) -> tuple[list[_Slot], tuple[int, int]]:
    """What takes part, and the first (problem, place in the list), or (0, 0)."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    slots: list[_Slot] = []
    problem = (0, 0)
    seen: set[int] = set()
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor):
            problem = problem if problem[0] else (1, index)
        elif parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            found = _problem_of(parameter, group)
            problem = problem if problem[0] or not found else (found, index)
            if not found:
                grad = None if parameter.grad is None else _local(parameter.grad)
                slots.append(_Slot(parameter, _local(parameter).detach(), grad))
    return slots, problem


def _is_dtensor(x: torch.Tensor) -> bool:
    """Without importing DTensor, which takes long where nobody has used it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _local(x: Any) -> torch.Tensor:
    with torch.no_grad():
        return x.to_local() if _is_dtensor(x) else x  # the storage itself, no copy


def _problem_of(parameter: Any, group: ProcessGroup) -> int:
    grad = parameter.grad
    if grad is not None and grad.layout != torch.strided:
        return 2
    if not parameter.dtype.is_floating_point:
        return 3
    if _is_dtensor(parameter):
        own = dist.get_rank()
        others = set(dist.get_process_group_ranks(group)) - {own}
        if others & set(parameter.device_mesh.mesh.flatten().tolist()):
            return 4
        placements = (parameter if grad is None else grad).placements
        if not all(p.is_shard() or p.is_replicate() for p in placements):
            return 5
    return 0


def _agree(slots: list[_Slot], problem: tuple[int, int], group: ProcessGroup) -> None:
    """Raise on every rank if one has a problem, or another list of parameters."""
    shapes = [(tuple(slot.local.shape), str(slot.local.dtype)) for slot in slots]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=6).digest()  # 48 bits: exact in float64
    elements = sum(slot.local.numel() for slot in slots)
    rows = rows_of_ranks([*problem, len(slots), elements, int.from_bytes(digest, "big")], group)
    for rank, (kind, index, *_) in enumerate(rows):
        if kind:
            raise ValueError(f"[sum_gradients] parameter {index:.0f} on rank {rank} {_PROBLEMS[int(kind)]}. [CP069]")
    for rank, row in enumerate(rows):
        if row != rows[0]:
            raise RuntimeError(
                f"[sum_gradients] rank 0 passes {rows[0][2]:.0f} parameters that require gradients, of "
                f"{rows[0][3]:.0f} elements, and rank {rank} {row[2]:.0f} of {row[3]:.0f}, or other shapes or dtypes. "
                f"Fix: the same parameters in the same order, with the same requires_grad, on every rank. [CP060]"
            )


def _buckets(slots: list[_Slot]) -> list[list[_Slot]]:
    """In the order of the list, one device and dtype each: the same on every rank."""
    buckets: list[list[_Slot]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[_Slot]] = {}
    filled: dict[tuple[torch.device, torch.dtype], int] = {}
    for slot in slots:
        key, size = (slot.local.device, slot.dtype), slot.local.numel() * slot.dtype.itemsize
        if key not in filling or filled[key] + size > _BUCKET_BYTES:
            filling[key], filled[key] = [], 0
            buckets.append(filling[key])
        filling[key].append(slot)
        filled[key] += size
    return buckets


def _sum_bucket(bucket: list[_Slot], group: ProcessGroup) -> None:
    """One all-reduce: the gradients, and behind them on how many ranks each parameter has one."""
    present = [slot.grad is not None for slot in bucket]
    sizes = [slot.local.numel() for slot in bucket]
    flat = torch.zeros(sum(sizes) + len(bucket), dtype=bucket[0].dtype, device=bucket[0].local.device)
    *pieces, counts = flat.split([*sizes, len(bucket)])
    counts.copy_(torch.tensor(present))
    for slot, piece in zip(bucket, pieces, strict=True):
        if slot.grad is not None:
            piece.view(slot.local.shape).copy_(slot.grad)
    group.allreduce([flat]).wait()
    anywhere = present if all(present) else (counts > 0).tolist()  # the host waits for the device only if it must
    for slot, piece, exists in zip(bucket, pieces, anywhere, strict=True):
        if slot.grad is not None and not _is_expanded(slot.grad):
            slot.grad.copy_(piece.view(slot.local.shape))
        elif exists:
            _set_grad(slot, piece.view(slot.local.shape).to(slot.local.dtype, copy=True))


def _is_expanded(x: torch.Tensor) -> bool:
    """Whether elements share memory, as in what torch.autograd.grad returns for a sum: not to be written in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def _set_grad(slot: _Slot, grad: torch.Tensor) -> None:
    parameter: Any = slot.parameter
    if _is_dtensor(parameter):
        grad = type(parameter).from_local(
            grad, parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
    parameter.grad = grad
