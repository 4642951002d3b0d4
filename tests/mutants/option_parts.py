"""The attention of parts.py with masks, joint tokens, replicated keys, sinks, softcap and a gradient through lse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from mutants.parts import Steps, all_gather
from ulysses_attention import SequenceLayout

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SEQUENCE_DIMS = {"bshd": 1, "bhsd": 2, "sbhd": 0}


class MoreOptions(NamedTuple):
    """What a caller may set, as the doctor hands it to a function."""

    is_causal: bool = False
    causal_alignment: str = "top_left"
    softmax_scale: float | None = None
    layout: SequenceLayout | None = None
    kv_layout: SequenceLayout | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    mask_layout: tuple[str, str] = ("", "")
    joint: Tensors | None = None
    joint_position: str = "prefix"
    joint_valid_lens: Sequence[int] | None = None
    kv_role: str = "sharded"


class OptionSteps(Steps):
    """Every rank attends with its own queries and with those of all joint tokens, over all keys.

    The joint tokens' gradients that a rank returns are those of its own loss: their sum over the ranks is the gradient.
    Places are those of the joined sequence: joint tokens in front, or behind.
    """

    options: MoreOptions

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of the rank's rows and, behind them, of the joint tokens."""
        q, places = self.queries()
        keys, values, key_places = self.keys_and_values()
        if self.text() is not None:
            text_q, text_k, text_v = (x.to(self.dtype) for x in self.text())
            q, places = torch.cat([q, text_q], 1), torch.cat([places, self.text_places(sum(self.q_lengths))])
            keys, values = torch.cat([keys, text_k], 1), torch.cat([values, text_v], 1)
            key_places = torch.cat([key_places, self.text_key_places()])
        heads = self.kv_heads()
        scores = self.scores(q, keys[:, :, heads], places, key_places)
        out, lse = self.weigh(scores, values[:, :, heads])
        return self.hide_invalid_rows(out, lse, places)

    # ---- where tokens stand

    def text(self) -> Tensors | None:
        return self.options.joint

    def text_len(self) -> int:
        return 0 if self.options.joint is None else self.options.joint[0].size(1)

    def in_front(self) -> int:
        """Joint tokens before the sequence."""
        return 0 if self.options.joint_position == "suffix" else self.text_len()

    def queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, places = super().queries()
        return q, places + self.in_front()

    def text_places(self, tokens: int) -> torch.Tensor:
        begin = tokens if self.options.joint_position == "suffix" else 0
        return torch.arange(begin, begin + self.text_len())

    def text_key_places(self) -> torch.Tensor:
        return self.text_places(self.kv_tokens())

    def kv_tokens(self) -> int:
        return self.k.size(1) if self.is_replicated() else sum(self.kv_lengths)

    def is_replicated(self) -> bool:
        return self.options.kv_role == "replicated"

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.is_replicated():
            return self.k.to(self.dtype), self.v.to(self.dtype), torch.arange(self.k.size(1))
        keys, values, places = super().keys_and_values()
        return keys, values, places + self.in_front()

    # ---- scores

    def scores(
        self, q: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, key_places: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, keys) * self.scale()
        return self.masked(self.capped(scores), places, key_places)

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.options.softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def masked(self, scores: torch.Tensor, places: torch.Tensor, key_places: torch.Tensor) -> torch.Tensor:
        mask = self.mask_of(places, key_places)
        if mask is not None:
            scores = self.with_mask(scores, mask)
        hidden = self.hidden(places, key_places).expand(self.q.size(0), -1, -1) | self.invalid(key_places).unsqueeze(1)
        return scores.masked_fill(hidden.unsqueeze(1), -math.inf)

    def with_mask(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(self.dtype)

    def mask_of(self, places: torch.Tensor, key_places: torch.Tensor) -> torch.Tensor | None:
        """The mask of these queries, keys and all heads."""
        mask = self.whole_mask()
        if mask is None:
            return None
        if mask.size(2) > 1:
            local = self.options.mask_layout[0] == "local"
            mask = mask[:, :, : len(places)] if local else mask[:, :, places]
        return mask[..., key_places]

    def whole_mask(self) -> torch.Tensor | None:
        """4-D, with the keys of all ranks."""
        mask = self.options.attn_mask
        if mask is None:
            return None
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        return self.gathered_mask(mask) if self.options.mask_layout[1] == "local" else mask

    def gathered_mask(self, mask: torch.Tensor) -> torch.Tensor:
        own = mask[..., : self.kv_lengths[self.rank]].movedim(-1, 1).contiguous()
        numbers = own.to(torch.uint8) if own.dtype == torch.bool else own
        return torch.cat(all_gather(numbers, self.kv_lengths, self.group), 1).to(own.dtype).movedim(1, -1)

    def invalid(self, places: torch.Tensor) -> torch.Tensor:
        """Joint tokens behind their sequence's end, [B, S]."""
        lens = self.options.joint_valid_lens
        if lens is None:
            return torch.zeros(1, len(places), dtype=torch.bool)
        first = int(self.text_key_places()[0]) if self.options.joint_position == "suffix" else 0
        ends = first + torch.tensor(lens).unsqueeze(1)
        return (places >= ends) & (places < first + self.text_len())

    # ---- softmax

    def weigh(self, scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A query that sees nothing: out 0, lse −inf."""
        with_sinks = self.with_sinks(scores)
        blind = (with_sinks == -math.inf).all(-1, keepdim=True)
        seen = with_sinks.masked_fill(blind, 0.0)
        lse = seen.logsumexp(-1).masked_fill(blind.squeeze(-1), -math.inf)
        weights = seen.softmax(-1).masked_fill(blind, 0.0)[..., : scores.size(3)]
        return torch.einsum("bhij,bjhd->bihd", weights, values), lse

    def with_sinks(self, scores: torch.Tensor) -> torch.Tensor:
        sinks = self.sinks()
        if sinks is None:
            return scores
        return torch.cat([scores, sinks.to(self.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], -1)], 3)

    def sinks(self) -> torch.Tensor | None:
        return self.options.sinks

    def in_format(self, out: torch.Tensor, dim: int) -> torch.Tensor:
        """[B, S, H, D] with the sequence in `dim`."""
        return out.transpose(1, dim)

    def hide_invalid_rows(
        self, out: torch.Tensor, lse: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lens = self.options.joint_valid_lens
        if lens is None:
            return out, lse
        text = torch.arange(self.text_len()) >= torch.tensor(lens).unsqueeze(1)  # [B, T]
        invalid = functional.pad(text, (len(places) - self.text_len(), 0))
        return out.masked_fill(invalid[:, :, None, None], 0.0), lse.masked_fill(invalid.unsqueeze(1), -math.inf)


def attention_with_options(steps: type[OptionSteps]) -> Callable[..., Any]:
    """The plain function of these steps, as if it were written in their module."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Any,
        *,
        is_causal: bool = False,
        causal_alignment: str = "top_left",
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        mask_layout: tuple[str, str] = ("", ""),
        layout: SequenceLayout | None = None,
        kv_layout: SequenceLayout | None = None,
        kv_role: str = "sharded",
        joint: Tensors | None = None,
        joint_position: str = "prefix",
        joint_valid_lens: Sequence[int] | None = None,
        qkv_format: str = "bshd",
        return_lse: bool = False,
    ) -> Any:
        dim = SEQUENCE_DIMS[qkv_format]
        q, k, v = (x.transpose(1, dim) for x in (q, k, v))
        text = None if joint is None else tuple(x.transpose(1, dim) for x in joint)
        options = MoreOptions(
            is_causal,
            causal_alignment,
            softmax_scale,
            layout,
            kv_layout,
            softcap,
            sinks,
            attn_mask,
            mask_layout,
            text,
            joint_position,
            joint_valid_lens,
            kv_role,
        )
        of = steps(q, k, v, group, options)
        joined, lse = of.run()
        own = of.q_lengths[of.rank]
        out, of_own = of.finish(joined[:, :own], lse[:, :, :own])
        out = of.in_format(out, dim)
        if joint is None:
            return (out, of_own) if return_lse else out
        outs = (out, of.in_format(joined[:, own:].to(q.dtype), dim))
        return (outs, (of_own, lse[:, :, own:])) if return_lse else outs

    attention.__module__, attention.__qualname__ = steps.__module__, "attention"
    return attention
