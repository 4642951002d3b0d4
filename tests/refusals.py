"""Calls that must be refused: on every rank, with the right exception, id and values, and a printed fix that works."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

from ulysses_attention import MaskLayout, UlyssesContextParallelPolicy, run_ranks, ulysses_attention

POLICY_FIELDS = [field.name for field in dataclasses.fields(UlyssesContextParallelPolicy)]
CALL_ARGUMENTS = list(inspect.signature(ulysses_attention).parameters)
Arguments = dict[str, Any]


def arguments(
    rows: int = 8, heads: int = 4, kv_heads: int | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Arguments:
    """The keywords of a legal call on one rank, changed by `options`: tensors, arguments and fields of the policy."""
    kv_heads = heads if kv_heads is None else kv_heads
    call: Arguments = {
        "q": torch.randn(1, rows, heads, 8).to(dtype),
        "k": torch.randn(1, rows, kv_heads, 8).to(dtype),
        "v": torch.randn(1, rows, kv_heads, 8).to(dtype),
    }
    return change(call, **options)


def change(call: Arguments, **options: Any) -> Arguments:
    """The call with arguments replaced; a policy field changes the call's policy; a function gets the old value."""
    call = dict(call)
    for name, value in options.items():
        if name in POLICY_FIELDS:
            policy = call.get("policy") or UlyssesContextParallelPolicy()
            call["policy"] = policy.replace(**{name: value})
        elif name in ("q", "k", "v") and callable(value):
            call[name] = value(call[name])
        else:
            call[name] = value
    return call


def outcomes(world: int, call_of: Callable[[int], Arguments]) -> list[Any]:
    """What each thread rank got from ulysses_attention(**call_of(rank)): the exception, or the output."""

    def on_rank(rank: int, group: Any) -> Any:
        try:
            return ulysses_attention(cp_group=group, **call_of(rank))
        except Exception as error:
            return error

    return run_ranks(on_rank, world, timeout_s=10.0)


def assert_refused(results: list[Any], exception: type[Exception], error_id: str, *values: str) -> str:
    """Every rank raised this exception; its text ends in the id and holds the values. Returns rank 0's text."""
    for rank, error in enumerate(results):
        assert type(error) is exception, (rank, type(error), str(error)[:400])
        assert_text(str(error), error_id, *values)
    return str(results[0])


def assert_text(text: str, error_id: str, *values: str) -> None:
    """The message names its op first and its id last, has a fix, and holds the values."""
    lines = [line for line in text.splitlines() if line.endswith(f"[{error_id}]")]
    assert lines, text
    assert lines[0].startswith("[") and "Fix: " in lines[0], text
    for value in values:
        assert value in text, (value, text)


def printed_fix(text: str, error_id: str) -> str:
    """The text between "Fix: " and the id, on the line of that id."""
    line = next(line for line in text.splitlines() if line.endswith(f"[{error_id}]"))
    return line.rsplit("Fix: ", 1)[1].rsplit(" [", 1)[0]


def repairs(text: str, error_id: str) -> list[Arguments]:
    """The alternatives of a printed fix that are arguments with values, e.g. [{"cp_size": 2}, {"cp_size": None}].

    Operations on tensors, such as `k.to("cpu")`, belong together and make one repair.
    """
    fix = printed_fix(text, error_id)
    found: list[Arguments] = []
    for alternative in re.split(r",? or ", fix):
        values = re.findall(r'(?<![\w.])(\w+)=("[^"]*"|\([^)]*\)|None|True|False|-?[\d.]+(?<!\.))', alternative)
        if "MaskLayout(" in alternative:
            fields = dict(re.findall(r'\b(q|kv)="(\w+)"', alternative))
            found.append({"mask_layout": MaskLayout(**fields)})
            continue
        known = {name: ast.literal_eval(value) for name, value in values if name in CALL_ARGUMENTS + POLICY_FIELDS}
        if known:
            found.append(known)
    tensor_steps = re.findall(r"\b([qkv])(\.(?:to|unsqueeze)\([^)]*\))", fix)
    if tensor_steps:
        found.append({name: eval("lambda x: x" + step, {"torch": torch}) for name, step in tensor_steps})
    return found


def assert_fixes_work(
    world: int, call_of: Callable[[int], Arguments], text: str, error_id: str, at_least: int = 1
) -> None:
    """Every printed repair, applied alone to the refused call, gives an output on every rank."""
    found = repairs(text, error_id)
    assert len(found) >= at_least, (text, found)
    for repair in found:
        assert_accepted(outcomes(world, lambda rank, repair=repair: change(call_of(rank), **repair)), repair)


def assert_accepted(results: list[Any], what: Any = "") -> None:
    """Every rank got finite numbers."""
    for rank, result in enumerate(results):
        assert not isinstance(result, Exception), (what, rank, str(result))
        out = result[0] if isinstance(result, tuple) else result
        assert out.isfinite().all(), (what, rank)
