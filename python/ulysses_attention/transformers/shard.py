"""The arguments of a model's forward: what is refused, what the whole sequence says, and this rank's part of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from ulysses_attention import _C
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.transformers.support import Traits

NO_LABEL = -100
Arguments = dict[str, Any]

SHARDED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")
# Passed on as they are.
PASSED = frozenset({"num_items_in_batch", "output_hidden_states", "return_dict", "is_causal"})
CACHES = frozenset({"cache", "past_key_values", "past_key_value", "use_cache"})
CACHE_FIX = "handle.remove(), then generate on one process; inside training no cache (use_cache=False)"


def _refused(what: str, fix: str) -> NotImplementedError:
    return NotImplementedError(f"[ulysses_attention.transformers] {what}. Fix: {fix}")


def _invalid(what: str, fix: str) -> ValueError:
    return ValueError(f"[ulysses_attention.transformers] {what}. Fix: {fix}")


def named_arguments(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Every argument that was given, by name."""
    return {**dict(zip(parameters, args, strict=False)), **kwargs}


def refuse_unknown(arguments: Arguments) -> None:
    """Errors: for every argument that could change the result and is not known to be right on shards."""
    for name, given in arguments.items():
        if given is None or given is False or name in SHARDED or name in PASSED:
            continue
        if name == "logits_to_keep" and isinstance(given, int) and given == 0:
            continue
        if name in CACHES:
            raise _refused(f"{name} is given", CACHE_FIX)
        fix = f"leave it out; known are {', '.join((*SHARDED, *sorted(PASSED)))}"
        if name == "logits_to_keep":
            fix = "leave it out and take rows of handle.gather(logits)"
        raise _refused(f"{name} is given, and on a part of the tokens it would mean something else", fix)


def tokens_of(arguments: Arguments) -> torch.Tensor:
    """input_ids [B, S] or inputs_embeds [B, S, C], whichever is given, once the other tensors fit it."""
    given = [x for x in (arguments.get("input_ids"), arguments.get("inputs_embeds")) if x is not None]
    if len(given) != 1 or given[0].dim() not in (2, 3):
        raise _invalid("input_ids [B, S] and inputs_embeds [B, S, C] are both given, or neither", "exactly one of them")
    tokens: torch.Tensor = given[0]
    batch, seq_len = tokens.shape[0], tokens.shape[1]
    for name in ("attention_mask", "position_ids", "labels", "shift_labels"):
        x = arguments.get(name)
        if x is None:
            continue
        batches = (batch, 1) if name == "position_ids" else (batch,)
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape[1] != seq_len or x.shape[0] not in batches:
            got = f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise _invalid(
                f"{name} is {got}, and the tokens of the whole sequence are [{batch}, {seq_len}]",
                f"{name} [{batch}, {seq_len}] on every rank; a mask of one more axis is not offered here",
            )
    return tokens


def key_mask_of(arguments: Arguments) -> torch.Tensor | None:
    """bool [B, S], True where there is a token; None where all are."""
    mask: torch.Tensor | None = arguments.get("attention_mask")
    if mask is None:
        return None
    mask = mask.bool()
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask


def positions_of(arguments: Arguments, tokens: torch.Tensor, traits: Traits) -> torch.Tensor:
    """The given positions [B|1, S], or 0 to S - 1 as models with rotary embeddings count.

    Errors: CP045 where they jump, which says that several documents stand in one row (as transformers reads them, only
    without an attention_mask).
    """
    positions: torch.Tensor | None = arguments.get("position_ids")
    if positions is None:
        if not traits.positions_count_from_zero:
            raise _invalid(
                "position_ids is not given, and this model does not rotate by position, so how it counts is not known",
                f"position_ids as it counts on one process: torch.arange({tokens.shape[1]})[None] for GPT-2, BERT and "
                f"OPT, torch.arange({tokens.shape[1]})[None] + pad_token_id + 1 for RoBERTa and its kind",
            )
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    if arguments.get("attention_mask") is None and positions.shape[1] > 1:
        jumps = (positions.diff(dim=1) != 1).any()
        if torch.compiler.is_compiling():
            torch._assert_async(~jumps, "position_ids jump: packed documents are not offered. [CP045]")
        elif bool(jumps):
            documents = int((positions.diff(dim=1) != 1).sum(1).max()) + 1
            raise _refused(
                f"position_ids jump, which makes {documents} documents of one row; packed documents are not offered",
                "one document a row, with padding and attention_mask; or position_ids that count on. [CP045]",
            )
    return positions


def refuse_length(layout: SequenceLayout, traits: Traits, *, training: bool) -> None:
    """Errors: for a length or a mode in which this model's attention is not offered; CP041, CP042."""
    seq_len = layout.seq_len
    if min(layout.padded_lengths) == 0:
        raise _invalid(
            f"seq_len={seq_len} leaves {layout.padded_lengths.count(0)} of {layout.cp_size} ranks without a token, and "
            f"models fail on none",
            f"at least {layout.cp_size} tokens, at most {seq_len} rank{'s' * (seq_len != 1)}, or policy="
            f"UlyssesContextParallelPolicy(pad_multiple=1)",
        )
    if traits.window is not None and traits.window < seq_len and _C.capabilities("ulysses")["window"]:
        raise _refused(
            f"the model has a sliding window of {traits.window} and seq_len={seq_len}; windows are not offered",
            f"at most {traits.window} tokens, or a model without windows. [CP041]",
        )
    if traits.max_positions is not None and traits.max_positions < seq_len:
        raise _refused(
            f"seq_len={seq_len} is beyond {traits.max_positions}, from where this model rotates by the longest "
            f"position in sight, which each rank would see differently",
            f"at most {traits.max_positions} tokens, or a fixed rope_type, such as yarn",
        )
    if training and traits.dropout > 0.0:
        raise _refused(
            f"attention dropout is {traits.dropout} in training; dropout is not offered",
            "attention_dropout=0.0 in the config, or model.eval(). [CP042]",
        )


def sharded_labels(arguments: Arguments, layout: SequenceLayout, rank: int, traits: Traits) -> Arguments:
    """labels and shift_labels of this rank, and the number of labels of all: losses then sum over the ranks.

    Errors: for labels of a model that computes its loss in its own way, and shift_labels alone, which give no loss.
    """
    labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
    if labels is None:
        if shifted is not None:
            raise _invalid("shift_labels without labels give no loss", "labels=shift_labels as well, or neither")
        return {}
    if not traits.is_causal_loss:
        raise _refused(
            "labels are given, and this model computes its loss in its own way", "handle.gather(logits) and your loss"
        )
    if shifted is None:
        shifted = pad(labels, (0, 1), value=NO_LABEL)[:, 1:]  # before sharding: the next token may be another rank's
    local = layout.shard(shifted, rank, fill=NO_LABEL).contiguous()
    count = arguments.get("num_items_in_batch")
    return {
        "labels": local,  # only their presence counts, where there are shift_labels
        "shift_labels": local,
        "num_items_in_batch": (shifted != NO_LABEL).sum() if count is None else count,
    }
