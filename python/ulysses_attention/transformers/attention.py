"""attn_implementation="ulysses": the attention function and the mask function that transformers calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ulysses_attention.attention import ulysses_attention
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import UlyssesContextParallelPolicy
from ulysses_attention.tokens import MaskLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "ulysses"

# Arguments that models hand down to attention and that do not change what it computes.
WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_attentions",  # refused at the root
        "output_hidden_states",
        "position_ids",  # already in q and k, by rotation
        "return_dict",
        "shift_labels",
        "use_cache",  # refused at the root
    }
)


class ShardedCall(NamedTuple):
    """What one forward of a model says of the whole sequence. It travels with that forward's arguments, so that two
    models, two threads and a recomputation in backward each see their own."""

    group: ProcessGroup
    layout: SequenceLayout
    key_mask: torch.Tensor | None  # bool [B, seq_len], True where there is a token
    policy: UlyssesContextParallelPolicy | None
    strategy: str
    kernel: str | Callable[..., Any]
    agreement: str


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    ulysses: ShardedCall | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over all ranks' tokens, in the form that transformers asks for.

    Shapes: query [B, H, S_local, D], key, value [B, H_kv, S_local, D] → [B, S_local, H, D] contiguous, None.
    Comm:   that of ulysses_attention.
    Errors: without ulysses=, which the root of a parallelized model passes down; for a mask or an option that would
            change the result and is not known here; CP041 for a window shorter than the sequence.
    """
    if ulysses is None:
        raise _outside_of_a_root(module)
    _refuse_unknown(module, query, key, attention_mask, others)
    layout = ulysses.layout
    is_shorter = sliding_window is not None and sliding_window < layout.seq_len
    out = ulysses_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        ulysses.group,
        policy=ulysses.policy,
        strategy=ulysses.strategy,
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        # A query sees itself and sliding_window - 1 keys before it.
        window=(sliding_window - 1, 0) if is_shorter and sliding_window is not None else None,
        softmax_scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        # With all its axes: [B, S] could be a row for each query where this rank has as many queries as B.
        attn_mask=None if ulysses.key_mask is None else ulysses.key_mask[:, None, None, :],
        mask_layout=None if ulysses.key_mask is None else MaskLayout(q="broadcast", kv="global"),
        layout=layout,
        dropout_p=dropout,
        kernel=ulysses.kernel,
        agreement=ulysses.agreement,
    )
    return out.contiguous(), None


def _outside_of_a_root(module: torch.nn.Module) -> RuntimeError:
    return RuntimeError(
        f'[ulysses_attention.transformers] {type(module).__name__} has attn_implementation="{NAME}" and was called '
        f"without a parallelized model around it, so it would see this rank's tokens only. Fix: call the model "
        f"that was given to parallelize(model, group), not a part of it, before its handle.remove(); or "
        f'model.set_attn_implementation("sdpa"). If you do call it, {type(module).__name__} is not handed the '
        f"model's keyword arguments, and this model cannot run here"
    )


def _refuse_unknown(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    others: Mapping[str, Any],
) -> None:
    """Errors: NotImplementedError for what would change the result and is not known here."""
    unknown = [k for k, given in others.items() if given is not None and given is not False and k not in WITHOUT_EFFECT]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown or key.shape[2] != query.shape[2]:
        what = f"is asked for {', '.join(unknown)}" if unknown else f"has {query.shape[2]} queries, {key.shape[2]} keys"
        raise NotImplementedError(
            f"[ulysses_attention.transformers] {type(module).__name__} {what}, which this attention does not know. "
            f"Fix: handle.remove() and attn_implementation='sdpa' on one process for this model"
        )


def no_mask(use_vmap: bool = False, **_: Any) -> None:
    """No mask: causality and padding are those of the whole sequence, which the root of the model has seen.

    Errors: NotImplementedError for a model that lays a mask of its own over the causal one.
    """
    if use_vmap:
        raise NotImplementedError(
            "[ulysses_attention.transformers] the model lays a mask of its own over the causal one, and it would be "
            "that of this rank's tokens only. Fix: handle.remove() and attn_implementation='sdpa' on one process"
        )


def register() -> None:
    """Make attn_implementation="ulysses" known to transformers, both functions or none."""
    interfaces = ((AttentionInterface, attention), (AttentionMaskInterface, no_mask))
    for interface, function in interfaces:
        interface.register(NAME, function)
