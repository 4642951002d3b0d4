"""The plans of the transformers that are proved, by class name: what is sharded where, and what attends to what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ulysses_attention.diffusers.plan import LOCAL, Attend, Compute, Gather, Rule, Segments, Shard, ShardingPlan
from ulysses_attention.diffusers.streams import Streams

__all__ = ["FAMILIES", "UNSUPPORTED"]

IMAGE, TEXT = Shard(1, "image"), Shard(1, "text")
TEXT_IMAGE, IMAGE_TEXT = Attend(("text", "image")), Attend(("image", "text"))
BOTH: dict[str, Rule] = {"hidden_states": IMAGE, "encoder_hidden_states": TEXT}
PER_TOKEN_TIME = Shard(1, "image", ndim=2)  # [B, S], where each token has a time of its own
CONTROLNET: dict[str, Rule] = {"controlnet_block_samples?": IMAGE, "controlnet_single_block_samples?": IMAGE}


def _without(**reasons: str) -> Any:
    """A check that refuses arguments, each for its reason."""

    def check(model: torch.nn.Module, arguments: Mapping[str, Any]) -> str:
        given = [f"{type(model).__name__} with {name}=: {why}" for name, why in reasons.items()
                 if arguments.get(name) is not None]  # fmt: skip
        return f"{'; '.join(given)}. Fix: a call without it." if given else ""

    return check


# Flux: [text, image] in every block, position ids from outside.
FLUX = ShardingPlan(
    inputs={"": BOTH | {"img_ids": Shard(-2, "image"), "txt_ids": Shard(-2, "text")} | CONTROLNET},
    attention={"**.attn": TEXT_IMAGE},
    gather={"proj_out": Gather(1, "image")},
)
FLUX2 = ShardingPlan(
    inputs=FLUX.inputs,
    attention=FLUX.attention,
    gather=FLUX.gather,
    check=_without(kv_cache="the cached keys would be those of one rank"),
)


def _chroma_drops_its_mask(model: torch.nn.Module, arguments: Mapping[str, Any]) -> str:
    checkpointing = torch.is_grad_enabled() and getattr(model, "gradient_checkpointing", False)
    if arguments.get("attention_mask") is None or not checkpointing:
        return ""
    return (
        "diffusers drops Chroma's attention_mask in the single-stream blocks under gradient checkpointing, on one "
        "process too. Fix: model.disable_gradient_checkpointing(), or attention_mask=None."
    )


CHROMA = ShardingPlan(
    inputs={"": {**FLUX.inputs[""], "attention_mask": Segments(1, ("text", "image"))}},
    attention={"**.attn": Attend(("text", "image"), mask="outer")},
    gather=FLUX.gather,
    check=_chroma_drops_its_mask,
)

# Wan: attention over the video, cross-attention to text that every rank holds.
WAN = ShardingPlan(
    inputs={"": {"timestep": PER_TOKEN_TIME}, "blocks.0": {"hidden_states": IMAGE}},
    outputs={"rope": IMAGE},
    attention={"**.attn1": Attend(("image",)), "**.attn2": LOCAL},
    gather={"proj_out": Gather(1, "image")},
)
WAN_VACE = ShardingPlan(
    inputs={**WAN.inputs, "vace_blocks.0": {"hidden_states": IMAGE, "control_hidden_states": IMAGE}},
    outputs=WAN.outputs,
    attention=WAN.attention,
    gather=WAN.gather,
)


def _qwen_mask(kwargs: dict[str, Any], streams: Streams) -> dict[str, Any]:
    """diffusers 0.38 hands every block the joint mask [B, 1, 1, T + S] in this one dictionary."""
    mask = kwargs.get("attention_mask")
    return kwargs if mask is None else {**kwargs, "attention_mask": streams.shard(mask, Segments(3, ("text", "image")))}


QWEN_IMAGE = ShardingPlan(
    inputs={
        "": {"controlnet_block_samples?": IMAGE},
        "transformer_blocks.0": BOTH,
        "transformer_blocks.*": {
            "encoder_hidden_states_mask?": TEXT,
            "modulate_index?": IMAGE,
            "joint_attention_kwargs?": Compute(_qwen_mask),
        },
    },
    outputs={"pos_embed": (Shard(0, "image"), Shard(0, "text"))},
    attention={"**.attn": TEXT_IMAGE},
    gather={"proj_out": Gather(1, "image")},
)

LTX = ShardingPlan(
    inputs={"": {"hidden_states": IMAGE, "timestep": PER_TOKEN_TIME}},
    outputs={"rope": IMAGE},
    attention={"**.attn1": Attend(("image",)), "**.attn2": LOCAL},
    gather={"proj_out": Gather(1, "image")},
)
AUDIO = Shard(1, "audio")


def _audio_rotation(rotation: tuple[torch.Tensor, ...], streams: Streams) -> tuple[torch.Tensor, ...]:
    """Of [B, S, D], or [B, H, S, D] for the split form, with which diffusers cannot rotate no tokens at all."""
    tokens = rotation[0].size(-2)
    if rotation[0].dim() == 4 and tokens < streams.cp_size:
        raise ValueError(
            f"[parallelize] rope_type='split' does not rotate on a rank without audio, and {tokens} audio tokens are "
            f"fewer than cp_size={streams.cp_size}. Fix: a group of at most {tokens} rank{'s' * (tokens != 1)}."
        )
    return tuple(streams.shard(x, Shard(-2, "audio")) for x in rotation)


LTX2 = ShardingPlan(
    inputs={
        "": {
            "hidden_states": IMAGE,
            "timestep": PER_TOKEN_TIME,
            "audio_hidden_states": AUDIO,
            "audio_timestep": Shard(1, "audio", ndim=2),
            "video_keyframes_mask?": IMAGE,
        }
    },
    outputs={  # [B, S, D], or [B, H, S, D] for the split form
        "rope": Shard(-2, "image"),
        "cross_attn_rope": Shard(-2, "image"),
        "audio_rope": Compute(_audio_rotation),
        "cross_attn_audio_rope": Compute(_audio_rotation),
    },
    attention={
        "**.attn1": Attend(("image",)),
        "**.audio_attn1": Attend(("audio",)),
        "**.audio_to_video_attn": Attend(("image",), kv=("audio",)),
        "**.video_to_audio_attn": Attend(("audio",), kv=("image",)),
        "**.attn2": LOCAL,
        "**.audio_attn2": LOCAL,
    },
    gather={"proj_out": Gather(1, "image"), "audio_proj_out": Gather(1, "audio")},
    may_be_empty=("audio",),
    check=_without(video_self_attention_mask="it has a row for each query"),
)


def _first_frame(tokens: int, streams: Streams) -> int:
    """How many tokens of the first frame this rank holds: the blocks cut their own tokens there."""
    first = streams.first_token("image")
    return max(0, min(tokens, first + streams.local_tokens("image")) - first)


HUNYUAN_EACH: dict[str, Rule] = {
    "attention_mask": Segments(3, ("image", "text")),
    "first_frame_num_tokens?": Compute(_first_frame),
    "num_tokens?": Compute(_first_frame),
}
HUNYUAN_VIDEO = ShardingPlan(
    inputs={
        "transformer_blocks.0": BOTH,
        "transformer_blocks.*": HUNYUAN_EACH,
        "single_transformer_blocks.*": HUNYUAN_EACH,
    },
    outputs={"rope": Shard(0, "image")},
    attention={"context_embedder.**": LOCAL, "**.attn": IMAGE_TEXT},
    gather={"proj_out": Gather(1, "image")},
)

# Z-Image and Lumina 2: image and text are refined apart, then one stream of both.
JOINED = Shard(1, "joined")
Z_IMAGE = ShardingPlan(
    inputs={
        "noise_refiner.0": {"x": IMAGE},
        "noise_refiner.*": {"attn_mask": IMAGE, "freqs_cis": IMAGE},
        "layers.0": {"x": JOINED},
        "layers.*": {"attn_mask": JOINED, "freqs_cis": JOINED},
    },
    attention={
        "context_refiner.**": LOCAL,
        "noise_refiner.**": Attend(("image",)),
        "layers.**": Attend(("joined",)),
    },
    gather={"noise_refiner.-1": Gather(1, "image", grad="sum"), "all_final_layer.*": Gather(1, "joined")},
    check=_without(
        siglip_feats="its tokens form another stream",
        image_noise_mask="it is a list for each image, not a tensor over tokens",
        controlnet_block_samples="its residuals are whole and would be added to a part",
    ),
)
LUMINA2 = ShardingPlan(
    inputs={
        "noise_refiner.0": {"hidden_states": IMAGE},
        "noise_refiner.*": {"attention_mask": IMAGE, "image_rotary_emb": IMAGE},
        "layers.0": {"hidden_states": JOINED},
        "layers.*": {"attention_mask": JOINED, "image_rotary_emb": JOINED},
    },
    attention={
        "context_refiner.**": LOCAL,
        "noise_refiner.**": Attend(("image",), repeats_kv=True),
        "layers.**": Attend(("joined",), repeats_kv=True),
    },
    gather={"noise_refiner.-1": Gather(1, "image", grad="sum"), "norm_out": Gather(1, "joined")},
)

COSMOS_TIME: dict[str, Rule] = {"embedded_timestep": Shard(1, "image", ndim=3), "temb?": Shard(1, "image", ndim=3)}
COSMOS = ShardingPlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": IMAGE},
        "transformer_blocks.*": {**COSMOS_TIME, "controlnet_residual?": IMAGE, "extra_pos_emb?": IMAGE},
        "norm_out": COSMOS_TIME,
    },
    outputs={"rope": Shard(0, "image")},
    attention={"**.attn1": Attend(("image",)), "**.attn2": LOCAL},
    gather={"proj_out": Gather(1, "image")},
)

COGVIDEOX = ShardingPlan(
    inputs={"": {"image_rotary_emb": Shard(0, "image")}, "transformer_blocks.0": BOTH},
    attention={"**.attn1": TEXT_IMAGE},
    gather={"proj_out": Gather(1, "image")},
)
SD3 = ShardingPlan(
    inputs={"": {"block_controlnet_hidden_states?": IMAGE}, "transformer_blocks.0": BOTH},
    attention={"**.attn": IMAGE_TEXT, "**.attn2?": Attend(("image",))},
    gather={"proj_out": Gather(1, "image")},
)

FAMILIES: dict[str, ShardingPlan] = {
    "ChromaTransformer2DModel": CHROMA,
    "CogVideoXTransformer3DModel": COGVIDEOX,
    "CosmosTransformer3DModel": COSMOS,
    "Flux2Transformer2DModel": FLUX2,
    "FluxTransformer2DModel": FLUX,
    "HunyuanVideoTransformer3DModel": HUNYUAN_VIDEO,
    "LTX2VideoTransformer3DModel": LTX2,
    "LTXVideoTransformer3DModel": LTX,
    "Lumina2Transformer2DModel": LUMINA2,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "SD3Transformer2DModel": SD3,
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN_VACE,
    "ZImageTransformer2DModel": Z_IMAGE,
}

#: What is known not to come out right, and why.
UNSUPPORTED: dict[str, str] = {
    "AuraFlowTransformer2DModel": "register tokens stand in front of the text; the draft below cuts them with it",
    "HiDreamImageTransformer2DModel": "it puts other text tokens into every block and cuts them off again by length",
    "SanaTransformer2DModel": "its attention is linear, a sum over tokens in the processor, and its feed-forward a "
    "convolution over neighbouring tokens; no attention call says which",
}
