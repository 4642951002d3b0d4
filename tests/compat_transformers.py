"""The proof for transformers: loss, logits and gradients of tiny causal language models over ranks against one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from compat_proof import Cell, gradient_error, gradients_of, largest, quietly, verdict, worst_of_ranks
from families import wake

BATCH, TOKENS, PADDED, WINDOW = 2, 13, 4, 4  # 13 tokens: 7 and 6 on two ranks
SIZES = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(head_dim=8, **SIZES))


def qwen3() -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **SIZES))


def gemma3(window: int = 2 * TOKENS) -> torch.nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    own = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": window, "layer_types": layers}
    return Gemma3ForCausalLM(Gemma3TextConfig(**own, **SIZES))


FAMILIES: dict[str, tuple[Callable[[], torch.nn.Module], bool]] = {  # the model, and whether a row is padded
    "llama": (llama, False),
    "llama, padded": (llama, True),
    "qwen3": (qwen3, False),
    "qwen3, padded": (qwen3, True),
    "gemma3": (gemma3, False),
    "gemma3, padded": (gemma3, True),
    "gemma3, window shorter than the text": (lambda: gemma3(WINDOW), False),
}


def inputs_of(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, SIZES["vocab_size"], (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :3] = -100  # a prompt: the ranks have different numbers of labels
    inputs = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, -PADDED:] = 0
        labels[1, -PADDED:] = -100
        inputs["attention_mask"] = mask
    return inputs


def local_only(model: Any, inputs: dict[str, torch.Tensor], rank: int, size: int) -> tuple[Any, torch.Tensor]:
    """Logits of this rank's tokens where its attention sees no others, and which tokens those are."""
    own = torch.tensor_split(torch.arange(TOKENS), size)[rank]
    return model(input_ids=inputs["input_ids"][:, own], position_ids=own[None].expand(BATCH, -1)).logits, own


@quietly
def prove(rank: int, group: Any, family: str) -> Cell:
    """A model of FAMILIES, whole on one rank against two lines on all."""
    from ulysses_attention.transformers import parallelize

    make, padded = FAMILIES[family]
    try:
        model = wake(make())
    except ImportError:
        return {"verdict": "absent"}
    inputs = inputs_of(padded)
    output = model(**inputs)
    output.loss.backward()
    gradients, logits, loss = gradients_of(model), output.logits.detach(), float(output.loss)
    alone, own = local_only(model, inputs, rank, group.size())
    moved = largest(alone.detach() - logits[:, own]) / largest(logits)
    model.zero_grad()
    try:
        with parallelize(model, group) as handle:
            output = model(**inputs)
            output.loss.backward()
            own_logits = handle.gather(output.logits.detach(), grad="slice")
    except NotImplementedError as error:
        return {"verdict": "refused", "why": str(error).splitlines()[0]}
    summed = gradients_of(model)
    own_loss = output.loss.detach().clone()
    for tensor in (own_loss, *summed.values()):
        dist.all_reduce(tensor)
    seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[..., None]
    error = max(largest((own_logits - logits) * seen) / largest(logits), abs(float(own_loss) - loss) / abs(loss))
    output_error, grad_error, moved = worst_of_ranks(error, gradient_error(summed, gradients), moved)
    return {"class": type(model).__name__, **verdict(output_error, grad_error, moved)}
