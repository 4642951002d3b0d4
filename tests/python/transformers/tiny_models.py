"""Tiny language models that feel every token, one process's results, and those of ranks put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import ulysses_attention as ua
from ulysses_attention.transformers import Handle, parallelize

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {
    "head_dim": 8,
    "query_pre_attn_scalar": 3,  # scores are not scaled by head_dim
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 13,
}


def config_of(name: str, **changes: Any) -> Any:
    if name == "llama":
        return transformers.LlamaConfig(**{"head_dim": 8, **SIZES, **changes})
    if name == "qwen3":
        return transformers.Qwen3Config(**{"head_dim": 16, **SIZES, **changes})
    if name == "gemma3":
        return transformers.Gemma3TextConfig(**{**GEMMA, **SIZES, **changes})
    if name == "gemma2":  # caps scores at 4, which these weights reach
        return transformers.Gemma2Config(**{**GEMMA, "attn_logit_softcapping": 4.0, **SIZES, **changes})
    if name == "deepseek_v3":  # value heads are smaller than those of keys
        heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 4, "num_key_value_heads": 6}
        ranks = {"kv_lora_rank": 8, "q_lora_rank": 16, "first_k_dense_replace": 2, "n_routed_experts": 8}
        return transformers.DeepseekV3Config(**{**SIZES, **heads, **ranks, **changes})
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 13}
    return transformers.GptOssConfig(**{**experts, "layer_types": GEMMA["layer_types"], **SIZES, **changes})


CLASSES = {
    "deepseek_v3": transformers.DeepseekV3ForCausalLM,
    "llama": transformers.LlamaForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
    "gemma3": transformers.Gemma3ForCausalLM,
    "gemma2": transformers.Gemma2ForCausalLM,
    "gpt_oss": transformers.GptOssForCausalLM,
}


def wake(model: nn.Module) -> None:
    """Weights of unit gain, so that what attention sees shows in the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) / p[0].numel() ** 0.5)
            else:
                p.copy_((leaf == "weight") + 0.1 * torch.randn(p.shape, generator=generator))


def new_model(name: str, **changes: Any) -> Any:
    """The same weights each time. Eager attention: independent of ours, and it knows caps and sinks."""
    model = CLASSES[name](config_of(name, **changes))
    model.set_attn_implementation("eager")
    wake(model)
    return model.train()


def inputs_of(kind: str, seq_len: int = 13) -> dict[str, torch.Tensor]:
    """Two rows of tokens with labels: "plain", "right" or "left" padded, or "partly" labelled."""
    ids = torch.randint(3, VOCABULARY, (2, seq_len), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "labels": ids.clone()}
    if kind == "partly":
        given["labels"][:, : seq_len // 2] = -100
        given["labels"][1, 1:] = -100
    if kind in ("right", "left"):
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        given["attention_mask"] = mask if kind == "right" else mask.flip(1)
        given["labels"] = ids.masked_fill(given["attention_mask"] == 0, -100)
        if kind == "left":
            given["labels"][1, 4] = -100  # predicted by a row of padding, which means nothing
    return given


class Result(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor  # of the whole sequence
    grads: dict[str, torch.Tensor]


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model: Any, given: dict[str, Any]) -> Result:
    """One process."""
    out = model(**given, use_cache=False)
    out.loss.backward()
    return Result(out.loss.detach(), out.logits.detach(), grads_of(model))


def summed(parts: list[Result]) -> Result:
    """Losses and gradients of the ranks, summed."""
    losses = torch.stack([part.loss for part in parts]).sum()
    names = parts[0].grads
    assert all(part.grads.keys() == names.keys() for part in parts)
    return Result(losses, parts[0].logits, {name: sum(part.grads[name] for part in parts) for name in names})


def on_ranks(world: int, make: Callable[[], Any], given: dict[str, Any], **options: Any) -> Result:
    """The parallelized model on ranks that are threads."""

    def rank_part(rank: int, group: Any) -> Result:
        model = make()
        with parallelize(model, group, **options) as handle:
            out = model(**given)
            out.loss.backward()
            return Result(out.loss.detach(), gathered(handle, out.logits), grads_of(model))

    return summed(ua.run_ranks(rank_part, world))


def gathered(handle: Handle, logits: torch.Tensor) -> torch.Tensor:
    return handle.gather(logits.detach(), grad="slice")


def local_only(model: Any, given: dict[str, Any], world: int) -> torch.Tensor:
    """Logits where each rank attends to its own tokens alone."""
    seq_len = given["input_ids"].shape[1]
    layout = ua.SequenceLayout(seq_len, world, ua.UlyssesContextParallelPolicy(require_seq_divisible=False))
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    parts = [
        model(
            input_ids=layout.shard(given["input_ids"], rank),
            attention_mask=layout.shard(mask, rank),
            position_ids=torch.tensor([layout.positions(rank)]),
            use_cache=False,
        ).logits
        for rank in range(world)
    ]
    return torch.cat(parts, 1).detach()


def real_rows(given: dict[str, Any]) -> torch.Tensor:
    return given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()


def assert_same(got: Result, expected: Result, given: dict[str, Any]) -> None:
    """Within 2e-5 of the largest value: float32 sums in another order."""
    rows = real_rows(given)
    assert (got.loss - expected.loss).abs() <= 1e-5
    assert (got.logits - expected.logits)[rows].abs().max() <= 2e-5 * expected.logits[rows].abs().max()
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        scale = max(grad.abs().max().item(), 1e-3)
        error = (got.grads[name] - grad).abs().max().item() / scale
        assert error <= 5e-5, f"{name}: {error}"
