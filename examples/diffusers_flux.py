"""A Flux transformer of diffusers on 2 and 3 ranks, through a processor of one's own. Random weights, no download.

Each rank holds a part of the image tokens and a part of the text tokens and attends with [text_r, image_r]: attention
without causality does not care about the order of the keys. Run: python examples/diffusers_flux.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from diffusers.models.embeddings import apply_rotary_emb

from ulysses_attention import (
    SequenceLayout,
    UlyssesAttentionProcessor,
    UlyssesContextParallelPolicy,
    check_same,
    register_backend,
)
from ulysses_attention.launch import run_processes

IMAGE_TOKENS, TEXT_TOKENS = 21, 8  # 29 together: odd, and no multiple of 2 or 3
EXACT = UlyssesContextParallelPolicy(require_seq_divisible=False)  # shards within one token, no padding


class FluxProcessor(UlyssesAttentionProcessor):
    """Projections and rotary embedding as Flux has them; the exchange is the base class's, attend() the kernel."""

    supports = frozenset({"softmax_scale"})

    def __init__(self, group: Any = None, layout: SequenceLayout | None = None) -> None:
        super().__init__()
        self.group, self.layout = group, layout

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=call.softmax_scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        if attention_mask is not None:
            raise NotImplementedError("FluxProcessor takes no attention_mask. Fix: pass None, as Flux does")

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, attn.head_dim))

        q = attn.norm_q(heads(attn.to_q(hidden_states)))
        k = attn.norm_k(heads(attn.to_k(hidden_states)))
        v = heads(attn.to_v(hidden_states))
        text = 0
        if encoder_hidden_states is not None:  # double-stream blocks; single-stream ones get [text, image] already
            text = encoder_hidden_states.shape[1]
            q = torch.cat([attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states))), q], dim=1)
            k = torch.cat([attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states))), k], dim=1)
            v = torch.cat([heads(attn.add_v_proj(encoder_hidden_states)), v], dim=1)
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))

        out = self.forward(q, k, v, self.group, layout=self.layout).flatten(2)

        if encoder_hidden_states is None:
            return out
        return attn.to_out[1](attn.to_out[0](out[:, text:])), attn.to_add_out(out[:, :text])


register_backend("flux_example", FluxProcessor)


def make_model() -> FluxTransformer2DModel:
    """Two double-stream and two single-stream blocks, 3 heads; weights of unit gain, so that attention matters."""
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))  # norms near 1
    return model.eval()


def make_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    places = torch.stack([torch.zeros(21), torch.arange(21) // 7, torch.arange(21) % 7], dim=-1)
    return {
        "hidden_states": torch.randn(2, IMAGE_TOKENS, 4, generator=generator),
        "img_ids": places,
        "encoder_hidden_states": torch.randn(2, TEXT_TOKENS, 8, generator=generator),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "pooled_projections": torch.randn(2, 8, generator=generator),
        "timestep": torch.tensor([0.3, 0.7]),
    }


@torch.no_grad()
def compare(rank: int, group: Any) -> tuple[float, float]:
    """The largest output difference to the single process: (through FluxProcessor, under local K/V)."""
    model, inputs, world = make_model(), make_inputs(), group.size()
    check_same(inputs | model.state_dict(), group)  # drawn from the same seeds; other noise on one rank would be static
    expected = model(**inputs, return_dict=False)[0]

    image = SequenceLayout(IMAGE_TOKENS, world, EXACT)
    text = SequenceLayout(TEXT_TOKENS, world, EXACT)
    joint = SequenceLayout.from_lengths([t + i for t, i in zip(text.lengths, image.lengths, strict=True)])
    shards = dict(inputs)
    for layout, tokens, ids in ((image, "hidden_states", "img_ids"), (text, "encoder_hidden_states", "txt_ids")):
        shards[tokens] = layout.shard(inputs[tokens], rank, dim=1)
        shards[ids] = layout.shard(inputs[ids], rank, dim=0)

    def difference() -> float:
        out = image.gather(model(**shards, return_dict=False)[0], group, dim=1, grad="slice")
        return float((out - expected).abs().max())

    local = difference()  # the model's own processors: each rank attends to its own tokens only
    model.set_attn_processor(FluxProcessor(group, joint))
    return difference(), local


def main() -> int:
    ok = True
    for world in (2, 3):
        results = run_processes(compare, world)
        ours, local = results[0]
        print(f"{world} ranks, {IMAGE_TOKENS} + {TEXT_TOKENS} tokens, largest difference to one process:")
        print(f"   FluxProcessor {ours:.1e}\n   local K/V     {local:.1e}, and no error")
        ok = ok and all(ours <= 1e-5 and local > 1e-2 for ours, local in results)
    print("As expected." if ok else "NOT as expected.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
