"""Which models can run on shards of their tokens, asked once, before anything is changed."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Heads with one result per token; others pool over the sequence, which no rank has.
PER_TOKEN = ("ForCausalLM", "LMHeadModel")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class Traits(NamedTuple):
    """What the root hook must know of a model."""

    parameters: tuple[str, ...]  # of forward, in order
    window: int | None  # the shortest
    dropout: float  # of attention, in training
    positions_count_from_zero: bool  # where the caller gives none
    max_positions: int | None  # up to which rotation does not depend on the length
    is_causal_loss: bool


def _refuse(model: torch.nn.Module, what: str, fix: str) -> NotImplementedError:
    return NotImplementedError(f"[parallelize] {type(model).__name__} {what}. Fix: {fix}")


def _windows(model: PreTrainedModel) -> list[int]:
    """Windows of the attention layers: each module's own, or the config's where modules have none."""
    config = model.config
    types = getattr(config, "layer_types", None)
    found = [getattr(module, "sliding_window", None) for module in model.modules()]
    if types is None or "sliding_attention" in types:
        found.append(getattr(config, "sliding_window", None))
    return [window for window in found if isinstance(window, int) and not isinstance(window, bool)]


def _max_positions(model: PreTrainedModel, rotary: list[torch.nn.Module]) -> int | None:
    """Dynamic rotation turns by the largest position in sight, and a rank sees only its own."""
    limits = []
    for module in rotary:
        rope_type = getattr(module, "rope_type", "default")
        names = list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]
        if not any(word in str(name) for name in names for word in LENGTH_DEPENDENT_ROPE):
            continue
        if isinstance(rope_type, dict):
            raise _refuse(model, f"has rotations that depend on the length, {names}", "a fixed rope_type, such as yarn")
        parameters = getattr(model.config, "rope_parameters", None) or {}
        limits.append(parameters.get("original_max_position_embeddings") or model.config.max_position_embeddings)
    return min(limits, default=None)


def _is_causal_loss(model: PreTrainedModel) -> bool:
    """Whether the model hands labels, shift_labels and num_items_in_batch to transformers' loss of causal models."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    source = inspect.getsource(inspect.unwrap(type(model).forward))
    call = source.partition("loss_function(")[2]
    return "**kwargs" in call.partition("\n\n")[0] and model.loss_function is ForCausalLMLoss


def traits_of(model: PreTrainedModel) -> Traits:
    """Errors: NotImplementedError for a model whose result would differ on shards, TypeError for anything else."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"[parallelize] model is a {type(model).__name__}, not a model of transformers. Fix: the PreTrainedModel "
            f"itself (wrapper.module, peft's get_base_model()); wrap and compile it afterwards"
        )
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise _refuse(
            model, "attends to an encoder's tokens", "a decoder-only model; cross-attention is not offered here"
        )
    if getattr(config, "sub_configs", None):
        raise _refuse(model, f"is made of {', '.join(config.sub_configs)}", "its text model alone")
    is_per_token = type(model).__name__.endswith(PER_TOKEN) or model.base_model is model
    if not is_per_token or getattr(model, "pooler", None) is not None:
        fix = (
            "a causal language model (...ForCausalLM), or a ...Model without a pooling head (add_pooling_layer=False) "
            "and your head on handle.gather(hidden_states)"
        )
        raise _refuse(model, "has a head that pools over the sequence, or one that is not known here", fix)
    types = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    # Recurrent and state-space layers have convolutions over the sequence, also where the config names no layer types.
    mixers = {
        type(module).__name__ for module in model.modules() if isinstance(module, (torch.nn.Conv1d, torch.nn.RNNBase))
    }
    if types or mixers:
        named = ", ".join(sorted(types | mixers))
        raise _refuse(model, f"mixes tokens by {named}", f"a model of {' and '.join(sorted(LAYER_TYPES))} only")
    parameters = tuple(inspect.signature(model.forward).parameters)
    if "position_ids" not in parameters:
        raise _refuse(
            model, "takes no position_ids, so every rank would count from 0", "a model whose forward takes them"
        )
    if getattr(config, "output_router_logits", False):
        raise _refuse(
            model,
            "adds a loss of its routers (output_router_logits=True), which does not sum over the ranks",
            "output_router_logits=False in its config",
        )
    rotary = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    dropouts = (
        getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    )
    return Traits(
        parameters=parameters,
        window=min(_windows(model), default=None),
        dropout=max(float(p or 0.0) for p in dropouts),
        positions_count_from_zero=bool(rotary),
        max_positions=_max_positions(model, rotary),
        is_causal_loss=_is_causal_loss(model),
    )


def refuse_other_attention(model: PreTrainedModel, name: str, refused_by: str) -> None:
    """Errors: where a model did not take the attention implementation, or lost it again."""
    if model.config._attn_implementation != name:
        raise RuntimeError(
            f"[{refused_by}] {type(model).__name__} attends by "
            f'"{model.config._attn_implementation}", so it would see this rank\'s tokens only. Fix: '
            f"handle.remove() before set_attn_implementation, and one config for each parallelized model"
        )
