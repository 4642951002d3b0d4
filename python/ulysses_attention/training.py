"""From each rank's tokens to one loss and one gradient."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ulysses_attention._request import resolve_group
from ulysses_attention.layout import SequenceLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["loss_scale", "sum_gradients", "token_mean_loss", "total_tokens"]

_BUCKET_BYTES = 32 << 20


# --- gradients --------------------------------------------------------------------------------------------------------


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
    process_group = _one_group("sum_gradients", group)
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
    rows = _rows([*problem, len(slots), elements, int.from_bytes(digest, "big")], group)
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


# --- loss -------------------------------------------------------------------------------------------------------------


class _WithValue(torch.autograd.Function):
    """The value of the second argument and the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def token_mean_loss(
    loss_sum: torch.Tensor,
    token_count: int | torch.Tensor,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    total: int | None = None,
    averaged_over: int = 1,
) -> torch.Tensor:
    """The mean loss over the tokens of all ranks: not the mean of their means, which weighs short shards too much.

    Every rank gets the same value, the mean, for logging. Backward gives each rank the gradient of its own tokens' part
    of it: what these add up to over the ranks (`sum_gradients`) is the gradient of the mean.

        logits, targets = model(tokens)[:, :real], labels[:, :real]  # without padding rows
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
        loss = token_mean_loss(loss_sum, (targets != -100).sum(), group)

    loss_sum:      the sum over this rank's tokens that count; a scalar. 0 without any; call backward there too.
    token_count:   how many these are.
    group:         all ranks whose tokens are averaged: the context-parallel group, or with data parallelism beside it
                   the flattened one.
    total:         the tokens of all ranks and all micro-batches, by `total_tokens`: for gradient accumulation. The
                   values of the micro-batches then add up to the mean.
    averaged_over: by how many ranks a wrapper divides gradients: the size of DDP's or fully_shard's group. The
                   gradient is multiplied by it, the value is not.

    Shapes: → a scalar.
    Dtype:  that of loss_sum, float32 at least.
    Comm:   one small collective, none in backward; the host reads the numbers. Every rank must call it.
    Errors: CP060 if ranks differ in total or averaged_over, CP063 without a group, CP069 for a loss_sum that is not one
            number, a wrong count or total, or no token to average over; on every rank.
    """
    process_group = _one_group("token_mean_loss", group)
    value = _host_number(loss_sum) if isinstance(loss_sum, torch.Tensor) else (1, 0.0)
    count = _host_number(token_count)
    rows = _rows(
        [*value, *count, -1 if total is None else _at_least_one(total), _at_least_one(averaged_over)], process_group
    )
    _check_rows(rows)
    tokens = sum(row[3] for row in rows) if total is None else total
    dtype = torch.promote_types(loss_sum.dtype, torch.float32)
    share = loss_sum.reshape(()).to(dtype) * (averaged_over / tokens)
    mean = sum(row[1] for row in rows) / tokens
    return _WithValue.apply(share, torch.tensor(mean, dtype=dtype, device=loss_sum.device))


def total_tokens(token_count: int | torch.Tensor, group: ProcessGroup | DeviceMesh | None = None) -> int:
    """The sum of the ranks' counts, for `total` of token_mean_loss: known before the first of several micro-batches.

        total = total_tokens(sum((batch.labels != -100).sum() for batch in micro_batches), group)
        for batch in micro_batches:
            token_mean_loss(*loss_sum_and_count(model, batch), group, total=total).backward()
        sum_gradients(model.parameters(), group)

    Comm:   one small collective; every rank must call it.
    Errors: CP063 without a group, CP069 for a wrong count, on every rank.
    """
    rows = _rows([0, 0.0, *_host_number(token_count), -1, 1], _one_group("total_tokens", group))
    _check_rows(rows, "total_tokens")
    return int(sum(row[3] for row in rows))


def loss_scale(layout: SequenceLayout, rank: int, *, averaged_over: int = 1) -> float:
    """The factor of a rank's own mean loss, for code that takes the mean over its shard and can only be scaled.

    (mean over the rank's real tokens) · loss_scale is the rank's share of the mean over all: its gradients add up over
    the ranks, and so do its values (with averaged_over=1). Right where every real token counts; with labels left out
    use token_mean_loss. A rank without tokens has 0: its mean, often NaN, must not be multiplied but replaced.

        (local_mean * loss_scale(layout, rank)).backward()

    averaged_over: as in token_mean_loss.
    Comm:   none.
    Errors: CP015 for a rank outside the layout, CP069 for an averaged_over below 1.
    """
    layout._check_rank(rank)
    if not averaged_over >= 1:
        raise ValueError(f"[loss_scale] averaged_over={averaged_over}. Fix: 1, or the wrapper's group size. [CP069]")
    return layout.lengths[rank] * averaged_over / layout.seq_len


def _host_number(x: int | float | torch.Tensor) -> tuple[int, float]:
    """(whether it is not one real number, the number)."""
    if isinstance(x, torch.Tensor):
        if x.numel() != 1 or x.is_complex():
            return 1, 0.0
        return 0, float(x.detach().item())
    return (0, float(x)) if isinstance(x, (int, float)) else (1, 0.0)


def _at_least_one(x: float) -> float:
    """x where it is a whole number from 1 on, else 0, which every rank refuses."""
    number = float(x)
    return number if number >= 1 and number.is_integer() else 0.0


def _check_rows(rows: list[list[float]], name: str = "token_mean_loss") -> None:
    """Each row: (loss is no number, loss, count is no number, count, total, averaged_over)."""
    for rank, row in enumerate(rows):
        no_loss, _, no_count, count, total, averaged_over = row
        if no_loss:
            wrong = 'loss_sum is not one number. Fix: reduction="sum"'
        elif no_count or not (count >= 0 and count.is_integer()):
            wrong = "token_count is not a count. Fix: (targets != -100).sum()"
        elif (total != -1 and total < 1) or averaged_over < 1:
            wrong = (
                f"total, averaged_over = {_shown(row)}. Fix: total=None or total_tokens(count, group), and "
                f"averaged_over=1 or the size of the wrapper's group"
            )
        else:
            continue
        raise ValueError(f"[{name}] on rank {rank}: {wrong}. [CP069]")
    for rank, row in enumerate(rows):
        if row[4:] != rows[0][4:]:
            raise RuntimeError(
                f"[{name}] rank 0 has total, averaged_over = {_shown(rows[0])} and rank {rank} {_shown(row)}. "
                f"Fix: the same on every rank; total=total_tokens(count, group). [CP060]"
            )
    counted = sum(row[3] for row in rows)
    if -1 != rows[0][4] < counted:
        raise ValueError(
            f"[{name}] total={rows[0][4]:.0f}, and the ranks count {counted:.0f} tokens in this call alone. Fix: "
            f"total=total_tokens(count of all micro-batches, group). [CP069]"
        )
    if name == "token_mean_loss" and rows[0][4] == -1 and not any(row[3] for row in rows):
        raise ValueError(
            "[token_mean_loss] no rank has a token to average over. Fix: leave this batch out on every rank, or pass "
            "total=total_tokens(count, group) of all micro-batches. [CP069]"
        )


def _shown(row: Sequence[float]) -> str:
    return f"{'None' if row[4] == -1 else int(row[4])}, {int(row[5])}"


# --- small numbers of every rank --------------------------------------------------------------------------------------


def _one_group(name: str, group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    process_group, several = resolve_group(group)
    if several:
        raise ValueError(
            f"[{name}] a mesh of several dimensions does not say over which. Fix: one of them, mesh['cp'], or all "
            f"ranks as a mesh of one dimension. [CP063]"
        )
    return process_group


def _rows(numbers: Sequence[float], group: ProcessGroup) -> list[list[float]]:
    """The numbers of every rank, in rank order. One all-reduce of a table that is zero but for the own row."""
    types = [device.type for device in group._device_types]
    table = torch.zeros(group.size(), len(numbers), dtype=torch.float64)
    table[group.rank()] = torch.tensor(numbers, dtype=torch.float64)
    table = table.to("cpu" if "cpu" in types or not types else types[0])
    group.allreduce([table]).wait()
    return table.tolist()
