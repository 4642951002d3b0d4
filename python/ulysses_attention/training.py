"""From each rank's tokens to one loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ulysses_attention._request import one_group
from ulysses_attention._rows_of_ranks import rows_of_ranks
from ulysses_attention.layout import SequenceLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["loss_scale", "token_mean_loss", "total_tokens"]


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
    process_group = one_group("token_mean_loss", group)
    value = _host_number(loss_sum) if isinstance(loss_sum, torch.Tensor) else (1, 0.0)
    count = _host_number(token_count)
    rows = rows_of_ranks(
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
    rows = rows_of_ranks([0, 0.0, *_host_number(token_count), -1, 1], one_group("total_tokens", group))
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
