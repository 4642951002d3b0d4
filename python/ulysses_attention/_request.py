"""Turns the keywords of the public call into what the C++ core reads. Decides nothing: every rule is in C++."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ulysses_attention import _C
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import UlyssesContextParallelPolicy, option_line
from ulysses_attention.tokens import JoinedCall, JointTokens, MaskLayout, join

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# (q, k, v, attn_mask, sinks, request) -> (out, lse)
Execute = Callable[..., tuple[torch.Tensor, torch.Tensor]]

NO_LENGTHS: tuple[int, ...] = ()

SEQUENCE_DIMS = {name: _C.sequence_dim(name) for name in ("bshd", "bhsd", "sbhd")}  # of qkv_format


class Request(NamedTuple):
    """One call's options in the order in which the op schema and the processors take them."""

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    kv_padded_lengths: tuple[int, ...]
    is_causal: bool
    softmax_scale: float | None
    return_lse: bool
    config: str


def _shown(value: object) -> str:
    """A value in an error text; a tensor by its shape, what takes more than a line by its type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 and text.isprintable() else f"a {type(value).__name__}"


def _check_type(name: str, given: object, wanted: type, fix: str) -> None:
    """Errors: TypeError for anything but None or the wanted type."""
    if given is not None and not isinstance(given, wanted):
        shown = f"{name}={_shown(given)}"
        raise TypeError(f"[ulysses_attention] {shown} is not a {wanted.__name__}. Fix: {name}: {fix}")


def resolve_group(cp_group: ProcessGroup | DeviceMesh | None) -> tuple[ProcessGroup, bool]:
    """The group of a call, and whether it asks for a 2-D mesh. None is the world. Errors: CP063 without any group."""
    if cp_group is None:
        if not dist.is_initialized():
            raise ValueError(
                "[ulysses_attention] cp_group=None is the world, and torch.distributed is not initialised. Fix: "
                "torch.distributed.init_process_group(), or pass cp_group (run_ranks gives one). [CP063]"
            )
        return cast("ProcessGroup", dist.group.WORLD), False
    if isinstance(cp_group, DeviceMesh):
        return cp_group.get_group(cp_group.ndim - 1), cp_group.ndim > 1
    if not isinstance(cp_group, dist.ProcessGroup):
        raise ValueError(
            f"[ulysses_attention] cp_group={_shown(cp_group)} is no process group of which this process is a member. "
            f"Fix: a ProcessGroup, a 1-D DeviceMesh, or None for the world. [CP063]"
        )
    return cp_group, False


def one_group(name: str, group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """The group of a helper that takes one dimension; `name` is the helper's, for the message.

    Errors: CP063 without a group, or for a mesh of several dimensions.
    """
    process_group, several = resolve_group(group)
    if several:
        raise ValueError(
            f"[{name}] a mesh of several dimensions does not say over which. Fix: one of them, mesh['cp'], or all "
            f"ranks as a mesh of one dimension. [CP063]"
        )
    return process_group


def _joint_lines(joined: JoinedCall) -> str:
    if joined.problem:
        return option_line("joint_problem", joined.problem)
    lines = option_line("joint_len", joined.joint_len)
    if joined.position != "prefix":
        lines += option_line("joint_position", joined.position)
    if joined.valid_lens:
        lines += option_line("joint_valid_lens", ",".join(map(str, joined.valid_lens)))
    return lines


def _if_tensor(name: str, given: Any) -> tuple[torch.Tensor | None, str]:
    """A tensor as it is. Anything else as a line that makes the core refuse it, on every rank and not on this alone."""
    if given is None or isinstance(given, torch.Tensor):
        return given, ""
    return None, option_line(name, type(given).__name__)


def to_bshd(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """A view [B, S, H, D] of a tensor in another format, and back: both directions swap the same two dimensions."""
    dim = SEQUENCE_DIMS.get(qkv_format, 1)
    return x if dim == 1 or not isinstance(x, torch.Tensor) or x.dim() != 4 else x.transpose(1, dim)


def run_call(
    execute: Execute,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    joint: JointTokens | None = None,
    qkv_format: str = "bshd",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """One call from the caller's format to the caller's format; `execute` does what lies between."""
    _check_type("joint", joint, JointTokens, "JointTokens(q, k, v) or None")
    q, k, v = (to_bshd(x, qkv_format) for x in tensors)
    joined = None
    if joint is not None:
        text_q, text_k, text_v = (to_bshd(x, qkv_format) for x in (joint.q, joint.k, joint.v))
        text = JointTokens(text_q, text_k, text_v, joint.position, joint.valid_lens)
        joined = join(text, q, k, v, masked=attn_mask is not None)
        q, k, v = joined.q, joined.k, joined.v
    attn_mask, no_mask = _if_tensor("mask_type", attn_mask)
    sinks, no_sinks = _if_tensor("sinks_type", sinks)
    request = make_request(joined=joined, qkv_format=qkv_format, return_lse=return_lse, **options)
    request = request._replace(config=request.config + no_mask + no_sinks)
    out, lse = execute(q, k, v, attn_mask, sinks, request)
    if joined is None:
        out = to_bshd(out, qkv_format)
        return (out, lse) if return_lse else out
    outs = tuple(to_bshd(part, qkv_format) for part in joined.part(out, 1, 0.0))
    return (outs, joined.part(lse, 2, -math.inf)) if return_lse else outs


def make_request(
    *,
    mesh_2d: bool = False,
    cp_size: int | None = None,
    policy: UlyssesContextParallelPolicy | None = None,
    strategy: str = "ulysses",
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window: Any = None,
    softmax_scale: float | None = None,
    mask_layout: MaskLayout | None = None,
    layout: SequenceLayout | None = None,
    kv_layout: SequenceLayout | None = None,
    kv_role: str = "sharded",
    joined: JoinedCall | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    qkv_format: str = "bshd",
    softcap: float | None = None,
    ulysses_degree: int | None = None,
    outer: str = "ring",
    return_lse: bool = False,
    kernel: str | Callable[..., Any] = "auto",
    agreement: str = "auto",
) -> Request:
    """The options that differ from the defaults as "key=value" lines, and the layouts as tuples."""
    _check_type("policy", policy, UlyssesContextParallelPolicy, "UlyssesContextParallelPolicy(pad_multiple=1) or None")
    _check_type("mask_layout", mask_layout, MaskLayout, 'MaskLayout(q="local", kv="global") or None')
    for name, given in (("layout", layout), ("kv_layout", kv_layout)):
        _check_type(name, given, SequenceLayout, "SequenceLayout(16, 2), SequenceLayout.from_lengths([8, 8]) or None")
    config = "" if policy is None else policy.text
    if policy is None and qkv_format in SEQUENCE_DIMS and qkv_format != "bshd":
        config += option_line("policy.output_restore_dim", SEQUENCE_DIMS[qkv_format])
    if joined is not None:
        config += _joint_lines(joined)
    for key, value, default in (
        ("strategy", strategy, "ulysses"),
        ("kernel", f"function {getattr(kernel, '__name__', '')}" if callable(kernel) else kernel, "auto"),
        ("agreement", agreement, "auto"),
        ("qkv_format", qkv_format, "bshd"),
        ("kv_role", kv_role, "sharded"),
        ("causal_alignment", causal_alignment, "top_left"),
        ("outer", outer, "ring"),
        ("softcap", softcap, None),
        ("mask_q", None if mask_layout is None else mask_layout.q, None),
        ("mask_kv", None if mask_layout is None else mask_layout.kv, None),
        ("cp_size", cp_size, None),
        ("cp_rank", None if layout is None else layout.cp_rank, None),
        ("kv_cp_rank", None if kv_layout is None else kv_layout.cp_rank, None),
    ):
        if value != default:
            config += option_line(key, value)
    requested = [
        name
        for name, asked in (
            ("window", window is not None),
            ("packed_sequences", cu_seqlens_q is not None or cu_seqlens_kv is not None),
            ("dropout", dropout_p != 0.0 or dropout_seed is not None),
            ("hybrid_degree", ulysses_degree is not None or mesh_2d),
        )
        if asked
    ]
    if requested:
        config += f"requested={','.join(requested)}\n"
    keys = kv_layout if kv_layout is not None or kv_role == "replicated" else layout
    return Request(
        NO_LENGTHS if layout is None else layout.lengths,
        NO_LENGTHS if layout is None else layout.padded_lengths,
        NO_LENGTHS if keys is None else keys.lengths,
        NO_LENGTHS if keys is None else keys.padded_lengths,
        is_causal,
        softmax_scale,
        return_lse,
        config,
    )
