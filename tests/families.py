"""Tiny transformers of every family that has a plan, as data: class, sizes, inputs. Weights are random.

Token counts do not divide by 2 or 4, batch rows differ, masks hide something in one row, heads (3) do not divide.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

HEADS = {"num_attention_heads": 3, "attention_head_dim": 16}
TEXT = 7  # text tokens
FRAMES = 27  # video tokens, 3 frames of 9
LATE = torch.arange(FRAMES) > 8  # the tokens behind the first frame


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grid(tokens: int, axes: int = 3) -> torch.Tensor:
    """Position ids that differ from token to token."""
    return torch.arange(tokens * axes).reshape(tokens, axes).float() % 7


def text_mask(text: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Two rows, of which the second hides its last tokens."""
    mask = torch.ones(2, text, dtype=dtype)
    mask[1, (text + 1) // 2 :] = 0
    return mask


@dataclasses.dataclass(frozen=True)
class Family:
    """inputs(text, masked): the arguments of forward for so many text tokens, with or without a mask over them."""

    kind: str
    config: Mapping[str, Any]
    inputs: Callable[[int, bool], dict[str, Any]]

    def model(self) -> torch.nn.Module:
        import diffusers

        model: torch.nn.Module = wake(getattr(diffusers, self.kind)(**self.config))
        return model


def wake(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Random weights under which every token matters for every other one: nothing starts at zero."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            values, leaf = torch.randn(p.shape, generator=random), name.rsplit(".", 1)[-1]
            if leaf == "weight" and p.dim() >= 2:
                p.copy_(values / p[0].numel() ** 0.5)
            elif leaf == "weight":
                p.copy_(1 + 0.1 * values)
            else:
                p.copy_((0.1 if leaf == "bias" else 0.5) * values)
    return model.eval()


def _flux(text: int, masked: bool) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 21, 4),
        "encoder_hidden_states": noise(2, text, 8, seed=1),
        "pooled_projections": noise(2, 8, seed=2),
        "timestep": torch.tensor([0.5, 0.7]),
        "img_ids": grid(21),
        "txt_ids": torch.zeros(text, 3),
    }


def _flux_controlnet(text: int, masked: bool) -> dict[str, Any]:
    residuals = {
        "controlnet_block_samples": [noise(2, 21, 48, seed=5)],
        "controlnet_single_block_samples": [noise(2, 21, 48, seed=6), noise(2, 21, 48, seed=7)],
    }
    return _flux(text, masked) | residuals


def _flux2(text: int, masked: bool) -> dict[str, Any]:
    ids = {
        "img_ids": grid(21, 4).expand(2, -1, -1),
        "txt_ids": grid(text, 4).expand(2, -1, -1),
    }
    time = {"timestep": torch.tensor([0.5, 0.7]), "guidance": torch.tensor([1.0, 2.0])}
    return {"hidden_states": noise(2, 21, 4), "encoder_hidden_states": noise(2, text, 8, seed=1)} | ids | time


def _chroma(text: int, masked: bool) -> dict[str, Any]:
    inputs = _flux(text, masked)
    del inputs["pooled_projections"]
    mask = torch.cat([text_mask(text), torch.ones(2, 21, dtype=torch.bool)], 1)
    return inputs | {"attention_mask": mask if masked else None}


def _wan(text: int, masked: bool) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, 3, 6, 6),
        "timestep": torch.tensor([500.0, 700.0]),
        "encoder_hidden_states": noise(2, text, 8, seed=1),
    }


def _wan_ti2v(text: int, masked: bool) -> dict[str, Any]:
    return _wan(text, masked) | {"timestep": torch.tensor([500.0, 700.0])[:, None] * LATE}


def _wan_i2v(text: int, masked: bool) -> dict[str, Any]:
    image = {"encoder_hidden_states_image": noise(2, 5, 8, seed=2)}
    return _wan(512, masked) | image  # diffusers finds the image's tokens in front of exactly 512 of text


def _wan_vace(text: int, masked: bool) -> dict[str, Any]:
    control = {
        "control_hidden_states": noise(2, 6, 3, 6, 6, seed=3),
        "control_hidden_states_scale": torch.tensor([0.9, 0.6]),
    }
    return _wan(text, masked) | control


def _qwen(text: int, masked: bool) -> dict[str, Any]:
    import inspect

    from diffusers import QwenImageTransformer2DModel

    inputs: dict[str, Any] = {
        "hidden_states": noise(2, 15, 16),
        "encoder_hidden_states": noise(2, text, 8, seed=1),
        "encoder_hidden_states_mask": text_mask(text) if masked else None,
        "timestep": torch.tensor([0.5, 0.7]),
        "img_shapes": [[(1, 3, 5)]] * 2,
    }
    if "txt_seq_lens" in inspect.signature(QwenImageTransformer2DModel.forward).parameters:
        inputs["txt_seq_lens"] = [text, text]  # diffusers before 0.40
    return inputs


def _qwen_controlnet(text: int, masked: bool) -> dict[str, Any]:
    return _qwen(text, masked) | {"controlnet_block_samples": [noise(2, 15, 48, seed=5), noise(2, 15, 48, seed=6)]}


def _qwen_edit(text: int, masked: bool) -> dict[str, Any]:
    """A second image whose tokens are modulated at time zero: a number for each token says which."""
    return _qwen(text, masked) | {"img_shapes": [[(1, 3, 3), (1, 2, 3)]] * 2}


def _ltx(text: int, masked: bool) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, FRAMES, 4),
        "encoder_hidden_states": noise(2, text, 8, seed=1),
        "timestep": torch.tensor([500.0, 700.0])[:, None] * LATE,
        "encoder_attention_mask": text_mask(text),
        "num_frames": 3,
        "height": 3,
        "width": 3,
    }


def _ltx2(text: int, masked: bool, audio: int = 5) -> dict[str, Any]:
    sizes = {"num_frames": 3, "height": 3, "width": 3, "audio_num_frames": audio}
    return sizes | {
        "hidden_states": noise(2, FRAMES, 4),
        "audio_hidden_states": noise(2, audio, 4, seed=3),
        "encoder_hidden_states": noise(2, text, 8, seed=1),
        "audio_encoder_hidden_states": noise(2, text, 8, seed=2),
        "timestep": torch.tensor([500.0, 700.0])[:, None] * LATE,
        "audio_timestep": torch.tensor([500.0, 700.0]),
    }


def _hunyuan(text: int, masked: bool) -> dict[str, Any]:
    mask = text_mask(text, torch.long) if masked else torch.ones(2, text, dtype=torch.long)
    return _wan(text, masked) | {
        "encoder_attention_mask": mask,
        "pooled_projections": noise(2, 8, seed=2),
        "guidance": torch.tensor([1000.0, 2000.0]),
    }


def _z_image(text: int, masked: bool) -> dict[str, Any]:
    captions = [noise(text, 8, seed=1), noise(text + 33 * masked, 8, seed=2)]  # padded to 32 and 64: a mask appears
    images = [noise(4, 1, 6, 10), noise(4, 1, 6, 10, seed=3)]
    return {"x": images, "t": torch.tensor([0.5, 0.7]), "cap_feats": captions}


def _cosmos(text: int, masked: bool) -> dict[str, Any]:
    inputs = _wan(text, masked) | {"fps": 16}
    return inputs | {"timestep": torch.tensor([0.5, 0.7])[:, None, None, None, None].expand(2, 1, 3, 1, 1)}


def _cosmos_controlnet(text: int, masked: bool) -> dict[str, Any]:
    return _cosmos(text, masked) | {"block_controlnet_hidden_states": [noise(2, FRAMES, 48, seed=5)]}


def _cogvideox(text: int, masked: bool) -> dict[str, Any]:
    angles = noise(FRAMES, 16, seed=4)
    return {
        "hidden_states": noise(2, 3, 4, 6, 6),
        "encoder_hidden_states": noise(2, text, 8, seed=1),
        "timestep": torch.tensor([500, 700]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def _sd3(text: int, masked: bool) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, 6, 10),
        "encoder_hidden_states": noise(2, text, 8, seed=1),
        "pooled_projections": noise(2, 8, seed=2),
        "timestep": torch.tensor([500.0, 700.0]),
    }


def _sd3_controlnet(text: int, masked: bool) -> dict[str, Any]:
    return _sd3(text, masked) | {"block_controlnet_hidden_states": [noise(2, 15, 48, seed=5)]}


def _lumina2(text: int, masked: bool) -> dict[str, Any]:
    return {
        "hidden_states": noise(2, 4, 6, 10),
        "timestep": torch.tensor([0.5, 0.7]),
        "encoder_hidden_states": noise(2, text, 8, seed=1),
        "encoder_attention_mask": text_mask(text) if masked else torch.ones(2, text, dtype=torch.bool),
    }


FLUX = HEADS | {
    "patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 8,
    "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
FLUX2 = HEADS | {
    "patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 8,
    "timestep_guidance_channels": 8, "axes_dims_rope": (4, 4, 4, 4), "mlp_ratio": 2.0,
}  # fmt: skip
CHROMA = {name: value for name, value in FLUX.items() if name != "pooled_projection_dim"} | {
    "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1,
}  # fmt: skip
WAN = HEADS | {
    "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 32,
    "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
QWEN = HEADS | {
    "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 8,
    "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
LTX = HEADS | {
    "in_channels": 4, "out_channels": 4, "cross_attention_dim": 48, "num_layers": 2, "caption_channels": 8,
}  # fmt: skip
LTX2 = LTX | {
    "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 3, "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 24,
}  # fmt: skip
HUNYUAN = HEADS | {
    "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1,
    "mlp_ratio": 2.0, "patch_size": 2, "patch_size_t": 1, "text_embed_dim": 8, "pooled_projection_dim": 8,
    "rope_axes_dim": (4, 6, 6),
}  # fmt: skip
COSMOS = HEADS | {
    "in_channels": 4, "out_channels": 4, "num_layers": 2, "mlp_ratio": 2.0, "text_embed_dim": 8, "adaln_lora_dim": 4,
    "max_size": (4, 16, 16), "patch_size": (1, 2, 2), "concat_padding_mask": False,
}  # fmt: skip
COGVIDEOX = HEADS | {
    "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 8, "num_layers": 2, "sample_width": 6,
    "sample_height": 6, "sample_frames": 9, "max_text_seq_length": TEXT, "use_rotary_positional_embeddings": True,
}  # fmt: skip
SD3 = HEADS | {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 3, "joint_attention_dim": 8,
    "caption_projection_dim": 48, "pooled_projection_dim": 8, "pos_embed_max_size": 16, "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}  # fmt: skip
LUMINA2 = {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 64, "num_layers": 2, "num_refiner_layers": 1,
    "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "axes_dim_rope": (4, 6, 6),
    "axes_lens": (32, 16, 16), "cap_feat_dim": 8,
}  # fmt: skip


def z_image(heads: int, layers: int = 2) -> dict[str, Any]:
    return {
        "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 16 * heads, "n_layers": layers,
        "n_refiner_layers": 1, "n_heads": heads, "n_kv_heads": heads, "cap_feat_dim": 8, "axes_dims": [4, 6, 6],
        "axes_lens": [256, 32, 32],
    }  # fmt: skip


FAMILIES: dict[str, Family] = {
    "flux": Family("FluxTransformer2DModel", FLUX, _flux),
    "flux_controlnet": Family("FluxTransformer2DModel", FLUX, _flux_controlnet),
    "flux2": Family("Flux2Transformer2DModel", FLUX2, _flux2),
    "chroma": Family("ChromaTransformer2DModel", CHROMA, _chroma),
    "wan": Family("WanTransformer3DModel", WAN, _wan),
    "wan_ti2v": Family("WanTransformer3DModel", WAN, _wan_ti2v),
    "wan_i2v": Family("WanTransformer3DModel", WAN | {"image_dim": 8, "added_kv_proj_dim": 48}, _wan_i2v),
    "wan_vace": Family("WanVACETransformer3DModel", WAN | {"vace_layers": [0, 1], "vace_in_channels": 6}, _wan_vace),
    "qwen": Family("QwenImageTransformer2DModel", QWEN, _qwen),
    "qwen_controlnet": Family("QwenImageTransformer2DModel", QWEN, _qwen_controlnet),
    "qwen_edit": Family("QwenImageTransformer2DModel", QWEN | {"zero_cond_t": True}, _qwen_edit),
    "ltx": Family("LTXVideoTransformer3DModel", LTX, _ltx),
    "ltx2": Family("LTX2VideoTransformer3DModel", LTX2, _ltx2),
    "ltx2_split_rope": Family("LTX2VideoTransformer3DModel", LTX2 | {"rope_type": "split"}, _ltx2),
    "ltx2_short_audio": Family("LTX2VideoTransformer3DModel", LTX2, functools.partial(_ltx2, audio=3)),
    "hunyuan": Family("HunyuanVideoTransformer3DModel", HUNYUAN, _hunyuan),
    "hunyuan_i2v": Family(
        "HunyuanVideoTransformer3DModel", HUNYUAN | {"image_condition_type": "token_replace"}, _hunyuan
    ),
    "z_image": Family("ZImageTransformer2DModel", z_image(3), _z_image),
    "z_image_30_heads": Family("ZImageTransformer2DModel", z_image(30, layers=1), _z_image),
    "cosmos": Family("CosmosTransformer3DModel", COSMOS, _cosmos),
    "cosmos_controlnet": Family(
        "CosmosTransformer3DModel", COSMOS | {"controlnet_block_every_n": 2}, _cosmos_controlnet
    ),
    "cogvideox": Family("CogVideoXTransformer3DModel", COGVIDEOX, _cogvideox),
    "sd3": Family("SD3Transformer2DModel", SD3, _sd3),
    "sd3_controlnet": Family("SD3Transformer2DModel", SD3, _sd3_controlnet),
    "lumina2": Family("Lumina2Transformer2DModel", LUMINA2, _lumina2),
}
