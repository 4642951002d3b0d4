"""A call with masks, text, sinks and the rest as data: its inputs, a run on one rank, and the numbers it must give."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

import ulysses_attention as ua
from cells import UNEVEN, with_nan_behind
from oracle import Numbers, joined, max_error, one_thread, plain, tolerance

DIMS = {"bshd": 1, "bhsd": 2, "sbhd": 0}  # of the sequence, by qkv_format
PARTIAL = ("dmask", "dsinks")  # summed over the ranks; the gradients of text and of replicated keys too


@dataclasses.dataclass(frozen=True)
class FullCall:
    """The mathematics first, then how it is spread over ranks, which must not change a number."""

    seq_len: int
    heads: tuple[int, int] = (4, 2)  # H, H_kv
    batch: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    kv_len: int | None = None  # None: seq_len
    is_causal: bool = False
    mask: str = ""  # a key of MASKS
    text_len: int = 0
    position: str = "prefix"
    valid_lens: tuple[int, ...] | None = None
    sinks: bool = False
    softcap: float | None = None
    softmax_scale: float | None = None
    dtype: torch.dtype = torch.float32
    lse_grad: bool = False  # the loss weighs lse, too
    strategy: str = "ulysses"
    lengths: tuple[int, ...] | None = None  # tokens per rank; None: spread evenly
    padded: bool = False  # rows of NaN behind the tokens
    mask_cut: tuple[str, str] = ("global", "global")  # which axes of the mask a rank gets its own part of
    replicated: bool = False  # k and v are whole on every rank
    qkv_format: str = "bshd"
    kernel: Any = "auto"
    return_lse: bool = True
    trains: tuple[str, ...] = ()  # the tensors that ask for a gradient, by name; (): all that can have one

    @property
    def keys(self) -> int:
        return self.seq_len if self.kv_len is None else self.kv_len

    def layouts(self, world: int) -> tuple[ua.SequenceLayout, ua.SequenceLayout]:
        def one(seq_len: int) -> ua.SequenceLayout:
            if self.lengths is not None and seq_len == self.seq_len:
                return ua.SequenceLayout.from_lengths(self.lengths)
            return ua.SequenceLayout(seq_len, world, None if self.padded else UNEVEN)

        return one(self.seq_len), one(self.keys)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _some(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """About two of three are seen."""
    return torch.rand(shape, generator=generator) < 0.67


def _keys(call: FullCall, g: torch.Generator, q: int, kv: int) -> torch.Tensor:
    return torch.arange(kv) < torch.tensor([kv - 2 * b for b in range(call.batch)]).view(-1, 1)


def _rows(call: FullCall, g: torch.Generator, q: int, kv: int) -> torch.Tensor:
    seen = _some(g, 1, 1, q, kv)
    seen[..., 1, :] = False  # a query that sees nothing
    return seen


def _full(call: FullCall, g: torch.Generator, q: int, kv: int) -> torch.Tensor:
    seen = _some(g, call.batch, call.heads[0], q, kv)
    seen[-1, -1] = False  # a head that sees nothing
    return seen


def _hidden_keys(call: FullCall, g: torch.Generator, q: int, kv: int) -> torch.Tensor:
    return torch.zeros(call.batch, 1, 1, kv).masked_fill(~_some(g, call.batch, 1, 1, kv), -math.inf)


MASKS = {
    "keys": _keys,
    "keys of all": lambda call, g, q, kv: _keys(call, g, q, kv)[-1:],
    "keys, 4-D": lambda call, g, q, kv: _keys(call, g, q, kv)[:, None, None],
    "heads": lambda call, g, q, kv: _some(g, 1, call.heads[0], 1, kv),
    "rows": _rows,
    "full": _full,
    "hidden keys": _hidden_keys,
    "bias of keys": lambda call, g, q, kv: torch.randn(call.batch, kv, generator=g),
    "bias of heads": lambda call, g, q, kv: torch.randn(1, call.heads[0], 1, kv, generator=g),
    "bias": lambda call, g, q, kv: torch.randn(1, call.heads[0], q, kv, generator=g),
    "bias of all": lambda call, g, q, kv: torch.randn(1, 1, 1, kv, generator=g),
}
GRADIENT = " with gradient"  # behind the name of a mask that is added


def inputs(call: FullCall) -> Numbers:
    """The whole tensors by name; the same on every rank and in every process."""
    return dict(_inputs(_mathematics(call)))


def _mathematics(call: FullCall) -> FullCall:
    return dataclasses.replace(
        call, strategy="", lengths=None, padded=False, mask_cut=("", ""), qkv_format="", kernel="", return_lse=True,
        kv_len=call.keys, replicated=False, trains=(),
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _inputs(call: FullCall) -> tuple[tuple[str, torch.Tensor], ...]:
    g = torch.Generator().manual_seed(1000 * call.seq_len + 10 * call.heads[0] + call.text_len)
    (heads, kv_heads), batch, text = call.heads, call.batch, call.text_len
    shapes = {
        "q": (batch, call.seq_len, heads, call.head_dim),
        "k": (batch, call.keys, kv_heads, call.head_dim),
        "v": (batch, call.keys, kv_heads, call.v_head_dim),
        "joint_q": (batch, text, heads, call.head_dim),
        "joint_k": (batch, text, kv_heads, call.head_dim),
        "joint_v": (batch, text, kv_heads, call.v_head_dim),
        "w_out": (batch, call.seq_len, heads, call.v_head_dim),
        "w_joint_out": (batch, text, heads, call.v_head_dim),
    }
    tensors = {name: torch.randn(shape, generator=g).to(call.dtype) for name, shape in shapes.items()}
    scores = torch.float64 if call.dtype == torch.float64 else torch.float32
    tensors["w_lse"] = torch.randn(batch, heads, call.seq_len, generator=g).to(scores)
    tensors["w_joint_lse"] = torch.randn(batch, heads, text, generator=g).to(scores)
    if call.sinks:
        tensors["sinks"] = torch.randn(heads, generator=g).to(scores)
    if call.mask:
        mask = MASKS[call.mask.removesuffix(GRADIENT)](call, g, call.seq_len + text, call.keys + text)
        tensors["mask"] = mask if mask.dtype == torch.bool else mask.to(call.dtype)
    return tuple(tensors.items())


# --- expected values --------------------------------------------------------------------------------------------------


def _seen(call: FullCall, mask: torch.Tensor | None) -> torch.Tensor:
    """[B|1, H|1, Sq, Skv] of the joined sequence."""
    text, q, kv = call.text_len, call.seq_len + call.text_len, call.keys + call.text_len
    seen = torch.ones(1, 1, q, kv, dtype=torch.bool)
    if call.is_causal:
        seen = seen.tril()
    if call.valid_lens is not None:
        begin = 0 if call.position == "prefix" else call.keys
        place = torch.arange(kv).expand(call.batch, kv) - begin
        behind = (place >= torch.tensor(call.valid_lens).view(-1, 1)) & (place < text)
        seen = seen & ~behind[:, None, None]
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -math.inf)
    return seen


def _attend(call: FullCall, x: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the joined sequence in float64, differentiable."""
    q, k, v = (joined(x["joint_" + name], x[name], call.position) for name in "qkv")
    mask = x.get("mask")
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]
    is_added = mask is not None and mask.dtype != torch.bool
    return plain(
        q,
        k,
        v,
        seen=_seen(call, mask),
        added=mask.masked_fill(mask == -math.inf, 0.0) if mask is not None and is_added else None,
        sinks=x["sinks"] if call.sinks else None,
        softcap=call.softcap,
        softmax_scale=call.softmax_scale,
    )


def _hide_text_rows(call: FullCall, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if call.valid_lens is None:
        return out, lse
    behind = torch.arange(call.text_len) >= torch.tensor(call.valid_lens).view(-1, 1)
    return out.masked_fill(behind[:, :, None, None], 0.0), lse.masked_fill(behind[:, None], -math.inf)


@functools.lru_cache(maxsize=512)
@one_thread()
def _expected(call: FullCall, world: int) -> Numbers:
    x = {name: y if y.dtype == torch.bool else y.double() for name, y in inputs(call).items()}
    names = ["q", "k", "v", *(("joint_q", "joint_k", "joint_v") if call.text_len else ())]
    names += ["mask"] * call.mask.endswith(GRADIENT) + ["sinks"] * call.sinks
    leaves = [x[name].requires_grad_() for name in names]
    text = call.text_len
    sizes = [text, call.seq_len] if call.position == "prefix" else [call.seq_len, text]
    order = slice(None, None, 1 if call.position == "prefix" else -1)
    out, lse = _attend(call, x)
    (joint_out, out), (joint_lse, lse) = out.split(sizes, 1)[order], lse.split(sizes, 2)[order]
    joint_out, joint_lse = _hide_text_rows(call, joint_out, joint_lse)
    outputs = {"out": out, "lse": lse, "joint_out": joint_out, "joint_lse": joint_lse}
    if not text:
        outputs = {"out": out, "lse": lse}
    weighed = [name for name in outputs if call.lse_grad or "lse" not in name]
    # Rank r weighs the text (r + 1)-fold, so that no rank's part of it may be lost or counted for another's.
    fold = {name: world * (world + 1) / 2 if "joint" in name else 1.0 for name in weighed}
    grads = torch.autograd.grad(
        [outputs[name] for name in weighed], leaves, [fold[name] * x["w_" + name] for name in weighed]
    )
    numbers = {name: y.detach() for name, y in outputs.items()}
    return numbers | dict(zip(map(_gradient, names), grads, strict=True))


def _gradient(name: str) -> str:
    return f"joint_d{name[-1]}" if name.startswith("joint_") else f"d{name}"


def expected(call: FullCall, world: int) -> Numbers:
    return _expected(_mathematics(call), world)


# --- one rank ---------------------------------------------------------------------------------------------------------


def _to_format(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    return x.transpose(1, DIMS[qkv_format]).contiguous()


def _mask_of_rank(call: FullCall, mask: torch.Tensor, layouts: Sequence[ua.SequenceLayout], rank: int) -> torch.Tensor:
    """Its own part of the axes that are cut. Padding holds what would show: NaN, or visible."""
    whole = mask
    for dim, cut, layout in ((2, call.mask_cut[0], layouts[0]), (mask.dim() - 1, call.mask_cut[1], layouts[1])):
        one_row = dim == 2 and (whole.dim() == 2 or whole.size(2) == 1)
        if cut != "local" or one_row:
            continue
        begin, real = sum(layout.lengths[:rank]), layout.lengths[rank]
        part = mask.narrow(dim, begin, real)
        sizes = list(part.shape)
        sizes[dim] = layout.padded_lengths[rank] - real
        mask = torch.cat([part, part.new_full(sizes, True if part.dtype == torch.bool else math.nan)], dim)
    return mask


def options_of(call: FullCall, world: int, rank: int, x: Numbers) -> dict[str, Any]:
    """The keywords of ulysses_attention besides q, k, v and the joint tokens."""
    layouts = call.layouts(world)
    options: dict[str, Any] = {
        "layout": layouts[0],
        "strategy": call.strategy,
        "is_causal": call.is_causal,
        "softcap": call.softcap,
        "softmax_scale": call.softmax_scale,
        "kernel": call.kernel,
        "qkv_format": call.qkv_format,
        "return_lse": call.return_lse,
    }
    if call.replicated:
        options["kv_role"] = "replicated"
    elif layouts[0] != layouts[1]:
        options["kv_layout"] = layouts[1]
    if call.mask:
        options["attn_mask"] = x["mask"]
        whole = inputs(call)["mask"]
        q = "broadcast" if whole.dim() == 2 or whole.size(2) == 1 else call.mask_cut[0]
        options["mask_layout"] = ua.MaskLayout(q=q, kv=call.mask_cut[1])  # type: ignore[arg-type]
    if call.sinks:
        options["sinks"] = x["sinks"]
    return options


def leaves_of(call: FullCall, world: int, rank: int) -> Numbers:
    """What this rank passes, each tensor a leaf that asks for a gradient if it can have one, or `trains` names it."""
    layouts, x = call.layouts(world), inputs(call)

    def wanted(name: str) -> bool:
        return not call.trains or name in call.trains

    mine = {}
    for name in ("q", "k", "v", "joint_q", "joint_k", "joint_v"):
        y = x[name]
        if name in "qkv" and not (call.replicated and name in "kv"):
            layout = layouts[0 if name == "q" else 1]
            y = with_nan_behind(layout.shard(y, rank), layout.lengths[rank])
        mine[name] = _to_format(y, call.qkv_format).detach().clone().requires_grad_(wanted(name))
    if call.mask:
        mask = _mask_of_rank(call, x["mask"], layouts, rank).clone()
        mine["mask"] = mask.requires_grad_(call.mask.endswith(GRADIENT) and wanted("mask"))
    if call.sinks:
        mine["sinks"] = x["sinks"].clone().requires_grad_(wanted("sinks"))
    return mine


def run_full(rank: int, group: Any, call: FullCall) -> Numbers:
    """This rank's numbers, in [B, S, H, D] whatever the format."""
    world = group.size()
    x, mine = inputs(call), leaves_of(call, world, rank)
    options = options_of(call, world, rank, mine)
    if call.text_len:
        text = (mine[name] for name in ("joint_q", "joint_k", "joint_v"))
        options["joint"] = ua.JointTokens(*text, position=call.position, valid_lens=call.valid_lens)  # type: ignore
    result = ua.ulysses_attention(mine["q"], mine["k"], mine["v"], group, **options)
    outs, lses = result if call.return_lse else (result, None)
    outs, lses = (y if call.text_len else (y,) for y in (outs, lses))
    outputs = dict(zip(("out", "joint_out"), outs, strict=False))
    if call.return_lse:
        outputs |= dict(zip(("lse", "joint_lse"), lses, strict=False))

    layout = call.layouts(world)[0]
    weights = {
        "out": _to_format(layout.shard(x["w_out"], rank), call.qkv_format),
        "lse": layout.shard(x["w_lse"], rank, dim=2),
        "joint_out": (rank + 1) * _to_format(x["w_joint_out"], call.qkv_format),
        "joint_lse": (rank + 1) * x["w_joint_lse"],
    }
    weighed = [name for name in outputs if call.lse_grad or "lse" not in name]
    leaves = [name for name in mine if mine[name].requires_grad and (call.text_len or "joint" not in name)]
    grads = torch.autograd.grad(
        [outputs[name] for name in weighed], [mine[name] for name in leaves], [weights[name] for name in weighed]
    )
    numbers = {name: y.detach() for name, y in outputs.items()} | dict(zip(map(_gradient, leaves), grads, strict=True))
    back = {name: y.transpose(1, DIMS[call.qkv_format]) if y.dim() == 4 else y for name, y in numbers.items()}
    return back | ({"dmask": numbers["dmask"]} if "dmask" in numbers else {})


def run_fulls(rank: int, group: Any, calls: Sequence[FullCall]) -> list[Numbers]:
    return [run_full(rank, group, call) for call in calls]


# --- judgement --------------------------------------------------------------------------------------------------------


def together(call: FullCall, ranks: Sequence[Numbers]) -> Numbers:
    """The numbers of all ranks: rows joined, what is equal everywhere once, what is partial summed."""
    q_layout, kv_layout = call.layouts(len(ranks))
    numbers = {}
    for name in ranks[0]:
        parts = [part[name] for part in ranks]
        if name in ("joint_out", "joint_lse"):
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} has other bits on another rank, {call}"
            numbers[name] = parts[0]
        elif name.startswith("joint_") or name in PARTIAL or (call.replicated and name in ("dk", "dv")):
            numbers[name] = torch.stack(parts).double().sum(0)
        else:
            layout, dim = (kv_layout if name in ("dk", "dv") else q_layout), (2 if name == "lse" else 1)
            rows = zip(parts, layout.lengths, layout.padded_lengths, strict=True)
            for part, real, padded in rows:
                behind = part.narrow(dim, real, padded - real)
                assert part.size(dim) == padded, f"{name} has {part.size(dim)} rows, {call}"
                assert bool((behind == (-math.inf if name == "lse" else 0.0)).all()), f"{name} in padding rows, {call}"
            real_rows = [part.narrow(dim, 0, n) for part, n in zip(parts, layout.lengths, strict=True)]
            numbers[name] = torch.cat(real_rows, dim)
    return numbers


def problems(call: FullCall, ranks: Sequence[Numbers]) -> list[str]:
    reference = expected(call, len(ranks))
    got = together(call, ranks)
    names = {name for name in reference if call.return_lse or "lse" not in name}
    if call.trains:
        names = {name for name in names if "out" in name or "lse" in name} | set(map(_gradient, call.trains))
    assert set(got) == names, (sorted(got), sorted(names))
    found = []
    for name, y in got.items():
        error, allowed = max_error(y, reference[name]), tolerance(call.dtype, reference[name])
        if not error <= allowed:
            found.append(f"{name} is off by {error:.2e}, allowed {allowed:.2e}")
    return found


def assert_full(calls: Sequence[FullCall], ranks: Sequence[Sequence[Numbers]]) -> None:
    """ranks[r][i] is what run_fulls gave on rank r for call i; names every call that is wrong."""
    wrong = []
    for index, call in enumerate(calls):
        found = problems(call, [part[index] for part in ranks])
        if found:
            wrong.append(f"{len(ranks)} ranks, {call}: " + "; ".join(found))
    assert not wrong, "\n".join(wrong)


def check_on_threads(world: int, calls: Sequence[FullCall]) -> None:
    assert_full(calls, ua.run_ranks(lambda rank, group: run_fulls(rank, group, calls), world))
