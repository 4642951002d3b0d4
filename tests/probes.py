"""Inputs whose attention is a closed form, plain float64 attention with every option, and calls over thread ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES, UNEVEN, with_nan_behind
from oracle import Numbers, joined, max_error, oracle_with_grads, plain, tolerance
from refusals import assert_refused
from ulysses_attention import _C

Tensors = tuple[torch.Tensor, ...]

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


# --- inputs -----------------------------------------------------------------------------------------------------------


def per_token(
    values: Sequence[float] | torch.Tensor, heads: int = 4, batch: int = 1, head_dim: int = 8
) -> torch.Tensor:
    """[B, S, H, D], in which token j holds values[j] everywhere."""
    column = torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)
    return column.expand(batch, column.size(1), heads, head_dim).contiguous()


def uniform(values: torch.Tensor, heads: int | None = None) -> Tensors:
    """q, k and v for which a query's output is the plain mean of the values it sees, and its lse ln(how many)."""
    q = values.new_zeros(*values.shape[:2], values.size(2) if heads is None else heads, values.size(3))
    return q, torch.zeros_like(values), values


def identity(values: torch.Tensor) -> Tensors:
    """q, k and v of at most 16 tokens, D = 16, for which query i returns value i: shows the order of the tokens."""
    seq_len, heads = values.shape[1:3]
    unit = 12.0 * torch.eye(16)[:seq_len].view(1, seq_len, 1, 16).expand(values.size(0), seq_len, heads, 16)
    return unit.contiguous(), unit.contiguous(), values


def normal(
    seq_len: int,
    heads: int = 4,
    kv_heads: int | None = None,
    *,
    kv_len: int | None = None,
    batch: int = 1,
    head_dim: int = 8,
    seed: int = 0,
) -> Tensors:
    """q, k, v and the weights of the loss: normal numbers, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    kv = (batch, seq_len if kv_len is None else kv_len, heads if kv_heads is None else kv_heads, head_dim)
    q = (batch, seq_len, heads, head_dim)
    return tuple(torch.randn(shape, generator=generator) for shape in (q, kv, kv, q))


def padded_to(rows: int, seq_len: int, world: int) -> ua.SequenceLayout:
    """The layout that pads seq_len to `rows` rows on all ranks together."""
    layout = ua.SequenceLayout(seq_len, world, ua.UlyssesContextParallelPolicy(pad_multiple=rows // world))
    assert layout.padded_lengths == (rows // world,) * world
    return layout


# --- expected values --------------------------------------------------------------------------------------------------


def plain_with_grads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor, **mask: Any) -> Numbers:
    """What plain() says, and the gradients of (out * weights).sum()."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = plain(*leaves, **mask)
    grads = torch.autograd.grad(out, leaves, weights.double())
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def joint_oracle(qkv: Tensors, text: Tensors, position: str, is_causal: bool = False) -> Numbers:
    """The float64 numbers of one sequence of text and image, taken apart again; the text's are named joint_…

    qkv and text: q, k, v and the weights of the loss.
    """
    whole = oracle_with_grads(*(joined(t, x, position) for t, x in zip(text, qkv, strict=True)), is_causal=is_causal)
    num_text, num_image = text[0].size(1), qkv[0].size(1)
    sizes = [num_text, num_image] if position == "prefix" else [num_image, num_text]
    numbers = {}
    for name, x in whole.items():
        parts = x.split(sizes, 2 if name == "lse" else 1)
        numbers["joint_" + name], numbers[name] = parts if position == "prefix" else parts[::-1]
    return numbers


# --- calls ------------------------------------------------------------------------------------------------------------


def _real_rows(parts: Sequence[torch.Tensor], layout: ua.SequenceLayout, dim: int, behind: float) -> torch.Tensor:
    """The tokens of all ranks in order. Rows behind a rank's tokens must hold `behind`."""
    for rank, (x, real) in enumerate(zip(parts, layout.lengths, strict=True)):
        assert x.size(dim) == layout.padded_lengths[rank], (rank, x.shape)
        assert bool((x.narrow(dim, real, x.size(dim) - real) == behind).all()), f"padding rows of rank {rank}"
    return torch.cat([x.narrow(dim, 0, real) for x, real in zip(parts, layout.lengths, strict=True)], dim)


def attend(
    world: int,
    qkv: Tensors,
    weights: torch.Tensor | None = None,
    *,
    layout: ua.SequenceLayout | None = None,
    local: Callable[[int], dict[str, Any]] = lambda rank: {},
    **options: Any,
) -> Numbers:
    """out and lse of the whole sequence from thread ranks that hold a shard each; with weights, dq, dk and dv too.

    layout: where the tokens lie, passed on. Without it they are spread evenly; passed on if the shards are not equal.
    Padding rows hold NaN on the way in and must come back as zero. local(rank): options that differ between ranks.
    kv_role="replicated": k and v go to each rank whole, and dk and dv are the sum over the ranks.
    """
    tokens = layout or ua.SequenceLayout(qkv[0].size(1), world, UNEVEN)
    whole_kv = options.get("kv_role") == "replicated"
    if layout is not None or len(set(tokens.padded_lengths)) > 1:
        options["layout"] = tokens

    def on_rank(rank: int, group: Any) -> Tensors:
        shards = [
            x if whole_kv and index in (1, 2) else with_nan_behind(tokens.shard(x, rank), tokens.lengths[rank])
            for index, x in enumerate(qkv if weights is None else (*qkv, weights))
        ]
        leaves = [x.detach().clone().requires_grad_(weights is not None) for x in shards[:3]]
        out, lse = ua.ulysses_attention(*leaves, group, return_lse=True, **options, **local(rank))
        if weights is None:
            return out, lse
        loss = (out * shards[3].nan_to_num(nan=0.0)).sum()
        return (out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves))

    numbers: Numbers = {}
    parts = list(zip(*ua.run_ranks(on_rank, world), strict=True))
    for name, of_ranks in zip(("out", "lse", "dq", "dk", "dv"), parts, strict=False):
        if whole_kv and name in ("dk", "dv"):
            numbers[name] = torch.stack(of_ranks).sum(0)
        else:
            numbers[name] = _real_rows(of_ranks, tokens, *((2, -math.inf) if name == "lse" else (1, 0.0)))
    return numbers


def attend_joint(world: int, qkv: Tensors, text: Tensors, position: str, **options: Any) -> Numbers:
    """The numbers of joint_oracle, from thread ranks: the image in shards, the text whole on every rank.

    The text's weights stand in rank 0's loss alone, and its gradients are the sum over the ranks.
    """
    tokens = ua.SequenceLayout(qkv[0].size(1), world, UNEVEN)

    def on_rank(rank: int, group: Any) -> Tensors:
        *image, weights = (tokens.shard(x, rank) for x in qkv)
        leaves = [x.detach().clone().requires_grad_() for x in (*image, *text[:3])]
        joint = ua.JointTokens(*leaves[3:], position=position)
        given = {"layout": tokens, "joint": joint, "return_lse": True, **options}
        (out, joint_out), (lse, joint_lse) = ua.ulysses_attention(*leaves[:3], group, **given)
        loss = (out * weights).sum() + (joint_out * text[3]).sum() * (rank == 0)
        return (*(x.detach() for x in (out, lse, joint_out, joint_lse)), *torch.autograd.grad(loss, leaves))

    names = ("out", "lse", "joint_out", "joint_lse", "dq", "dk", "dv", "joint_dq", "joint_dk", "joint_dv")
    numbers: Numbers = {}
    for name, parts in zip(names, zip(*ua.run_ranks(on_rank, world), strict=True), strict=True):
        if name in ("joint_out", "joint_lse"):
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
            numbers[name] = parts[0]
        elif name.startswith("joint_"):
            numbers[name] = torch.stack(parts).sum(0)
        else:
            numbers[name] = torch.cat(parts, 2 if name == "lse" else 1)
    return numbers


# --- judgements -------------------------------------------------------------------------------------------------------


def assert_equal(got: Numbers, reference: Numbers) -> None:
    """Everything that was computed lies within the float32 tolerance of the reference."""
    for name, x in got.items():
        error, allowed = max_error(x, reference[name]), tolerance(torch.float32, reference[name])
        assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}"


def assert_rows(out: torch.Tensor, values: Sequence[float] | torch.Tensor, within: float = 1e-5) -> None:
    """out [B, S, H, D] holds values[s] in row s, or values that broadcast to it, everywhere."""
    wanted = torch.as_tensor(values, dtype=torch.float64)
    wanted = wanted.view(1, -1, 1, 1) if wanted.dim() == 1 else wanted
    assert out.isfinite().all() and max_error(out, wanted.expand(out.shape)) <= within, (out[..., 0], wanted.squeeze())


def assert_refused_before_data(
    world: int, options_of: Callable[[int], dict[str, Any]], exception: type[Exception], error_id: str, *values: str
) -> str:
    """Every rank raises this error, and nothing but the comparison of the call passed between the ranks."""
    recorders = [_C.Recorder() for _ in range(world)]

    def on_rank(rank: int, group: Any) -> Any:
        call = {**dict(zip("qkv", normal(4 * world)[:3], strict=True)), **options_of(rank)}
        shards = {name: call.pop(name)[:, 4 * rank : 4 * rank + 4] for name in "qkv"}
        try:
            return ua.ulysses_attention(**shards, cp_group=_C.record_group(group, recorders[rank]), **call)
        except Exception as error:
            return error

    text = assert_refused(ua.run_ranks(on_rank, world, timeout_s=10.0), exception, error_id, *values)
    for recorder in recorders:
        assert {record.name for record in recorder.records()} <= {"all_gather"}
    return text
