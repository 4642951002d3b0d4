"""What the doctor can examine, by name: turns it into one function that a rank calls."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ulysses_attention import _C
from ulysses_attention._request import SEQUENCE_DIMS
from ulysses_attention.attention import ulysses_attention
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import UlyssesContextParallelPolicy
from ulysses_attention.processor import UlyssesAttentionProcessor, backends, register_backend, unregister_backend
from ulysses_attention.tokens import JointTokens, MaskLayout

__all__ = ["Target", "TargetError", "as_target", "check_target", "strategies_of"]

#: (q, k, v, group, call) → out or (out, lse): what a rank calls, whatever the target is. With joint tokens out and lse
#: are pairs: (of the sequence, of the joint tokens).
Target = Callable[..., Any]

PEER = "peer:"
#: What torch.distributed's functions say to a rank that is a thread.
_NEEDS_PROCESSES = ("process group has not been initialized", "not initialized in the world group map")
_numbers = itertools.count()


class TargetError(ValueError):
    """There is no such target. The text says what would be one."""


def layouts_of(case: Any) -> dict[str, SequenceLayout]:
    """layout and kv_layout of a case, where shards are not all equal or the order is not the usual one."""
    lengths, padded, kv_lengths = list(case.lengths), list(case.padded_lengths), list(case.kv_lengths)
    if case.order != "contiguous":
        return {"layout": SequenceLayout(sum(lengths), case.cp_size, order=case.order)}
    if case.has_even_shards:
        return {}
    layout = SequenceLayout.from_lengths(lengths) if lengths == padded else SequenceLayout(sum(lengths), case.cp_size)
    layouts = {"layout": layout}
    if kv_lengths != lengths and not case.replicated_kv:
        layouts["kv_layout"] = SequenceLayout.from_lengths(kv_lengths)
    return layouts


def keywords_of(call: Any) -> dict[str, Any]:
    """The keywords that a call asks a function for, as plain values: only those that differ from the default."""
    case = call.case
    ends = torch.arange(case.num_documents + 1, dtype=torch.int32) * (sum(case.lengths) // case.num_documents)
    q_axis, kv_axis, _ = case.mask_words
    asked = {
        "strategy": (case.strategy, case.strategy != ""),
        "is_causal": (True, case.is_causal),
        "causal_alignment": ("bottom_right", case.bottom_right),
        "softmax_scale": (case.softmax_scale, case.softmax_scale != 0),
        "softcap": (case.softcap, case.softcap != 0),
        "sinks": (call.sinks, case.sinks),
        "return_lse": (True, case.return_lse),
        "window": ((case.window, 0), case.window != 0),
        "attn_mask": (call.mask, case.mask != ""),
        "mask_layout": ((q_axis, kv_axis), case.local_axis != ""),
        "joint": (tuple(call.text), case.text_len != 0),
        "joint_position": ("suffix", case.text_suffix),
        "joint_valid_lens": (tuple(case.text_lens), len(case.text_lens) > 0),
        "cu_seqlens_q": (ends, case.num_documents != 1),
        "cu_seqlens_kv": (ends, case.num_documents != 1),
        "dropout_p": (case.dropout_p, case.dropout_p != 0),
        "kv_role": ("replicated", case.replicated_kv),
        "qkv_format": (case.qkv_format, case.qkv_format != "bshd"),
        "ulysses_degree": (case.ulysses_degree, case.ulysses_degree != 0),
    }
    return {name: value for name, (value, is_asked) in asked.items() if is_asked} | layouts_of(case)


def operation_keywords(call: Any) -> dict[str, Any]:
    """The same for ulysses_attention, which takes joint tokens and the meaning of a mask's axes as objects. It is told
    the axes only where their sizes leave it a choice."""
    case, keywords = call.case, keywords_of(call)
    for name in ("mask_layout", "joint_position", "joint_valid_lens"):
        keywords.pop(name, None)
    q_axis, kv_axis, ambiguous = case.mask_words
    if ambiguous:
        keywords["mask_layout"] = MaskLayout(q_axis, kv_axis)
    if case.text_len != 0:
        q, k, v = call.text
        position: Any = "suffix" if case.text_suffix else "prefix"
        keywords["joint"] = JointTokens(q, k, v, position, list(case.text_lens) or None)
    return keywords


def _through_operation(backend_name: str) -> Target:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, call: Any) -> Any:
        dim = SEQUENCE_DIMS[call.case.qkv_format]
        policy = UlyssesContextParallelPolicy(backend_name=backend_name, output_restore_dim=dim)
        return ulysses_attention(q, k, v, group, policy=policy, agreement="always", **operation_keywords(call))

    return attend


def _through_function(function: Callable[..., Any]) -> Target:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    name = getattr(function, "__name__", "the function")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, call: Any) -> Any:
        case = call.case
        if case.order != "contiguous":
            raise NotImplementedError(
                f"not asked of {name}(): the doctor has no layout of order={case.order!r} to hand over, because "
                f"SequenceLayout does not make one yet. [CP049]"
            )
        keywords = keywords_of(call)
        if case.lengths == case.padded_lengths and not takes_all:
            # Shapes say everything that these layouts say: a function may do without.
            without = {"layout"} - set(parameters)
            if without and "kv_layout" not in parameters:
                without = {"layout", "kv_layout"}
            keywords = {n: x for n, x in keywords.items() if n not in without}
        missing = [n for n in keywords if n not in parameters and not takes_all]
        if missing:
            raise NotImplementedError(f"{name}() has no argument {', '.join(missing)}")
        try:
            return function(q, k, v, group, **keywords)
        except (ValueError, RuntimeError) as error:
            if dist.is_initialized() or not any(words in str(error) for words in _NEEDS_PROCESSES):
                raise
            raise RuntimeError(
                f"{error} The target calls torch.distributed's functions, which look groups up per process, and "
                f"these ranks are threads. Fix: --transport gloo, or shm"
            ) from error

    return attend


def _load_module(where: str) -> ModuleType:
    """The module of a name or a file. Errors: TargetError, whatever it raises."""
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise TargetError(f"no file {where}. Fix: PATH.py:NAME of a file that exists")
    try:
        if is_file:
            return _load_file(Path(where).resolve())
        if "" not in sys.path:
            sys.path.insert(0, "")  # a module of the user's own folder
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise TargetError(f"{where} needs {error.name}, which is not installed ({error})") from error
        raise TargetError(
            f"no module {where!r} ({error}). Fix: run in the folder that holds it, or name the file: {where}.py:NAME"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may also end by sys.exit
        raise TargetError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.modules[name] = module  # so that its classes can be pickled
    sys.path.insert(0, folder)  # for the files beside it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file named like an installed module stands in nobody's way
    return module


def _module_name(path: Path) -> str:
    """The file's stem, as the files beside it import it; the whole path where the stem means another module."""
    stem = path.stem
    own_name = re.sub(r"\W", "_", str(path.with_suffix("")))
    if stem in sys.modules:
        return stem if getattr(sys.modules[stem], "__file__", None) == str(path) else own_name
    found = importlib.util.find_spec(stem) if stem.isidentifier() else None
    return own_name if found is not None and found.origin != str(path) else stem


def _find(name: str) -> Any:
    """The class or function of "module:NAME" or "path.py:NAME"."""
    where, _, attribute = name.rpartition(":")
    module = _load_module(where)
    try:
        found = getattr(module, attribute)
    except AttributeError as error:
        names = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise TargetError(f"{where} has no {attribute!r}. Fix: one of {', '.join(names)}") from error
    if not callable(found):
        raise TargetError(f"{name} is a {type(found).__name__}. Fix: a function or a class")
    return found


def _refuse_arguments(backend: type) -> None:
    """Errors: TargetError for a class that cannot be made without arguments."""
    try:
        backend()
    except TypeError as error:
        raise TargetError(
            f"{backend.__name__}() cannot be made: {error}. Fix: an __init__ that needs no argument and calls "
            f"super().__init__(), or a function"
        ) from error


def as_target(target: str | Callable[..., Any]) -> Target:
    """The function that a rank calls. A peer is set up here, in the process of its rank; a class is registered as long
    as the function lives.

    target: a registered backend's name; "module:Class" or "path.py:Class", a subclass of UlyssesAttentionProcessor;
            "module:function", (q, k, v, group, **options) → out or (out, lse), pairs of both with joint=; "peer:NAME";
            or the class or function.
    Errors: TargetError.
    """
    if isinstance(target, str):
        if target in backends():
            return _through_operation(target)
        if target.startswith(PEER):
            from ulysses_attention.doctor import peers

            return _through_function(peers.load(target)())
        if ":" not in target:
            raise TargetError(
                f"{target!r} is no registered backend ({', '.join(backends())}). "
                f"Fix: one of these, module:Class, module:function, path.py:NAME, or peer:NAME"
            )
        found: Callable[..., Any] = _find(target)
    else:
        found = target
    if isinstance(found, type):
        if not issubclass(found, UlyssesAttentionProcessor):
            raise TargetError(
                f"{found.__name__} does not inherit UlyssesAttentionProcessor, so nothing enforces the policy. "
                f"Fix: class {found.__name__}(UlyssesAttentionProcessor), or pass a function. [CP051]"
            )
        name = f"examined {found.__qualname__} {next(_numbers)}"
        _refuse_arguments(found)
        register_backend(name, found)
        attend = _through_operation(name)
        weakref.finalize(attend, unregister_backend, name).atexit = False
        return attend
    return _through_function(found)


def check_target(target: str) -> None:
    """Errors: TargetError, ModuleNotFoundError or ValueError where as_target would raise, without setting a peer up."""
    if target.startswith(PEER):
        from ulysses_attention.doctor import peers

        peers.load(target)
    else:
        as_target(target)


def strategies_of(target: str | Callable[..., Any]) -> list[str]:
    """The strategies in which a target can be called; [""] for a function without a strategy argument."""
    known: Mapping[str, Any] = backends()
    if isinstance(target, str) and target not in known and ":" in target and not target.startswith(PEER):
        target = _find(target)
    if isinstance(target, type) or (isinstance(target, str) and target in known):
        return list(_C.known_strategies())
    if callable(target) and "strategy" in inspect.signature(target).parameters:
        return list(_C.known_strategies())
    return [""]
