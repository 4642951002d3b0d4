"""The seam in diffusers: an attention processor with the same code, whose attention function is another one.

Nothing in diffusers is changed. A processor's `__call__` finds `dispatch_attention_fn` (or torch's own
`F.scaled_dot_product_attention`) among the globals of its file. Its code object runs again here over a copy of those
globals in which these names mean ours, so that projections, norms and rotary embeddings stay those of the installed
version, and every later choice of a backend is followed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F

__all__ = ["NATIVE", "Call", "Options", "Rebound", "has_seam", "rebind"]

NATIVE = "native"  # diffusers' name for torch's attention

#: (query, key, value, attn_mask, options, original) -> out; all [B, S, H, D]
Call = Callable[..., Any]

DISPATCH, FUNCTIONAL, SDPA = "dispatch_attention_fn", "F", "scaled_dot_product_attention"
_count = itertools.count()


class Options(NamedTuple):
    """What a processor asks of its attention."""

    dropout_p: float
    is_causal: bool
    softmax_scale: float | None
    attention_kwargs: Any
    backend: str


class Rebound:
    """The code of a processor over globals of our own; forget() takes them out of sys.modules.

    methods: __call__ and every other function of the class and its bases that stands in the same file.
    """

    def __init__(self, methods: dict[str, types.FunctionType], modules: list[str]) -> None:
        self.methods = methods
        self._modules = modules

    def forget(self) -> None:
        for name in self._modules:
            sys.modules.pop(name, None)


def has_seam(processor: object) -> bool:
    """Whether a processor's attention can be exchanged: its own code calls one of the two functions."""
    call = _call_of(processor)
    if call is None:
        return False
    names = _names_reached(call, _methods(processor, call))
    return (DISPATCH in call.__globals__ and DISPATCH in names) or (FUNCTIONAL in call.__globals__ and SDPA in names)


def _call_of(processor: object) -> types.FunctionType | None:
    call = getattr(type(processor), "__call__", None)  # noqa: B004  (its function, not whether it is callable)
    return call if isinstance(call, types.FunctionType) else None


def _methods(processor: object, call: types.FunctionType) -> dict[str, types.FunctionType]:
    """The functions of a processor's class that stand in the file of its __call__."""
    members = [(name, inspect.getattr_static(type(processor), name)) for name in dir(type(processor))]
    plain = {name: member for name, member in members if isinstance(member, types.FunctionType)}
    return {name: member for name, member in plain.items() if member.__globals__ is call.__globals__}


def _names_reached(call: types.FunctionType, methods: dict[str, types.FunctionType]) -> set[str]:
    """The names that a function uses, and the functions of its file that it calls."""
    reached: set[str] = set()
    codes: list[types.CodeType] = [call.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in set(code.co_names) - reached:
            reached.add(name)
            helpers = (call.__globals__.get(name), methods.get(name))
            codes += [
                helper.__code__
                for helper in helpers
                if isinstance(helper, types.FunctionType) and helper.__globals__ is call.__globals__
            ]
    return reached


def _new_module(name: str, values: dict[str, Any]) -> types.ModuleType:
    """A module that sys.modules knows: Dynamo looks up a function's globals by their __name__."""
    module = types.ModuleType(name)
    module.__dict__.update({key: value for key, value in values.items() if key != "__name__"})
    sys.modules[name] = module
    return module


def _over(function: types.FunctionType, values: dict[str, Any]) -> types.FunctionType:
    """The same code over other globals."""
    copy = types.FunctionType(function.__code__, values, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy


def _active(chosen: Any) -> str:
    """The name of the backend that diffusers would take now."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    backend = _AttentionBackendRegistry.get_active_backend()[0] if chosen is None else chosen
    return str(getattr(backend, "value", backend))


def _dispatch(original: Call, attend: Call) -> Call:
    def dispatch_attention_fn(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: Any = None,
        *,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Any:
        def local(q: Any, k: Any, v: Any, mask: Any, softmax_scale: float | None) -> Any:
            gqa = enable_gqa or q.shape[2] != k.shape[2]
            return original(q, k, v, mask, dropout_p, is_causal, softmax_scale, gqa, attention_kwargs, backend=backend)

        options = Options(dropout_p, is_causal, scale, attention_kwargs, _active(backend))
        return attend(query, key, value, attn_mask, options, local)

    return dispatch_attention_fn


def _scaled_dot_product_attention(attend: Call) -> Call:
    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        def local(q: Any, k: Any, v: Any, mask: Any, softmax_scale: float | None) -> Any:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            gqa = enable_gqa or q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal, scale=softmax_scale, enable_gqa=gqa
            )
            return out.transpose(1, 2)

        options = Options(dropout_p, is_causal, scale, None, NATIVE)
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return attend(q, k, v, attn_mask, options, local).transpose(1, 2)

    return scaled_dot_product_attention


def rebind(processor: object, attend: Call) -> Rebound:
    """The code of a processor, with attend(query, key, value, attn_mask, options, local) for its attention.

    local(q, k, v, mask, softmax_scale) is the attention that the processor would have called, the active backend of
    that moment, without any parallelism.
    """
    call = _call_of(processor)
    if call is None:
        raise TypeError(f"[rebind] {type(processor).__name__} has no Python code to rebind")
    name = f"ulysses_attention.diffusers.rebound_{next(_count)}"
    module, names = _new_module(name, call.__globals__), [name]
    values = module.__dict__
    for key, value in list(values.items()):  # helpers of the same file that attend, too
        if isinstance(value, types.FunctionType) and value.__globals__ is call.__globals__:
            values[key] = _over(value, values)
    if DISPATCH in values:
        values[DISPATCH] = _dispatch(call.__globals__[DISPATCH], attend)
    if FUNCTIONAL in values:
        functional = _new_module(f"{name}_functional", F.__dict__)
        functional.__dict__[SDPA] = _scaled_dot_product_attention(attend)
        values[FUNCTIONAL] = functional
        names.append(functional.__name__)
    methods = {name: _over(method, values) for name, method in _methods(processor, call).items()}
    return Rebound(methods, names)
