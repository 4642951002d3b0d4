"""Context parallelism put on a model, and taken off again."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ulysses_attention._request import resolve_group
from ulysses_attention.diffusers import border
from ulysses_attention.diffusers.attention_processor_ulysses import UlyssesAttnProcessor, ulysses_processor
from ulysses_attention.diffusers.caches import check_hooks
from ulysses_attention.diffusers.choose import plan_for
from ulysses_attention.diffusers.plan import ShardingPlan, attention_modules, check_attentions
from ulysses_attention.diffusers.streams import Streams
from ulysses_attention.policy import UlyssesContextParallelPolicy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Handle", "parallelize"]

_MARK = "_ulysses_handle"  # on a model that is parallelized


class Handle:
    """What `parallelize` put on one or several models. As a context manager it removes it at the end."""

    def __init__(self, models: list[_Parallelized]) -> None:
        self._models = models

    @property
    def plans(self) -> list[ShardingPlan]:
        """The plan of each model."""
        return [model.plan for model in self._models]

    @property
    def streams(self) -> list[Streams]:
        """Of each model, which tokens this rank holds: `is_sharded`, `shard` and `gather` for tensors in between."""
        return [model.streams for model in self._models]

    def sharded_lengths(self) -> list[tuple[int, int]]:
        """Of each sharded stream of the last forward: (tokens on all ranks, tokens of this rank)."""
        return [lengths for model in self._models for lengths in model.streams.sharded_lengths()]

    def remove(self) -> None:
        """Restores every model. A second call does nothing."""
        for model in self._models:
            model.remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class _Parallelized:
    """One model: its hooks and its processors, ours and those before."""

    def __init__(
        self, model: torch.nn.Module, plan: ShardingPlan, streams: Streams, options: Mapping[str, Any]
    ) -> None:
        self.model, self.plan, self.streams = model, plan, streams
        self._before: list[tuple[Any, Any]] = []
        self._ours: dict[Any, Any] = {}
        self._hooks: list[Any] = []
        self._hooked: border.Hooked = {}
        self._parameters = list(inspect.signature(model.forward).parameters)
        try:
            self._set_processors(options)
            self._hooks = [model.register_forward_pre_hook(self._start, with_kwargs=True)]
            hooks, self._hooked = border.install(model, plan, streams)
            self._hooks += hooks
        except BaseException:
            self.remove()
            raise
        setattr(model, _MARK, self)

    def _set_processors(self, options: Mapping[str, Any]) -> None:
        check_attentions(self.model, self.plan)
        made: list[tuple[Any, Any, UlyssesAttnProcessor]] = []
        for path, module in attention_modules(dict(self.model.named_modules())):
            attends = self.plan.attend(path)
            if attends is None:
                raise ValueError(
                    f"[parallelize] the plan does not say what the attention {path!r} attends to. "
                    f'Fix: attention={{"{path}": Attend(("image",))}}, or "local" if it needs no tokens of other ranks.'
                )
            old = module.processor
            # One for all that are alike, so that torch.compile compiles their blocks once.
            ours = next((new for before, what, new in made if what == attends and _same_kind(before, old)), None)
            if ours is None:
                ours = ulysses_processor(old, self.streams.group, attends=attends, attention=module,
                                         streams=self.streams, **options)  # fmt: skip
                made.append((old, attends, ours))
            self._before.append((module, old))
            self._ours[module] = ours
            module.set_processor(ours)

    def _start(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        modules = dict(model.named_modules())  # walked once: this runs in every forward
        for path, module in attention_modules(modules):
            if self._ours.get(module) is not module.processor:
                raise RuntimeError(
                    f"[parallelize] {path!r} has the processor {type(module.processor).__name__}, which was set after "
                    f"parallelize and sees the tokens of this rank only. Fix: handle.remove() first, then what sets "
                    f"processors (fuse_qkv_projections, load_ip_adapter, set_attn_processor), then parallelize again."
                )
        border.check_still_hooked(modules, self._hooked)
        check_hooks(model, modules.values())
        self.streams.begin(checkpointing=bool(getattr(model, "gradient_checkpointing", True)))
        if self.plan.check is not None:
            problem = self.plan.check(model, {**dict(zip(self._parameters, args)), **kwargs})  # noqa: B905
            if problem:
                raise NotImplementedError(f"[parallelize] {problem}")

    def __reduce__(self) -> Any:
        raise TypeError(
            f"[parallelize] a parallelized {type(self.model).__name__} belongs to the ranks of a group and can be "
            f"neither copied nor pickled as a whole. Fix: handle.remove() first, then copy, then parallelize again; "
            f"state_dict() and save_pretrained() work as they are."
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, processor in self._before:
            ours = self._ours[module]
            if module.processor is ours:
                backend = getattr(ours, "_attention_backend", None)
                if backend != getattr(processor, "_attention_backend", None):  # chosen while it was parallel
                    processor._attention_backend = backend
                module.set_processor(processor)
        for ours in {id(ours): ours for ours in self._ours.values()}.values():
            ours.retire()
        self._hooks, self._before, self._ours, self._hooked = [], [], {}, {}
        if getattr(self.model, _MARK, None) is self:
            delattr(self.model, _MARK)


def _same_kind(a: Any, b: Any) -> bool:
    """Whether one processor can stand for both: alike, and with nothing inside that a call could change."""
    values = [*vars(a).values(), *vars(b).values()]
    plain = all(value is None or isinstance(value, (bool, int, float, str, enum.Enum)) for value in values)
    return type(a) is type(b) and (a is b or (plain and vars(a) == vars(b)))


def _models(model_or_pipeline: Any) -> list[torch.nn.Module]:
    """The transformers of a pipeline, or the model itself."""
    if isinstance(model_or_pipeline, torch.nn.Module):
        return [model_or_pipeline]
    found = [getattr(model_or_pipeline, name, None) for name in ("transformer", "transformer_2")]
    models = [model for model in found if isinstance(model, torch.nn.Module)]
    if not models:
        raise NotImplementedError(
            f"[parallelize] {type(model_or_pipeline).__name__} is no model and has no transformer. "
            f"Fix: pass a transformer of diffusers, or a pipeline that has one."
        )
    return models


def parallelize(
    model_or_pipeline: Any,
    group_or_mesh: ProcessGroup | DeviceMesh | None = None,
    *,
    policy: UlyssesContextParallelPolicy | None = None,
    strategy: str = "ulysses",
    plan: ShardingPlan | None = None,
    kernel: str | Callable[..., Any] = "auto",
    agreement: str = "auto",
) -> Handle:
    """Makes a transformer of diffusers compute with its tokens spread over the ranks of a group.

    Each rank calls the model, or its pipeline, with the same whole inputs and gets the same whole output. Inside, every
    rank holds a part of the tokens, and attention sees all of them.

    Tensors are sharded from the modules that plan.inputs and plan.outputs name to the output of those in plan.gather.
    What keeps activations of both sides, such as a step cache of your own, tells them apart by
    `handle.streams[0].is_sharded(x, "image")`.

    plan:   how the model is cut; default: that of its family, else one made from the model's own context parallel plan.
    policy: None cuts exactly, within one token a rank. One that pads or refuses is kept: lengths that do not divide are
            an error. Its backend_name, unless "ulysses", goes before the backend that is active in diffusers.
    strategy, kernel, agreement: as in ulysses_attention. kernel="auto" is the backend that is active in diffusers.
    Comm:   in forward those of `strategy` for each attention, and one gather a border; in backward as many.
    Gradients: of parameters are partial; their sum over the ranks is the gradient, for a loss that every rank computes
            alike from the whole output.
    Errors: ValueError or NotImplementedError for a model without a plan (with one to start from), a plan that does not
            fit, and for what would be wrong over ranks. Then the model is as before.
    """
    group, mesh_2d = resolve_group(group_or_mesh)
    if mesh_2d:
        raise NotImplementedError(
            '[parallelize] a 2-D mesh asks for a hybrid of strategies, not offered here. Fix: mesh["ulysses"]. [CP047]'
        )
    options = {"strategy": strategy, "kernel": kernel, "agreement": agreement}
    done: list[_Parallelized] = []
    try:
        for model in _models(model_or_pipeline):
            _check_free(model)
            chosen = plan_for(model) if plan is None else plan
            done.append(_Parallelized(model, chosen, Streams(group, policy, chosen), options))
    except BaseException:
        Handle(done).remove()
        raise
    return Handle(done)


def _check_free(model: torch.nn.Module) -> None:
    name = type(model).__name__
    if hasattr(model, _MARK):
        raise ValueError(f"[parallelize] {name} is parallelized already. Fix: remove() of its handle first.")
    check_hooks(model, model.modules())
