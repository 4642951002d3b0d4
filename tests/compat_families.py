"""Tiny transformers of diffusers, by family: a model whose attention moves its output, and uneven inputs for it.

A family that the installed version does not have raises ImportError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

Inputs = dict[str, Any]
Case = tuple[torch.nn.Module, Inputs]

BLOCKS = {"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 16}
TEXT, TEXT_DIM = 7, 8
IMAGE = 21  # tokens of the families that are given tokens
VIDEO = (3, 6, 6)  # frames, height, width: 27 tokens in patches of 1 x 2 x 2
TIMES = torch.tensor([500.0, 700.0])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sensitive(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights of unit gain and norms near 1, so that nothing is gated away."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            noise = torch.randn(p.shape, generator=generator)
            if leaf == "weight":
                p.copy_(noise / p[0].numel() ** 0.5 if p.dim() > 1 else 1 + 0.1 * noise)
            else:
                p.copy_((0.1 if leaf == "bias" else 0.5) * noise)
    return model.eval()


def ids(tokens: int) -> torch.Tensor:
    """Positions that differ. Shapes: [tokens, 3]."""
    return torch.arange(tokens * 3).reshape(tokens, 3).float() % 7


def text_mask() -> torch.Tensor:
    """Which text tokens count; in the second row the last three do not. Shapes: [2, TEXT]."""
    mask = torch.ones(2, TEXT, dtype=torch.bool)
    mask[1, 4:] = False
    return mask


def times_by_token(tokens: int, first: int) -> torch.Tensor:
    """A time for each token, 0 in the first frame. Shapes: [2, tokens]."""
    return TIMES[:, None] * (torch.arange(tokens) >= first)


def _joint(time: torch.Tensor) -> Inputs:
    """Image tokens and text tokens, both from outside."""
    return {
        "hidden_states": draw(2, IMAGE, 4),
        "encoder_hidden_states": draw(2, TEXT, TEXT_DIM, seed=1),
        "timestep": time,
    }


def _video(time: torch.Tensor = TIMES) -> Inputs:
    text = draw(2, TEXT, TEXT_DIM, seed=1)
    return {"hidden_states": draw(2, 4, *VIDEO), "encoder_hidden_states": text, "timestep": time}


def flux(**changes: Any) -> Case:
    from diffusers import FluxTransformer2DModel

    config = BLOCKS | {"num_single_layers": 2, "patch_size": 1, "in_channels": 4, "joint_attention_dim": TEXT_DIM}
    config |= {"pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)}
    inputs = _joint(TIMES / 1000) | {"pooled_projections": draw(2, 8, seed=2)}
    inputs |= {"img_ids": ids(IMAGE), "txt_ids": torch.zeros(TEXT, 3)}
    return FluxTransformer2DModel(**(config | changes)), inputs


def flux2() -> Case:
    from diffusers import Flux2Transformer2DModel

    config = BLOCKS | {"num_single_layers": 2, "patch_size": 1, "in_channels": 4, "joint_attention_dim": TEXT_DIM}
    config |= {"timestep_guidance_channels": 8, "axes_dims_rope": (4, 4, 4, 4), "mlp_ratio": 2.0}
    four = {f"{name}_ids": torch.cat([torch.zeros(n, 1), ids(n)], 1)[None].expand(2, -1, -1)
            for name, n in (("img", IMAGE), ("txt", TEXT))}  # fmt: skip
    return Flux2Transformer2DModel(**config), _joint(TIMES / 1000) | four | {"guidance": torch.tensor([1.0, 2.0])}


def chroma() -> Case:
    from diffusers import ChromaTransformer2DModel

    config = BLOCKS | {"num_single_layers": 2, "patch_size": 1, "in_channels": 4, "joint_attention_dim": TEXT_DIM}
    config |= {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    mask = torch.cat([text_mask(), torch.ones(2, IMAGE, dtype=torch.bool)], 1)
    inputs = _joint(TIMES / 1000) | {"img_ids": ids(IMAGE), "txt_ids": torch.zeros(TEXT, 3), "attention_mask": mask}
    return ChromaTransformer2DModel(axes_dims_rope=(4, 4, 8), **config), inputs


WAN = BLOCKS | {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": TEXT_DIM, "freq_dim": 8}
WAN |= {"ffn_dim": 32, "rope_max_seq_len": 32}


def wan() -> Case:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**WAN), _video()


def wan_ti2v() -> Case:
    """A time for each token."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**WAN), _video(times_by_token(27, first=9))


def wan_i2v() -> Case:
    from diffusers import WanTransformer3DModel

    inputs = _video() | {"encoder_hidden_states": draw(2, 512, TEXT_DIM, seed=1)}  # the model cuts it off at 512
    inputs["encoder_hidden_states_image"] = draw(2, 5, 8, seed=2)
    return WanTransformer3DModel(image_dim=8, added_kv_proj_dim=48, **WAN), inputs


def wan_vace() -> Case:
    from diffusers import WanVACETransformer3DModel

    inputs = _video() | {"control_hidden_states": draw(2, 6, *VIDEO, seed=3)}
    return WanVACETransformer3DModel(vace_layers=[0, 1], vace_in_channels=6, **WAN), inputs


def qwen_image() -> Case:
    from diffusers import QwenImageTransformer2DModel

    config = BLOCKS | {"patch_size": 2, "in_channels": 16, "out_channels": 4, "joint_attention_dim": TEXT_DIM}
    inputs = _joint(TIMES / 1000) | {"hidden_states": draw(2, 15, 16), "img_shapes": [[(1, 3, 5)]] * 2}
    inputs["encoder_hidden_states_mask"] = text_mask()
    model = QwenImageTransformer2DModel(axes_dims_rope=(4, 6, 6), **config)
    if "txt_seq_lens" in inspect.signature(model.forward).parameters:  # needed up to diffusers 0.36
        inputs["txt_seq_lens"] = [TEXT, TEXT]
    return model, inputs


LTX = BLOCKS | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 48, "caption_channels": TEXT_DIM}
LTX_SIZE = {"num_frames": 3, "height": 3, "width": 3}


def ltx() -> Case:
    from diffusers import LTXVideoTransformer3DModel

    inputs = _joint(times_by_token(27, first=9)) | {"hidden_states": draw(2, 27, 4)}
    return LTXVideoTransformer3DModel(**LTX), inputs | {"encoder_attention_mask": text_mask()} | LTX_SIZE


def ltx2() -> Case:
    from diffusers import LTX2VideoTransformer3DModel

    audio = {"audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 3}
    audio |= {"audio_attention_head_dim": 8, "audio_cross_attention_dim": 24}
    inputs = _joint(times_by_token(27, first=9)) | {"hidden_states": draw(2, 27, 4)} | LTX_SIZE
    inputs |= {"audio_hidden_states": draw(2, 5, 4, seed=3), "audio_timestep": TIMES, "audio_num_frames": 5}
    inputs["audio_encoder_hidden_states"] = draw(2, TEXT, TEXT_DIM, seed=2)
    return LTX2VideoTransformer3DModel(**LTX, **audio), inputs


def hunyuan_video(**changes: Any) -> Case:
    from diffusers import HunyuanVideoTransformer3DModel

    config = BLOCKS | {"in_channels": 4, "out_channels": 4, "num_single_layers": 2, "num_refiner_layers": 1}
    config |= {"mlp_ratio": 2.0, "patch_size": 2, "patch_size_t": 1, "text_embed_dim": TEXT_DIM}
    config |= {"pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)}
    inputs = _video() | {"encoder_attention_mask": text_mask().long(), "pooled_projections": draw(2, 8, seed=2)}
    inputs["guidance"] = torch.tensor([1000.0, 2000.0])
    return HunyuanVideoTransformer3DModel(**config, **changes), inputs


def hunyuan_video_i2v() -> Case:
    return hunyuan_video(image_condition_type="token_replace")


def z_image() -> Case:
    from diffusers import ZImageTransformer2DModel

    config = {"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 48, "n_layers": 2}
    config |= {"n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3, "cap_feat_dim": TEXT_DIM}
    images = [draw(4, 1, 6, 10), draw(4, 1, 6, 10, seed=3)]
    captions = [draw(7, TEXT_DIM, seed=1), draw(40, TEXT_DIM, seed=2)]  # 32 and 64 tokens with padding: a mask
    model = ZImageTransformer2DModel(axes_dims=[4, 6, 6], axes_lens=[256, 32, 32], **config)
    return model, {"x": images, "t": TIMES / 1000, "cap_feats": captions}


def cosmos() -> Case:
    from diffusers import CosmosTransformer3DModel

    config = BLOCKS | {"in_channels": 4, "out_channels": 4, "mlp_ratio": 2.0, "text_embed_dim": TEXT_DIM}
    config |= {"adaln_lora_dim": 4, "max_size": (4, 16, 16), "patch_size": (1, 2, 2), "concat_padding_mask": False}
    times = (TIMES / 1000)[:, None, None, None, None].expand(2, 1, 3, 1, 1)
    return CosmosTransformer3DModel(**config), _video(times) | {"fps": 16}


def cogvideox(**changes: Any) -> Case:
    from diffusers import CogVideoXTransformer3DModel

    config = BLOCKS | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": TEXT_DIM}
    config |= {"sample_width": 6, "sample_height": 6, "sample_frames": 9, "max_text_seq_length": TEXT}
    angles = draw(27, 16, seed=4)
    inputs = _video(TIMES.long()) | {"hidden_states": draw(2, 3, 4, 6, 6)}
    inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    return CogVideoXTransformer3DModel(use_rotary_positional_embeddings=True, **(config | changes)), inputs


def sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    config = BLOCKS | {"num_layers": 3, "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4}
    config |= {"joint_attention_dim": TEXT_DIM, "caption_projection_dim": 48, "pooled_projection_dim": 8}
    inputs = _joint(TIMES) | {"hidden_states": draw(2, 4, 6, 10), "pooled_projections": draw(2, 8, seed=2)}
    last = {"pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm"}
    return SD3Transformer2DModel(**config, **last), inputs


def lumina2() -> Case:
    """Four query heads to two of keys and values."""
    from diffusers import Lumina2Transformer2DModel

    config = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 64, "num_layers": 2}
    config |= {"num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16}
    inputs = _joint(TIMES / 1000) | {"hidden_states": draw(2, 4, 6, 10), "encoder_attention_mask": text_mask()}
    last = {"axes_dim_rope": (4, 6, 6), "axes_lens": (32, 16, 16), "cap_feat_dim": TEXT_DIM}
    return Lumina2Transformer2DModel(**config, **last), inputs


def _sensitive(make: Callable[[], Case]) -> Callable[[], Case]:
    def case() -> Case:
        model, inputs = make()
        return sensitive(model), inputs

    return case


MAKERS = (flux, flux2, chroma, wan, wan_ti2v, wan_i2v, wan_vace, qwen_image, ltx, ltx2, hunyuan_video)
MAKERS += (hunyuan_video_i2v, z_image, cosmos, cogvideox, sd3, lumina2)
FAMILIES: dict[str, Callable[[], Case]] = {make.__name__: _sensitive(make) for make in MAKERS}
