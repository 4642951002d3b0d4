"""The library of right and wrong backends: its files, small cases, and what is wrong with a backend in a case."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import pathlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

import ulysses_attention as ua
from oracle import Numbers, max_error, oracle_with_grads

TESTS = pathlib.Path(__file__).parent
RIGHT = sorted((TESTS / "right_backends").glob("*.py"))
MUTANTS = sorted(path for path in (TESTS / "mutants").glob("*.py") if not path.stem.endswith("parts"))
_names = (f"loaded_backend_{number}" for number in itertools.count())


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, or two of the same shapes with other numbers."""

    lengths: tuple[int, ...]  # tokens of q per rank
    kv_lengths: tuple[int, ...] | None = None  # None: as lengths
    heads: tuple[int, int] = (2, 2)
    batch: int = 1
    dtype: torch.dtype = torch.float32
    is_causal: bool = False
    causal_alignment: str = "top_left"
    softmax_scale: float | None = None
    return_lse: bool = False
    trains: bool = True
    padded: int = 0  # rows of NaN behind the tokens of each rank, up to this many rows
    q_factor: float = 1.0
    head_major: bool = False  # shards lie as [B, H, S, D] in memory
    calls: int = 1

    @property
    def world(self) -> int:
        return len(self.lengths)

    @property
    def kv_tokens(self) -> tuple[int, ...]:
        return self.kv_lengths or self.lengths

    @property
    def layout(self) -> ua.SequenceLayout | None:
        """As a caller passes it: where shards differ or are padded."""
        if self.padded:
            return ua.SequenceLayout(sum(self.lengths), self.world, ua.UlyssesContextParallelPolicy(pad_multiple=1))
        return ua.SequenceLayout.from_lengths(self.lengths) if len(set(self.lengths)) > 1 else None

    @property
    def kv_layout(self) -> ua.SequenceLayout | None:
        return None if self.kv_lengths is None else ua.SequenceLayout.from_lengths(self.kv_lengths)

    def options(self) -> dict[str, Any]:
        """Those that differ from the default."""
        given = {name: getattr(self, name) for name in _OPTIONS}
        return {name: value for name, value in given.items() if value not in (None, False, "top_left")}


_OPTIONS = ("is_causal", "causal_alignment", "softmax_scale", "layout", "kv_layout", "return_lse")


def load(path: pathlib.Path) -> ModuleType:
    """The module at path, fresh and under a name that says nothing."""
    spec = importlib.util.spec_from_file_location(next(_names), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function_of(module: ModuleType, strategy: str = "ulysses") -> Callable[..., Any]:
    """The module's attention, or its Backend's under a strategy."""
    if hasattr(module, "attention"):
        return module.attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, **options: Any) -> Any:
        return module.Backend().forward(q, k, v, group, strategy=strategy, **options)

    return attention


def takes(function: Callable[..., Any], case: Case) -> bool:
    """Does the signature name every option of the case?"""
    parameters = inspect.signature(function).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return any_name or set(case.options()) <= set(parameters)


def inputs(case: Case, call: int) -> list[torch.Tensor]:
    """q, k, v and the weights of the loss, whole."""
    generator = torch.Generator().manual_seed(1000 * call + sum(case.lengths))
    heads, kv_heads = case.heads
    tokens, kv_tokens = sum(case.lengths), sum(case.kv_tokens)
    shapes = [(tokens, heads, 4), (kv_tokens, kv_heads, 4), (kv_tokens, kv_heads, 6), (tokens, heads, 6)]
    tensors = [torch.randn(case.batch, *shape, generator=generator).to(case.dtype) for shape in shapes]
    return [tensors[0] * case.q_factor, *tensors[1:]]


def _shard(x: torch.Tensor, lengths: Sequence[int], rank: int, case: Case) -> torch.Tensor:
    rows = x.narrow(1, sum(lengths[:rank]), lengths[rank])
    if case.padded:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, case.padded - rows.size(1)), value=torch.nan)
    return rows.transpose(1, 2).contiguous().transpose(1, 2) if case.head_major else rows.contiguous()


def run_case(rank: int, group: Any, function: Callable[..., Any], case: Case) -> list[Numbers]:
    """This rank's out, lse, dq, dk and dv of each call, and q, k and v as the call left them."""
    answers = []
    for call in range(case.calls):
        lengths = (case.lengths, case.kv_tokens, case.kv_tokens, case.lengths)
        *shards, weights = (_shard(x, n, rank, case) for x, n in zip(inputs(case, call), lengths, strict=True))
        leaves = [x.clone().requires_grad_(case.trains) for x in shards]
        result = function(*leaves, group, **case.options())
        out, lse = result if case.return_lse else (result, None)
        numbers = {"out": out.detach()} if lse is None else {"out": out.detach(), "lse": lse.detach()}
        if out.requires_grad and out.shape == weights.shape:
            weights = weights.nan_to_num().to(out.dtype)  # the loss leaves padding rows out
            grads = torch.autograd.grad(out, leaves, weights, allow_unused=True)
            numbers.update({name: x for name, x in zip(("dq", "dk", "dv"), grads, strict=True) if x is not None})
        numbers.update({name: x.detach() for name, x in zip("qkv", leaves, strict=True)})
        answers.append(numbers)
    return answers


@functools.lru_cache(maxsize=256)
def _expected(case: Case, call: int) -> Numbers:
    """The oracle's. Its causal diagonal begins top left: queries in front move the corner to where it is asked for."""
    q, k, v, weights = inputs(case, call)
    shift = sum(case.kv_tokens) - sum(case.lengths) if case.causal_alignment == "bottom_right" else 0
    q, weights = (torch.nn.functional.pad(x, (0, 0, 0, 0, shift, 0)) for x in (q, weights))
    numbers = oracle_with_grads(q, k, v, weights, case.is_causal, case.softmax_scale)
    dims = {"out": 1, "dq": 1, "lse": 2}
    return {name: x.narrow(dims[name], shift, x.size(dims[name]) - shift) if name in dims else x for name, x in
            numbers.items()}  # fmt: skip


def allowed(dtype: torch.dtype, reference: torch.Tensor) -> float:
    """How far a result may lie from float64."""
    relative = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
    return relative * max(1.0, float(reference[reference.isfinite()].abs().max()))


def wrong_numbers(case: Case, ranks: Sequence[Sequence[Numbers]]) -> list[str]:
    """What is wrong with what the ranks got from run_case, each beginning with a tensor's name; [] if nothing is."""
    found = []
    for call in range(case.calls):
        parts = [answers[call] for answers in ranks]
        reference = _expected(case, call)
        for name in ["out", *["lse"] * case.return_lse, *["dq", "dk", "dv"] * case.trains]:
            missing = [rank for rank, part in enumerate(parts) if name not in part]
            if missing:
                found.append(f"{name} is missing on ranks {missing}")
            else:
                found += _wrong_tensor(case, name, [part[name] for part in parts], reference[name])
        for rank, part in enumerate(parts):
            given = zip("qkv", inputs(case, call), (case.lengths, case.kv_tokens, case.kv_tokens), strict=False)
            for name, whole, lengths in given:
                if not torch.equal(part[name].nan_to_num(), _shard(whole, lengths, rank, case).nan_to_num()):
                    found.append(f"{name} was written to on rank {rank}")
    return found


def _wrong_tensor(case: Case, name: str, parts: Sequence[torch.Tensor], reference: torch.Tensor) -> list[str]:
    dim, lengths = (2 if name == "lse" else 1), (case.kv_tokens if name in ("dk", "dv") else case.lengths)
    rows = [max(n, case.padded) for n in lengths]
    shapes = [(*reference.shape[:dim], n, *reference.shape[dim + 1 :]) for n in rows]
    if [tuple(part.shape) for part in parts] != shapes:
        return [f"{name} has shapes {[tuple(part.shape) for part in parts]}, not {shapes}"]
    dtype = case.dtype if name != "lse" or case.dtype == torch.float64 else torch.float32
    whole = torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)
    error, limit = max_error(whole, reference), allowed(dtype, reference)
    found = [] if error <= limit else [f"{name} is off by {error:.1e}, allowed {limit:.1e}"]
    found += [] if all(part.dtype == dtype for part in parts) else [f"{name} is {[part.dtype for part in parts]}"]
    behind = [part.narrow(dim, n, part.size(dim) - n) for part, n in zip(parts, lengths, strict=True)]
    blank = -torch.inf if name == "lse" else 0.0
    return found + [f"{name} is not {blank} behind the tokens" for part in behind if bool((part != blank).any())]


def problems(function: Callable[..., Any], case: Case, timeout_s: float = 20.0) -> list[str]:
    """What is wrong with a backend on thread ranks in one case: its numbers, or what it raised."""
    try:
        ranks = ua.run_ranks(lambda rank, group: run_case(rank, group, function, case), case.world, timeout_s=timeout_s)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return wrong_numbers(case, ranks)
