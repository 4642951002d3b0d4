"""Tokens and masks beside the sharded sequence: text that every rank holds, and what a mask's axes stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

__all__ = ["JointTokens", "MaskLayout"]


@dataclasses.dataclass(frozen=True, eq=False)
class JointTokens:
    """Tokens that every rank holds, attending together with the sharded sequence: the text beside an image.

    One sequence is attended: [joint | sequence] for position="prefix", [sequence | joint] for "suffix"; is_causal and
    the axes of a mask are those of this joined sequence. The joint tokens count once in the softmax.

    Shapes: q [B, T, H, D], k [B, T, H_kv, D], v [B, T, H_kv, D_v], equal on every rank, in the call's qkv_format.
    valid_lens: real tokens per sequence of the batch, B numbers; those behind are seen by nobody and come back zero.
    Gradients: partial on each rank; their sum over the ranks is the gradient (`sum_grad`).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    position: Literal["prefix", "suffix"] = "prefix"
    valid_lens: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class MaskLayout:
    """What the last two axes of attn_mask stand for; None where the size allows one reading only.

    q:  "broadcast" (one row for all), "local" (this rank's rows, padding included) or "global" (the real tokens of all
        ranks, joint tokens included).
    kv: "local" or "global".
    """

    q: Literal["broadcast", "local", "global"] | None = None
    kv: Literal["local", "global"] | None = None


class JoinedCall(NamedTuple):
    """A call with its joint tokens beside q, k and v, and what it takes to part the result again."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    joint_len: int  # in q, k and v
    total_len: int  # of the caller's tokens: more where all sequences end early and were cut
    position: str
    valid_lens: tuple[int, ...]
    problem: str  # why nothing was joined

    def part(self, x: torch.Tensor, dim: int, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the sequence and of the joint tokens; `fill` stands in rows that were cut."""
        rows = x.size(dim) - self.joint_len
        in_front = self.position != "suffix"
        sequence = x.narrow(dim, self.joint_len if in_front else 0, rows)
        joint = x.narrow(dim, 0 if in_front else rows, self.joint_len)
        if self.total_len > self.joint_len:
            behind = [0, 0] * (x.dim() - dim - 1) + [0, self.total_len - self.joint_len]
            joint = torch.nn.functional.pad(joint, behind, value=fill)
        return sequence, joint


def _problem(joint: JointTokens, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """What keeps the joint tokens from standing beside q, k and v. All [B, S, H, D]."""
    for name, given in (("joint.q", joint.q), ("joint.k", joint.k), ("joint.v", joint.v), ("q", q), ("k", k), ("v", v)):
        if not isinstance(given, torch.Tensor):
            return f"{name} is a {type(given).__name__}, not a tensor"
    tokens = joint.q.size(1) if joint.q.dim() > 1 else -1
    for name, text, x in (("q", joint.q, q), ("k", joint.k, k), ("v", joint.v, v)):
        if text.dim() != 4 or x.dim() != 4:
            return f"joint.{name} has {text.dim()} dimensions and {name} {x.dim()}, not 4"
        wanted = [x.size(0), tokens, x.size(2), x.size(3)]
        if list(text.shape) != wanted:
            return f"joint.{name} has shape {list(text.shape)}, not {wanted}, for {name} of shape {list(x.shape)}"
        if text.dtype != x.dtype or text.device != x.device:
            return f"joint.{name} is {text.dtype} on {text.device}, {name} is {x.dtype} on {x.device}"
    return ""


def join(joint: JointTokens, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, masked: bool) -> JoinedCall:
    """Put joint tokens [B, T, H, D] beside q, k and v. Where they do not fit, the call says so to every rank: CP029.

    masked: the call has a mask, whose axes count all T tokens.
    """
    in_front = joint.position != "suffix"
    given = () if joint.valid_lens is None else joint.valid_lens
    given = given.tolist() if isinstance(given, torch.Tensor) else given
    is_list = isinstance(given, Sequence) and all(isinstance(length, int) for length in given)
    valid_lens = tuple(given) if is_list else ()
    problem = _problem(joint, q, k, v) or ("" if is_list else f"joint.valid_lens={given!r} is no list of whole numbers")
    if not problem and joint.valid_lens is not None and not valid_lens:
        problem = f"joint.valid_lens=[] for B={q.size(0)} sequences"
    if problem:
        return JoinedCall(q, k, v, 0, 0, joint.position, (), problem)
    total_len = joint.q.size(1)
    length = total_len
    same = len(valid_lens) == q.size(0) and len(set(valid_lens)) == 1 and 0 <= valid_lens[0] <= total_len
    if same and not masked:
        length, valid_lens = valid_lens[0], ()  # the same end everywhere: cut, and no mask is needed

    def beside(text: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        text = text.narrow(1, 0, length)
        if len(valid_lens) == text.size(0):  # whatever stands behind must not reach a product: 0 * NaN is NaN
            ends = torch.tensor(valid_lens, device=text.device).view(-1, 1)
            text = text.masked_fill((torch.arange(length, device=text.device) >= ends)[:, :, None, None], 0.0)
        return torch.cat([text, x] if in_front else [x, text], dim=1)

    joined = beside(joint.q, q), beside(joint.k, k), beside(joint.v, v)
    return JoinedCall(*joined, length, total_len, joint.position, valid_lens, "")
