"""How a model is cut: which tensors hold which tokens, what each attention sees, where the output is whole again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

if TYPE_CHECKING:
    from ulysses_attention.diffusers.streams import Streams

__all__ = [
    "Attend",
    "Compute",
    "Gather",
    "Segments",
    "Shard",
    "ShardingPlan",
    "attention_modules",
    "check_attentions",
    "find",
    "is_cross",
    "matches",
]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A tensor, or each tensor of a list, whose dimension `dim` counts the tokens of a stream: each rank gets its own.

    The first tensor of a stream in a forward says how many tokens it has; another number later is an error.
    ndim: only tensors of that many dimensions, and not those with one entry that broadcasts; others stay as they are.
    """

    dim: int
    stream: str
    ndim: int | None = None


@dataclasses.dataclass(frozen=True)
class Segments:
    """A tensor whose dimension `dim` counts the tokens of several streams in a row, such as a mask over text and image:
    each stream is cut on its own, which is how the keys of a rank stand."""

    dim: int
    streams: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Compute:
    """An argument that is computed: function(value, streams) -> value, for numbers and dictionaries."""

    function: Callable[[Any, Streams], Any]


@dataclasses.dataclass(frozen=True)
class Gather:
    """A module whose output is whole again on every rank.

    grad: "slice" at the model's end, where every rank computes the same loss; "sum" in the middle, where the tokens are
    sharded again behind it.
    """

    dim: int
    stream: str
    grad: Literal["slice", "sum"] = "slice"


@dataclasses.dataclass(frozen=True)
class Attend:
    """What the tokens of an attention are.

    q:  the streams that stand in a row in the queries, in that order; none: the ranks tell each other in every call
        how many tokens they have.
    kv: those of keys and values; None: as q.
    mask: what its last axis counts are this rank's keys. "keys": one row for all queries. "outer": the model has made
        [keys, keys] of it, whose diagonal is the row.
    repeats_kv: the processor repeats keys and values to as many heads as queries; they travel once.
    """

    q: tuple[str, ...]
    kv: tuple[str, ...] | None = None
    mask: Literal["keys", "outer"] = "keys"
    repeats_kv: bool = False

    def __post_init__(self) -> None:
        for name, streams in (("q", self.q), ("kv", self.kv)):
            if isinstance(streams, str):
                fix = f'Attend(("{streams}",))' if name == "q" else f'kv=("{streams}",)'
                raise TypeError(f"[Attend] {name}={streams!r} is a string, not a tuple of streams. Fix: {fix}.")


Rule = Shard | Segments | Compute
LOCAL: Final = "local"


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """How a model is cut over ranks.

    A module is named by its path, "" for the model itself; `*` stands for one part of a path, `**` for several, `-1`
    for the last of a list. A name that ends in `?` may be missing.

    inputs:    module -> argument -> rule, applied before its forward.
    outputs:   module -> rule for its output, or a tuple of rules for a tuple, None where an item stays.
    gather:    module -> Gather, applied to its output.
    attention: attention module -> Attend, or "local" where it needs no tokens of other ranks (cross-attention to text
               that every rank holds). The first name that fits counts. An attention that no name fits is an error, and
               so is a name, unless it ends in `?`, under which stands no attention whose processor can be set.
    replicate: streams that every rank holds whole where they have fewer tokens than there are ranks.
    may_be_empty: streams of which a rank may hold nothing.
    check:     check(model, arguments) -> why a call cannot be right, or "".
    """

    attention: Mapping[str, Attend | Literal["local"]]
    gather: Mapping[str, Gather]
    inputs: Mapping[str, Mapping[str, Rule]] = dataclasses.field(default_factory=dict)
    outputs: Mapping[str, Rule | tuple[Rule | None, ...]] = dataclasses.field(default_factory=dict)
    replicate: Sequence[str] = ("text",)
    may_be_empty: Sequence[str] = ()
    check: Callable[[torch.nn.Module, Mapping[str, Any]], str] | None = None

    def attend(self, path: str) -> Attend | Literal["local"] | None:
        """What the attention module of that path attends to."""
        for pattern, attend in self.attention.items():
            if matches(pattern.removesuffix("?"), path):
                return attend
        return None


def attention_modules(modules: Mapping[str, torch.nn.Module]) -> list[tuple[str, Any]]:
    """Of modules by path, every attention whose processor can be set."""
    return [
        (path, module)
        for path, module in modules.items()
        if getattr(module, "processor", None) is not None and hasattr(module, "set_processor")
    ]


def check_attentions(model: torch.nn.Module, plan: ShardingPlan) -> None:
    """Errors: ValueError for an attention that would keep its processor, and so see the tokens of its own rank only."""
    modules = dict(model.named_modules())
    settable = [path for path, _ in attention_modules(modules)]
    fixed = {
        path: type(module).__name__
        for path, module in modules.items()
        if getattr(module, "processor", None) is not None and path not in settable
    }
    names = ", ".join(dict.fromkeys(f"**.{path.rsplit('.', 1)[-1]}" for path in settable))
    choice = f"one of the attentions that can be set ({names})" if names else "a model whose attentions can be set"
    alone = "so it would see the tokens of its own rank only"
    for pattern, attends in plan.attention.items():
        meant = [path for path in modules if matches(pattern.removesuffix("?"), path)]
        able = {*settable, *fixed} if attends == LOCAL else {*settable}
        if pattern.endswith("?") or able.intersection(meant):
            continue
        first = next((path for path in meant if path in fixed), meant[0] if meant else None)
        what = "none has that name" if first is None else f"{first} is a {type(modules[first]).__name__}"
        raise ValueError(
            f"[parallelize] the plan names the attention {pattern!r}, but no module there has a processor that can be "
            f"set ({what}), {alone}. Fix: {choice}, or {pattern + '?'!r} if it may be missing."
        )
    for path, kind in fixed.items():
        if plan.attend(path) != LOCAL:
            raise ValueError(
                f"[parallelize] {path!r} is a {kind}, which has a processor that cannot be set, {alone}. "
                f'Fix: a model whose attentions have set_processor, or attention={{"{path}": "local"}} if it needs no '
                f"tokens of other ranks."
            )
    if not settable:
        raise ValueError(
            f"[parallelize] {type(model).__name__} has no attention with a processor that can be set, {alone}. "
            f"Fix: a model whose attentions have set_processor."
        )


def is_cross(path: str, module: torch.nn.Module) -> bool:
    """Whether an attention has other tokens in its keys than in its queries, by what diffusers calls it."""
    return path.endswith(("attn2", "cross_attn")) or bool(getattr(module, "is_cross_attention", False))


def matches(pattern: str, path: str) -> bool:
    """Whether a module of that path is meant."""
    if pattern == path:
        return True
    parts = re.split(r"(\*\*|\*)", pattern)
    words = {"**": ".+", "*": r"[^.]+"}
    return re.fullmatch("".join(words.get(part, re.escape(part)) for part in parts), path) is not None


def _last_of_list(model: torch.nn.Module, pattern: str) -> str:
    """The pattern with each -1 replaced by the last index of the list that it names, where there is one."""
    parts = pattern.split(".")
    modules = dict(model.named_modules())
    for place, part in enumerate(parts):
        listed = modules.get(".".join(parts[:place]))
        if part == "-1" and isinstance(listed, Sized) and len(listed):
            parts[place] = str(len(listed) - 1)
    return ".".join(parts)


def find(model: torch.nn.Module, pattern: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that a name of a plan means. Errors: ValueError if there is none and the name does not end in `?`."""
    optional = pattern.endswith("?")
    name = pattern.removesuffix("?")
    if "-1" in name.split("."):
        name = _last_of_list(model, name)
    found = [(path, module) for path, module in model.named_modules() if matches(name, path)]
    if not found and not optional:
        children = ", ".join(path for path, _ in model.named_children())
        raise ValueError(
            f"[parallelize] the plan names the module {pattern!r}, which {type(model).__name__} does not have. "
            f"Fix: one of its modules ({children}, or a path below), or {pattern + '?'!r} if it may be missing."
        )
    yield from found
