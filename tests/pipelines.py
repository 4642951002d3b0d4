"""Whole pipelines of diffusers from tiny random parts: no download, no tokenizer, embeddings instead of prompts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from families import FLUX, WAN, noise, wake

__all__ = ["PIPELINES", "Pipeline", "flux_transformer", "save_flux", "wan_transformer"]


@dataclasses.dataclass
class Pipeline:
    """A pipeline, the arguments of a call, the argument that turns guidance off, and where its output stands."""

    pipe: Any
    arguments: dict[str, Any]
    unguided: dict[str, float]
    output: str

    def __call__(self, seed: int = 0, **arguments: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        result = self.pipe(**self.arguments | {"output_type": "latent"} | arguments, generator=generator)
        return getattr(result, self.output)


def flux_transformer(layers: int = 2, single_layers: int = 2) -> Any:
    sizes = {"num_layers": layers, "num_single_layers": single_layers}
    return wake(FluxTransformer2DModel(**FLUX | sizes))


def wan_transformer(layers: int = 2, seed: int = 0) -> Any:
    return wake(WanTransformer3DModel(**WAN | {"num_layers": layers}), seed)


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux() -> Pipeline:
    """5 × 7 image tokens and 7 of text."""
    vae = AutoencoderKL(
        sample_size=32, in_channels=3, out_channels=3, block_out_channels=(4,), layers_per_block=1, latent_channels=1,
        norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5,
    )  # fmt: skip
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=wake(vae, 1), transformer=flux_transformer(),
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip
    arguments = {
        "prompt_embeds": noise(2, 7, 8, seed=0),
        "pooled_prompt_embeds": noise(2, 8, seed=1),
        "negative_prompt_embeds": noise(2, 7, 8, seed=2),
        "negative_pooled_prompt_embeds": noise(2, 8, seed=3),
        "true_cfg_scale": 3.0,
        "height": 10,
        "width": 14,
        "num_inference_steps": 2,
    }
    return Pipeline(_quiet(pipe), arguments, {"true_cfg_scale": 1.0}, "images")


def save_flux(folder: Path) -> None:
    """A whole Flux pipeline that takes prompts, as from_pretrained reads it; its tokens are letters."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    clip = CLIPTextConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=77, bos_token_id=52, eos_token_id=53,
    )  # fmt: skip
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in letters)]
    t5 = T5Config(vocab_size=64, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    parts = flux().pipe
    FluxPipeline(
        scheduler=parts.scheduler, vae=parts.vae, transformer=parts.transformer,
        text_encoder=wake(CLIPTextModel(clip), 2), text_encoder_2=wake(T5EncoderModel(t5), 3),
        tokenizer=CLIPTokenizer(vocab={x: i for i, x in enumerate(words)}, merges=[], model_max_length=77),
        tokenizer_2=T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512),
    ).save_pretrained(folder)  # fmt: skip


def wan(**options: Any) -> Pipeline:
    """3 × 3 × 3 video tokens, and 7 of text that every rank holds."""
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=wake(vae, 1), transformer=wan_transformer(), scheduler=scheduler,
        **options,
    )  # fmt: skip
    arguments = {
        "prompt_embeds": noise(2, 7, 8, seed=0),
        "negative_prompt_embeds": noise(2, 7, 8, seed=2),
        "guidance_scale": 4.0,
        "height": 48,
        "width": 48,
        "num_frames": 9,
        "num_inference_steps": 2,
    }
    return Pipeline(_quiet(pipe), arguments, {"guidance_scale": 1.0}, "frames")


def wan_of_two() -> Pipeline:
    """One transformer for the noisy steps and another for the rest."""
    return wan(transformer_2=wan_transformer(seed=7), boundary_ratio=0.9)


PIPELINES = {"flux": flux, "wan": wan, "wan of two": wan_of_two}
