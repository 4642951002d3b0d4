"""The public call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ulysses_attention import _C
from ulysses_attention._request import make_request, resolve_group
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import UlyssesContextParallelPolicy
from ulysses_attention.processor import KERNEL_BACKEND, CallableProcessor

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
    attn_mask: torch.Tensor | None = None,
    mask_layout: Any = None,
    layout: SequenceLayout | None = None,
    kv_layout: SequenceLayout | None = None,
    kv_role: str = "sharded",
    joint: Any = None,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the whole sequence, of which every rank of the group holds a slice.

    Each rank passes its own tokens and gets the output of its own tokens, as if one process had computed attention over
    all of them. Differentiable; the gradients of the local tokens are complete when backward returns.

    Shapes: q [B, S_local, H, D], k [B, S_local, H_kv, D], v [B, S_local, H_kv, D_v] → out [B, S_local, H, D_v] and,
            with return_lse, lse [B, H, S_local] (natural log, no gradient). H % H_kv == 0; any H, any S.
    Dtype:  any float; lse float32 (float64 for float64). Under autocast q, k and v are cast as torch's attention does.
    Comm:   every rank of the group must call it. strategy="ulysses": two collectives (three if q and k/v are sharded
            differently); "allgather_kv": one; as many in backward. A group of one: none. First call with new options:
            one small collective in which the ranks compare them (agreement="always": every call, and one more in which
            they say how the local attention ended; "off": never).
    layout, kv_layout: which rank holds which tokens; needed for shards of different length and for padded shards.
    kernel: "auto", a registered name, or a function (q, k, v, call) -> out or (out, lse).
    Errors: ValueError, NotImplementedError or RuntimeError whose text ends in an id; docs/errors.md lists them. Options
            that a path cannot honour are refused before any data moves, on every rank.
    Source: DeepSpeed-Ulysses (arXiv 2309.14509); deviation: one message for q, k and v, uneven heads and tokens.
    """
    group, mesh_2d = resolve_group(cp_group)
    name = getattr(policy, "backend_name", KERNEL_BACKEND)  # of a policy; make_request refuses anything else
    backend = None if name == KERNEL_BACKEND else _C.find_backend(name)  # registered from Python or from C++
    is_function = callable(kernel) and name == KERNEL_BACKEND  # other backends attend by their own code: CP031
    request = make_request(
        mesh_2d=mesh_2d,
        cp_size=cp_size,
        policy=policy,
        strategy=strategy,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window=window,
        softmax_scale=softmax_scale,
        attn_mask=attn_mask,
        mask_layout=mask_layout,
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
    if is_function:
        out, lse = CallableProcessor(cast("Callable[..., Any]", kernel))._forward(q, k, v, group, *request)
    elif backend is not None:
        out, lse = backend._forward(q, k, v, group, *request)
    else:
        out, lse = torch.ops.ulysses.attention(q, k, v, group.group_name, group.size(), group.rank(), *request)
    return (out, lse) if return_lse else out
