"""parallelize(model, group), and the handle that undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from ulysses_attention._request import resolve_group
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import EXACT, UlyssesContextParallelPolicy
from ulysses_attention.transformers import shard
from ulysses_attention.transformers.attention import NAME, ShardedCall
from ulysses_attention.transformers.support import Traits, refuse_other_attention, traits_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

MARK = "_ulysses_handle"
WHERE = "ulysses_attention.transformers"  # what a call refuses; parallelize has its own name


def parallelize(
    model: PreTrainedModel,
    group_or_mesh: ProcessGroup | DeviceMesh | None = None,
    *,
    policy: UlyssesContextParallelPolicy | None = None,
    strategy: str = "ulysses",
    kernel: str | Callable[..., Any] = "auto",
    agreement: str = "auto",
) -> Handle:
    """From now on the model runs on this rank's tokens, and its attention sees those of every rank.

    Called like before, with the whole input, the same on every rank. Outputs per token are those of this rank; losses
    and parameter gradients sum over the ranks: see the module's text.
    Comm:   that of ulysses_attention, a layer and forward; every rank must call the model.
    policy: None shards exactly, in lengths that differ by at most one. One that pads does so on the right: padded rows
            have no label, nobody attends to them, and gather leaves them out.
    Errors: NotImplementedError for models that would give other numbers on shards, here; for arguments and lengths that
            are not offered, when the model is called: on every rank, before attention communicates. CP010 and CP011
            under a policy that refuses lengths. CP047 for a 2-D mesh. CP063 without a group.
    """
    group, is_2d = resolve_group(group_or_mesh)
    if is_2d:
        raise NotImplementedError('[parallelize] the mesh is 2-D. Fix: one of its dimensions, mesh["name"]. [CP047]')
    traits = traits_of(model)
    if any(MARK in part.__dict__ for part in model.modules()):
        raise RuntimeError("[parallelize] the model is parallelized already. Fix: remove() on its handle first")
    return Handle(model, traits, group, policy, (strategy, kernel, agreement))


class Handle:
    """A parallelized model's group and layout. A context manager: its end is remove()."""

    def __init__(
        self,
        model: PreTrainedModel,
        traits: Traits,
        group: ProcessGroup,
        policy: UlyssesContextParallelPolicy | None,
        options: tuple[str, str | Callable[..., Any], str],
    ) -> None:
        self._model: PreTrainedModel | None = model
        self._traits = traits
        self._group = group
        self._rank = group.rank()
        self._size = group.size()
        self._policy = policy
        self._options = options
        self._layout: SequenceLayout | None = None
        self._attention_before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        try:
            for part in model.modules():
                if isinstance(part, PreTrainedModel):
                    refuse_other_attention(part, NAME, "parallelize")
        except RuntimeError:
            model.set_attn_implementation(self._attention_before)
            raise
        self._hook = model.register_forward_pre_hook(self._shard, with_kwargs=True)
        setattr(model, MARK, self)
        if hasattr(model, "generate"):
            setattr(model, "generate", refuse_generation)  # noqa: B010  (of this object only; remove() takes it off)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return self  # of a model's copy: a process group cannot be copied

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """The model as it was. A second call does nothing."""
        model, self._model = self._model, None
        if model is None:
            return
        self._hook.remove()
        model.set_attn_implementation(self._attention_before)
        delattr(model, MARK)
        model.__dict__.pop("generate", None)

    @property
    def layout(self) -> SequenceLayout:
        """Which rank holds which tokens of the last forward. Errors: RuntimeError before the first."""
        if self._layout is None:
            raise RuntimeError(f"[{WHERE}] the model was not called yet. Fix: call it, or layout_for(seq_len)")
        return self._layout

    def layout_for(self, seq_len: int) -> SequenceLayout:
        """Which rank holds which of so many tokens. Errors: CP010, CP011 and others of SequenceLayout."""
        return SequenceLayout(seq_len, self._size, EXACT if self._policy is None else self._policy)

    def gather(
        self, x: torch.Tensor, *, grad: Literal["sum", "slice"], layout: SequenceLayout | None = None
    ) -> torch.Tensor:
        """Outputs of every rank: logits or hidden states of the last forward, or of one with the given layout.

        Shapes: x [B, S_local, ..] → [B, S, ..] contiguous.
        Comm:   one collective; backward by grad, as in SequenceLayout.gather: "slice" for the same loss computed on
                every rank, "sum" for one that differs per rank.
        """
        return (self.layout if layout is None else layout).gather(x, self._group, 1, grad=grad)

    def _shard(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The root's forward pre-hook: from the whole input to this rank's part, and what the whole says beside it."""
        if self._model is None:
            raise RuntimeError(f"[{WHERE}] this copy's handle was removed. Fix: parallelize the model that is called")
        refuse_other_attention(model, NAME, WHERE)
        arguments = shard.named_arguments(self._traits.parameters, args, kwargs)
        shard.refuse_unknown(arguments)
        tokens = shard.tokens_of(arguments)
        layout = self.layout_for(tokens.shape[1])
        shard.refuse_length(layout, self._traits, training=model.training)
        positions = shard.positions_of(arguments, tokens, self._traits)
        strategy, kernel, agreement = self._options
        key_mask = shard.key_mask_of(arguments)
        arguments.update(shard.sharded_labels(arguments, layout, self._rank, self._traits))
        for name in ("input_ids", "inputs_embeds"):
            if arguments.get(name) is not None:
                arguments[name] = layout.shard(arguments[name], self._rank)
        arguments["position_ids"] = layout.shard(positions, self._rank)
        arguments["attention_mask"] = None  # in `ulysses`, for the whole sequence
        arguments["use_cache"] = False
        arguments[NAME] = ShardedCall(self._group, layout, key_mask, self._policy, strategy, kernel, agreement)
        self._layout = layout
        return (), arguments


def refuse_generation(*args: Any, **kwargs: Any) -> Any:
    """Stands in for generate() of a parallelized model."""
    raise NotImplementedError(f"[{WHERE}] generate() is called. Fix: {shard.CACHE_FIX}")
