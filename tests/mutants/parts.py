"""A right context-parallel attention in steps. Each mutant beside this file overrides one step and gets it wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ulysses_attention import SequenceLayout

Reduce = Callable[[torch.Tensor], torch.Tensor]


class Options(NamedTuple):
    """What a caller may set, as in ulysses_attention."""

    is_causal: bool = False
    causal_alignment: str = "top_left"
    softmax_scale: float | None = None
    layout: SequenceLayout | None = None
    kv_layout: SequenceLayout | None = None


def rows_of_every_rank(group: Any, *local: int) -> list[list[int]]:
    """[[first number of rank 0, of rank 1, ..], [second number of rank 0, ..], ..]. Comm: one small all-gather."""
    numbers = [torch.zeros(len(local), dtype=torch.int64) for _ in range(group.size())]
    group.allgather([numbers], [torch.tensor(local)]).wait()
    return [list(column) for column in zip(*(x.tolist() for x in numbers), strict=True)]


def lengths_of(
    q: torch.Tensor, k: torch.Tensor, group: Any, layout: SequenceLayout | None, kv_layout: SequenceLayout | None
) -> tuple[list[int], list[int]]:
    """Real tokens of every rank, of q and of k; exchanged where no layout says so."""
    if layout is None:
        q_rows, kv_rows = rows_of_every_rank(group, q.size(1), k.size(1))
        return q_rows, kv_rows if kv_layout is None else list(kv_layout.lengths)
    return list(layout.lengths), list((kv_layout or layout).lengths)


def sum_over_ranks(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Comm: one all-reduce."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.allreduce([total]).wait()
    return total


def all_gather(x: torch.Tensor, lengths: Sequence[int], group: Any) -> list[torch.Tensor]:
    """x [B, lengths[rank], ..] of every rank. Comm: one all-gather, of blocks as long as the longest."""
    block = x.new_zeros(x.size(0), max(1, *lengths), *x.shape[2:])
    block[:, : x.size(1)] = x
    blocks = [torch.empty_like(block) for _ in lengths]
    group.allgather([blocks], [block]).wait()
    return [rows[:, :length] for rows, length in zip(blocks, lengths, strict=True)]


class GatherRows(torch.autograd.Function):
    """x [B, lengths[rank], H, D] → [B, sum(lengths), H, D]. Backward: reduce(gradient), of which the own rows.

    reduce: sums over the ranks, because this rank's rows took part in what every rank computed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: Sequence[int], group: Any, reduce: Reduce) -> torch.Tensor:
        begin = sum(lengths[: group.rank()])
        ctx.reduce, ctx.own = reduce, slice(begin, begin + lengths[group.rank()])
        return torch.cat(all_gather(x, lengths, group), 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.reduce(grad)[:, ctx.own], None, None, None


class Steps:
    """One call on one rank: gather K and V of all ranks, attend with the own queries.

    Shapes: q [B, S_local, H, D], k [B, S_local, H_kv, D], v [B, S_local, H_kv, D_v] → out [B, S_local, H, D_v],
            lse [B, H, S_local]; between the steps without padding rows.
    Dtype:  any float; computes in float32, in float64 for float64.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, options: Options) -> None:
        self.q, self.k, self.v = q, k, v
        self.group, self.rank, self.world = group, group.rank(), group.size()
        self.options = options
        self.q_lengths, self.kv_lengths = lengths_of(q, k, group, options.layout, options.kv_layout)
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, q_positions = self.queries()
        keys, values, kv_positions = self.keys_and_values()
        heads = self.kv_heads()
        hidden = self.hidden(q_positions, kv_positions)
        return self.finish(*self.attend(q, keys[:, :, heads], values[:, :, heads], hidden))

    def own(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """This rank's real rows."""
        return x[:, : lengths[self.rank]].to(self.dtype)

    def own_positions(self, lengths: Sequence[int]) -> torch.Tensor:
        begin = sum(lengths[: self.rank])
        return torch.arange(begin, begin + lengths[self.rank])

    def rank_of_keys(self) -> torch.Tensor:
        """The rank that holds each key, [S_kv]."""
        return torch.arange(self.world).repeat_interleave(torch.tensor(self.kv_lengths))

    def gather(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """All ranks' real rows in rank order."""
        return GatherRows.apply(self.own(x, lengths), lengths, self.group, self.reduce)

    def reduce(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of all rows, of this rank's queries → of every rank's."""
        return sum_over_ranks(grad, self.group)

    def queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries of this rank's output and their global positions."""
        return self.own(self.q, self.q_lengths), self.own_positions(self.q_lengths)

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K, V and their global positions."""
        keys, values = self.gather(self.k, self.kv_lengths), self.gather(self.v, self.kv_lengths)
        return keys, values, torch.arange(sum(self.kv_lengths))

    def kv_heads(self) -> torch.Tensor:
        """The KV head that each query head reads, [H]."""
        return torch.arange(self.q.size(2)) // (self.q.size(2) // self.k.size(2))

    def scale(self) -> float:
        given = self.options.softmax_scale
        return 1.0 / math.sqrt(self.q.size(3)) if given is None else given

    def hidden(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        """Which key no query may see, [S_local, S_kv]."""
        if not self.options.is_causal:
            return torch.zeros(len(q_positions), len(kv_positions), dtype=torch.bool)
        bottom_right = self.options.causal_alignment == "bottom_right"
        shift = sum(self.kv_lengths) - sum(self.q_lengths) if bottom_right else 0
        return kv_positions > q_positions.unsqueeze(1) + shift

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (torch.einsum("bihd,bjhd->bhij", q, keys) * self.scale()).masked_fill(hidden, -math.inf)
        weights, lse = self.softmax(scores)
        return torch.einsum("bhij,bjhd->bihd", weights, values), lse

    def softmax(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, all 0 for a query that sees no key, and lse without gradient."""
        lse = scores.detach().logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
        return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny), lse

    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In the caller's dtype, with the padding rows behind: 0, and −inf in lse."""
        padding = self.q.size(1) - self.q_lengths[self.rank]
        lse = functional.pad(lse, (0, padding), value=-math.inf)
        return functional.pad(out.to(self.q.dtype), (0, 0, 0, 0, 0, padding)), lse


def attention_of(steps: type[Steps]) -> Callable[..., Any]:
    """The plain function of these steps, as if it were written in their module: processes find it there by name."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Any,
        *,
        is_causal: bool = False,
        causal_alignment: str = "top_left",
        softmax_scale: float | None = None,
        layout: SequenceLayout | None = None,
        kv_layout: SequenceLayout | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        options = Options(is_causal, causal_alignment, softmax_scale, layout, kv_layout)
        out, lse = steps(q, k, v, group, options).run()
        return (out, lse) if return_lse else out

    attention.__module__, attention.__qualname__ = steps.__module__, "attention"
    return attention
