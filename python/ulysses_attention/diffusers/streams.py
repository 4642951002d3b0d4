"""Which tokens this rank holds in the forward that runs: one layout for each stream of tokens."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from ulysses_attention.diffusers.plan import Segments, Shard, ShardingPlan
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import EXACT, UlyssesContextParallelPolicy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Streams"]


class Streams:
    """The streams of one parallelized model: set by the tensors that are sharded, read by the attention.

    What a forward has noted must still hold when gradient checkpointing runs parts of it again in backward.
    """

    def __init__(self, group: ProcessGroup, policy: UlyssesContextParallelPolicy | None, plan: ShardingPlan) -> None:
        self.group = group
        self.rank, self.cp_size = group.rank(), group.size()
        self.policy = EXACT if policy is None else policy
        self._plan = plan
        self._layouts: dict[str, SequenceLayout | None] = {}  # None: every rank holds the whole stream
        self._tokens: dict[str, int] = {}
        self._awaiting_backward: list[dict[str, int]] = []
        self._recomputed = False

    def begin(self, *, checkpointing: bool) -> None:
        """A new forward starts; its streams are not known yet."""
        self._layouts, self._tokens = {}, {}
        if torch.compiler.is_compiling():
            return
        if self._recomputed:
            self._awaiting_backward, self._recomputed = [], False
        if checkpointing and torch.is_grad_enabled():
            self._awaiting_backward.append(self._tokens)

    def _check_is_this_forward(self) -> None:
        """Errors: RuntimeError in a recomputation, if several forwards of other lengths wait for their backward."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return
        self._recomputed = True
        other = [tokens for tokens in self._awaiting_backward if tokens != self._tokens]
        if other:
            raise RuntimeError(
                f"[parallelize] gradient checkpointing runs a forward again, and forwards with other tokens have run "
                f"since the last backward: {other[0]} and {self._tokens}. Which one this is cannot be told. "
                f"Fix: call backward after each forward, and forwards without one under torch.no_grad()."
            )

    def layout(self, stream: str, tokens: int | None = None) -> SequenceLayout | None:
        """The layout of a stream, None where every rank holds all of it. The first tensor says how long it is."""
        if stream not in self._tokens:
            if tokens is None:
                known = ", ".join(self._tokens) or "none so far"
                raise ValueError(
                    f"[parallelize] the plan uses the stream {stream!r} before a tensor of it was sharded "
                    f"(known: {known}). Fix: a Shard(dim, {stream!r}) on a tensor that comes earlier."
                )
            self._start(stream, tokens)
        elif tokens is not None and tokens != self._tokens[stream]:
            raise ValueError(
                f"[parallelize] a tensor with {tokens} tokens is declared as the stream {stream!r}, which has "
                f"{self._tokens[stream]}. Fix: another dim or another stream for it in the plan."
            )
        return self._layouts[stream]

    def _start(self, stream: str, tokens: int) -> None:
        self._check_is_this_forward()
        tokens = operator.index(tokens)  # a plain number under torch.compile, too
        layout: SequenceLayout | None = None
        if tokens < self.cp_size and stream not in self._plan.may_be_empty:
            if stream not in self._plan.replicate:
                raise ValueError(
                    f"[parallelize] the stream {stream!r} has {tokens} tokens, fewer than cp_size={self.cp_size}. "
                    f"Fix: a group of at most {tokens} rank{'s' * (tokens != 1)}, or name it in the plan's `replicate`."
                )
        else:
            layout = SequenceLayout(tokens, self.cp_size, self.policy)
            if layout.lengths != layout.padded_lengths:
                padded = sum(layout.padded_lengths)
                raise ValueError(
                    f"[parallelize] the stream {stream!r} has {tokens} tokens, which this policy pads to {padded}; "
                    f"padding between the streams of a model is not offered. Fix: {padded} tokens, or policy=None "
                    f"(shards of different length, no padding)."
                )
        self._tokens[stream], self._layouts[stream] = tokens, layout

    def joined(self, streams: Sequence[str]) -> SequenceLayout:
        """The layout of several sharded streams that stand in a row on each rank."""
        self._check_is_this_forward()
        layouts = [layout for layout in (self.layout(stream) for stream in streams) if layout is not None]
        if len(layouts) == 1:
            return layouts[0]
        return SequenceLayout.from_lengths(
            tuple(sum(lengths) for lengths in zip(*(x.lengths for x in layouts), strict=True))
        )

    def tokens(self, stream: str) -> int:
        """How many tokens a stream has on all ranks together."""
        self.layout(stream)
        return self._tokens[stream]

    def local_tokens(self, stream: str) -> int:
        """How many tokens of a stream this rank holds."""
        layout = self.layout(stream)
        return self._tokens[stream] if layout is None else layout.lengths[self.rank]

    def sharded_lengths(self) -> list[tuple[int, int]]:
        """(tokens on all ranks, tokens of this rank) of each stream that is cut."""
        return [(x.seq_len, x.lengths[self.rank]) for x in self._layouts.values() if x is not None]

    def is_sharded(self, x: torch.Tensor, *streams: str, dim: int = 1) -> bool:
        """Whether a dimension counts this rank's tokens of the streams that stand in a row there, and not all of them.

        For what keeps activations between calls, such as a step cache. A rank that holds all tokens says False.
        Errors: ValueError that names both lengths if it counts neither.
        """
        whole, own = sum(map(self.tokens, streams)), sum(map(self.local_tokens, streams))
        if x.size(dim) not in (whole, own):
            raise ValueError(
                f"[parallelize] dim {dim} of {list(x.shape)} counts neither the {whole} tokens of {'+'.join(streams)} "
                f"on all ranks nor the {own} of rank {self.rank}. Fix: another dim, or the streams of this tensor."
            )
        return x.size(dim) != whole

    def first_token(self, stream: str) -> int:
        """The place of this rank's first token in a stream."""
        layout = self.layout(stream)
        return 0 if layout is None else sum(layout.lengths[: self.rank])

    def shard(self, x: torch.Tensor, rule: Shard | Segments) -> torch.Tensor:
        """This rank's part of a tensor. Comm: none."""
        if isinstance(rule, Segments):
            lengths = [self.tokens(stream) for stream in rule.streams]
            if x.size(rule.dim) != sum(lengths):
                raise ValueError(
                    f"[parallelize] a tensor with {x.size(rule.dim)} tokens is declared as the streams "
                    f"{rule.streams} in a row, which have {lengths}. Fix: another dim or other streams in the plan."
                )
            parts = x.split(lengths, rule.dim)
            own = [self.shard(part, Shard(rule.dim, stream)) for part, stream in zip(parts, rule.streams, strict=True)]
            return torch.cat(own, rule.dim)
        if rule.ndim is not None and (x.dim() != rule.ndim or x.size(rule.dim) == 1):
            return x
        layout = self.layout(rule.stream, x.size(rule.dim))
        return x if layout is None else layout.shard(x, self.rank, rule.dim)

    def gather(self, x: torch.Tensor, dim: int, stream: str, grad: Literal["slice", "sum"]) -> torch.Tensor:
        """All tokens of a stream on every rank. Comm: one collective."""
        layout = self.layout(stream)
        return x if layout is None else layout.gather(x, self.group, dim, grad=grad)
