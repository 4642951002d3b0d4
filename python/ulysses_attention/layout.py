"""Which rank holds which tokens."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from ulysses_attention import _C
from ulysses_attention.policy import UlyssesContextParallelPolicy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SequenceLayout"]

Lengths = tuple[list[int], list[int]]  # real and padded


# Numbers to torch.compile, so that a layout can be made inside what it traces.
@torch.compiler.assume_constant_result
def _lengths(seq_len: int, cp_size: int, policy: str, order: str, cp_rank: int | None) -> Lengths:
    return _C.sequence_layout(seq_len, cp_size, policy, order, cp_rank)


@torch.compiler.assume_constant_result
def _checked_lengths(lengths: tuple[int, ...], cp_rank: int | None) -> Lengths:
    return _C.sequence_layout_from_lengths(list(lengths), cp_rank)


def _can_hold(dtype: torch.dtype, fill: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return least <= fill <= most and fill == int(fill)


@dataclasses.dataclass(frozen=True, init=False)
class SequenceLayout:
    """Which rank holds which tokens: a value for any length, also shorter than the number of ranks.

    lengths:        real tokens per rank.
    padded_lengths: rows per rank; more than the tokens only under a policy that pads.
    cp_rank:        the rank this layout was made for, or None. With it set, a group in which the caller has another
                    rank is refused.
    Errors: CP002–CP007, CP010 and CP011 under a policy that refuses lengths, CP012, CP049.
    """

    seq_len: int
    cp_size: int
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    order: str
    cp_rank: int | None

    def __init__(
        self,
        seq_len: int,
        cp_size: int,
        policy: UlyssesContextParallelPolicy | None = None,
        order: str = "contiguous",
        cp_rank: int | None = None,
        *,
        lengths: tuple[int, ...] | None = None,
        padded_lengths: tuple[int, ...] | None = None,
    ) -> None:
        if lengths is not None and padded_lengths is not None:
            self._set_again(seq_len, cp_size, lengths, padded_lengths, order, cp_rank)
            return
        text = "" if policy is None else policy.text
        lengths, padded_lengths = _lengths(operator.index(seq_len), cp_size, text, order, cp_rank)
        self._set(lengths, padded_lengths, order, cp_rank)

    def _set(self, lengths: Sequence[int], padded_lengths: Sequence[int], order: str, cp_rank: int | None) -> None:
        values = {
            "seq_len": sum(lengths),
            "cp_size": len(lengths),
            "lengths": tuple(lengths),
            "padded_lengths": tuple(padded_lengths),
            "order": order,
            "cp_rank": cp_rank,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _set_again(
        self,
        seq_len: int,
        cp_size: int,
        lengths: tuple[int, ...],
        padded_lengths: tuple[int, ...],
        order: str,
        cp_rank: int | None,
    ) -> None:
        """From the fields of another one: fully_shard's mixed precision copies every dataclass among the arguments of a
        forward by dataclasses.replace, layouts as well."""
        _checked_lengths(tuple(lengths), cp_rank)
        rows = len(padded_lengths) == len(lengths) and all(n <= m for n, m in zip(lengths, padded_lengths, strict=True))
        if (seq_len, cp_size, order) != (sum(lengths), len(lengths), "contiguous") or not rows:
            raise ValueError(
                f"[SequenceLayout] lengths {list(lengths)} in {list(padded_lengths)} rows are not seq_len={seq_len}, "
                f"cp_size={cp_size}, order={order!r}. Fix: SequenceLayout.from_lengths({list(lengths)}). [CP012]"
            )
        self._set(lengths, padded_lengths, order, cp_rank)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], cp_rank: int | None = None) -> SequenceLayout:
        """The layout of shards made elsewhere, in rank order, without padding."""
        layout = cls.__new__(cls)
        lengths, padded_lengths = _checked_lengths(tuple(operator.index(length) for length in lengths), cp_rank)
        layout._set(lengths, padded_lengths, "contiguous", cp_rank)
        return layout

    def positions(self, rank: int) -> tuple[int, ...]:
        """The global position of each local row of a rank, −1 for padding."""
        self._check_rank(rank)
        begin = sum(itertools.islice(self.lengths, rank))
        real = self.lengths[rank]
        return tuple(range(begin, begin + real)) + (-1,) * (self.padded_lengths[rank] - real)

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1, *, fill: float = 0) -> torch.Tensor:
        """The rows of a rank, with rows of `fill` behind them where the layout pads: -100 for labels, say.

        Shapes: x [.., seq_len, ..] → [.., padded_lengths[rank], ..]; a view where nothing is padded.
        Comm:   none. Backward: the gradient inside zeros; partial, to be summed over the ranks.
        Errors: ValueError if x has another length, or a dtype that cannot hold `fill`.
        """
        self._check_rank(rank)
        if not _can_hold(x.dtype, fill):
            raise ValueError(
                f"[SequenceLayout.shard] fill={fill} is no value of {x.dtype}. Fix: a fill that is, or x of another "
                f"dtype. [CP012]"
            )
        if x.size(dim) != self.seq_len:
            along = [other for other in range(x.dim()) if x.size(other) == self.seq_len]
            where = f"dim={along[0]}, along which x has {self.seq_len}" if along else "another dim"
            raise ValueError(
                f"[SequenceLayout.shard] x has {x.size(dim)} tokens in dim {dim} and the layout {self.seq_len}. "
                f"Fix: {where}, or SequenceLayout({x.size(dim)}, {self.cp_size}). [CP012]"
            )
        begin = sum(self.lengths[:rank])
        rows = x.narrow(dim, begin, self.lengths[rank])
        padding = self.padded_lengths[rank] - self.lengths[rank]
        if padding == 0:
            return rows
        behind = [0, 0] * (x.dim() - dim % x.dim() - 1) + [0, padding]
        return torch.nn.functional.pad(rows, behind, value=fill)

    def gather(
        self, x_local: torch.Tensor, group: ProcessGroup, dim: int = 1, *, grad: Literal["sum", "slice"]
    ) -> torch.Tensor:
        """The whole sequence on every rank, padding left out; differentiable.

        Shapes: x_local [.., padded_lengths[rank], ..] → [.., seq_len, ..] contiguous.
        Comm:   one collective, (W − 1) · bytes of the own tokens a rank; every rank must call it.
                Backward: grad="sum" one collective, for a loss that differs per rank; grad="slice" none, for the same
                loss computed on every rank.
        Errors: ValueError if x_local has another length, or grad is neither word.
        """
        if grad not in ("sum", "slice"):
            raise ValueError(
                f"[SequenceLayout.gather] grad={grad!r} is unknown. Known: sum, slice. "
                f'Fix: grad="sum" or grad="slice". [CP033]'
            )
        rank = group.rank()
        if group.size() != self.cp_size:
            raise ValueError(
                f"[SequenceLayout.gather] the layout is for {self.cp_size} ranks and the group has {group.size()}. "
                f"Fix: SequenceLayout({self.seq_len}, {group.size()}). [CP014]"
            )
        if x_local.size(dim) != self.padded_lengths[rank]:
            raise ValueError(
                f"[SequenceLayout.gather] x_local has {x_local.size(dim)} rows in dim {dim} and the layout "
                f"{self.padded_lengths[rank]} for rank {rank}. Fix: pass what shard() returned. [CP012]"
            )
        gathered: torch.Tensor = torch.ops.ulysses.gather_sequence(
            x_local, group.group_name, rank, self.lengths, dim % x_local.dim(), grad
        )
        return gathered

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.cp_size:
            raise ValueError(
                f"[SequenceLayout] rank={rank} of cp_size={self.cp_size}. Fix: 0 to {self.cp_size - 1}. [CP015]"
            )
