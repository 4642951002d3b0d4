"""The public call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ulysses_attention import _C
from ulysses_attention._request import Request, resolve_group, run_call
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import UlyssesContextParallelPolicy
from ulysses_attention.processor import KERNEL_BACKEND, CallableProcessor
from ulysses_attention.tokens import JointTokens, MaskLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ulysses_attention"]


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp_group: ProcessGroup | DeviceMesh | None = None,
    cp_size: int | None = None,
    *,
    policy: UlyssesContextParallelPolicy | None = None,
    strategy: str = "ulysses",
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: Any = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    mask_layout: MaskLayout | None = None,
    layout: SequenceLayout | None = None,
    kv_layout: SequenceLayout | None = None,
    kv_role: str = "sharded",
    joint: JointTokens | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    qkv_format: str = "bshd",
    ulysses_degree: int | None = None,
    outer: str = "ring",
    return_lse: bool = False,
    kernel: str | Callable[..., Any] = "auto",
    agreement: str = "auto",
) -> Any:
    """Attention over the whole sequence, of which every rank of the group holds a slice.

    Each rank passes its own tokens and gets the output of its own tokens, as if one process had computed attention over
    all of them. Differentiable; the gradients of the local tokens are complete when backward returns.

    Shapes: q [B, S_local, H, D], k [B, S_local, H_kv, D], v [B, S_local, H_kv, D_v] → out [B, S_local, H, D_v] and,
            with return_lse, lse [B, H, S_local] (natural log). H % H_kv == 0; any H, any S. With joint= out and lse are
            pairs: (of the sequence, of the joint tokens).
    Dtype:  any float; lse float32 (float64 for float64), differentiable. Under autocast q, k and v are cast as torch's
            attention does.
    Comm:   every rank of the group must call it. strategy="ulysses": two collectives (three if q and k/v are sharded
            differently); "allgather_kv": one, with joint tokens two; as many in backward. Replicated keys, or a group
            of one: none. A mask's local axis: one more, the first time. On the first call with new options, over
            threads or shared memory on every call, one small collective in which the ranks compare them
            (agreement="always": every call, and one more in which they say how the local attention ended; "off":
            never).
    layout, kv_layout: which rank holds which tokens; needed for shards of different length and for padded shards.
            Streams that see different keys are one call each: examples/two_streams.py.
    attn_mask: bool (True = visible) or floating (added to the scaled scores), [B, S_kv] or [B|1, H|1, S_q|1, S_kv];
            see MaskLayout for what its axes stand for. A query that sees no key: out 0, lse −inf, zero gradients.
    joint:  JointTokens, text that every rank holds and that attends together with the sequence.
    kv_role: "replicated": k and v are whole and equal on every rank (cross-attention); nothing is communicated.
    sinks:  [H], one logit per head that takes softmax weight and gives nothing. softcap: c · tanh(scores / c).
    qkv_format: "bshd", "bhsd" or "sbhd", of q, k, v, joint tokens and out; as views. lse is always [B, H, S_local].
    Gradients of what every rank holds alike (joint tokens, replicated k and v, sinks, masks) are partial: their sum
            over the ranks is the gradient (`sum_grad`). A mask with a local axis gets none: refused.
    kernel: "auto" (or what the environment variable ULYSSES_KERNEL names), a registered name, or a function
            (q, k, v, call) -> out or (out, lse), which must honour every field of call.
    Errors: ValueError, NotImplementedError or RuntimeError whose text ends in an id; docs/errors.md lists them. Options
            that a path cannot honour are refused before any data moves, on every rank.
    Source: DeepSpeed-Ulysses (arXiv 2309.14509); deviation: one message for q, k and v, uneven heads and tokens.
    """
    group, mesh_2d = resolve_group(cp_group)
    name = getattr(policy, "backend_name", KERNEL_BACKEND)  # of a policy; make_request refuses anything else
    backend = None if name == KERNEL_BACKEND else _C.find_backend(name)  # registered from Python or from C++
    is_function = callable(kernel) and name == KERNEL_BACKEND  # other backends attend by their own code: CP031
    if is_function:
        backend = CallableProcessor(cast("Callable[..., Any]", kernel))

    def execute(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, sinks: Any, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if backend is not None:
            return cast("tuple[torch.Tensor, torch.Tensor]", backend._forward(q, k, v, mask, sinks, group, *request))
        out, lse = torch.ops.ulysses.attention(
            q, k, v, mask, sinks, group.group_name, group.size(), group.rank(), *request
        )
        return out, lse

    return run_call(
        execute,
        (q, k, v),
        mesh_2d=mesh_2d,
        cp_size=cp_size,
        policy=policy,
        strategy=strategy,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        attn_mask=attn_mask,
        mask_layout=mask_layout,
        sinks=sinks,
        layout=layout,
        kv_layout=kv_layout,
        kv_role=kv_role,
        joint=joint,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        qkv_format=qkv_format,
        ulysses_degree=ulysses_degree,
        outer=outer,
        return_lse=return_lse,
        kernel="auto" if is_function else kernel,
        agreement=agreement,
    )
