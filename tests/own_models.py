"""Small transformers that no plan is known for, of diffusers and of our own."""

from __future__ import annotations

from typing import Any

import torch

from families import FAMILIES, HEADS, grid, noise, wake

WIDTH = 48


class Block(torch.nn.Module):
    def __init__(self) -> None:
        from diffusers.models.attention_processor import Attention, AttnProcessor2_0

        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attn1 = Attention(query_dim=WIDTH, heads=3, dim_head=16, processor=AttnProcessor2_0())
        self.attn2 = Attention(
            query_dim=WIDTH, cross_attention_dim=8, heads=3, dim_head=16, processor=AttnProcessor2_0()
        )
        self.ff = torch.nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden_states: torch.Tensor, text: torch.Tensor, strength: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden_states = hidden_states + self.attn1(self.norm(hidden_states))
        if strength is not None:  # a number for each token
            hidden_states = hidden_states * strength[..., None]
        hidden_states = hidden_states + self.attn2(hidden_states, text)
        return hidden_states + torch.nn.functional.gelu(self.ff(hidden_states))


class OwnTransformer(torch.nn.Module):
    """Video tokens that attend to each other and to text; each token may have a strength."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in = torch.nn.Linear(4, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.proj_out = torch.nn.Linear(WIDTH, 4)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        strength: torch.Tensor | None = None,
        return_dict: bool = False,
    ) -> torch.Tensor:
        hidden_states = self.proj_in(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, encoder_hidden_states, strength)
        out: torch.Tensor = self.proj_out(hidden_states)
        return out


def own() -> tuple[torch.nn.Module, dict[str, Any]]:
    return wake(OwnTransformer()), {
        "hidden_states": noise(2, 13, 4) + grid(13, 4) / 4,
        "encoder_hidden_states": noise(2, 5, 8, seed=1),
    }


def own_with_strength() -> tuple[torch.nn.Module, dict[str, Any]]:
    model, inputs = own()
    return model, inputs | {"strength": 1 + 0.5 * noise(2, 13, seed=2)}


def cogview4() -> tuple[torch.nn.Module, dict[str, Any]]:
    from diffusers import CogView4Transformer2DModel

    model = CogView4Transformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, text_embed_dim=8, time_embed_dim=8, condition_dim=4,
        pos_embed_max_size=16, sample_size=16, rope_axes_dim=(16, 16), **HEADS,
    )  # fmt: skip
    sizes = {name: torch.tensor([[6.0, 10.0]] * 2) for name in ("original_size", "target_size", "crop_coords")}
    return wake(model), sizes | {
        "hidden_states": noise(2, 4, 6, 10),
        "encoder_hidden_states": noise(2, 7, 8, seed=1),
        "timestep": torch.tensor([500.0, 700.0]),
    }


def pixart() -> tuple[torch.nn.Module, dict[str, Any]]:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, cross_attention_dim=48, sample_size=8, caption_channels=8,
        norm_type="ada_norm_single", **HEADS,
    )  # fmt: skip
    return wake(model), {
        "hidden_states": noise(2, 4, 6, 10),
        "encoder_hidden_states": noise(2, 7, 8, seed=1),
        "timestep": torch.tensor([500, 700]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def chrono_edit() -> tuple[torch.nn.Module, dict[str, Any]]:
    from diffusers import ChronoEditTransformer3DModel

    model = ChronoEditTransformer3DModel(
        patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=32, num_layers=2,
        rope_max_seq_len=32, **HEADS,
    )  # fmt: skip
    return wake(model), FAMILIES["wan"].inputs(text=7, masked=False)


def helios() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Its own plan names 40 blocks."""
    from diffusers import HeliosTransformer3DModel

    model = HeliosTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
        freq_dim=8, ffn_dim=16, num_layers=40, rope_dim=(4, 4, 4), guidance_cross_attn=False,
        zero_history_timestep=False, has_multi_term_memory_patch=False,
    )  # fmt: skip
    return wake(model), FAMILIES["wan"].inputs(text=7, masked=False)


def auraflow() -> tuple[torch.nn.Module, dict[str, Any]]:
    from diffusers import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
        joint_attention_dim=8, caption_projection_dim=48, pos_embed_max_size=64, **HEADS,
    )  # fmt: skip
    return wake(model), {
        "hidden_states": noise(2, 4, 6, 10),
        "encoder_hidden_states": noise(2, 7, 8, seed=1),
        "timestep": torch.tensor([0.5, 0.7]),
    }


def mochi() -> torch.nn.Module:
    from diffusers import MochiTransformer3DModel

    return MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=8, time_embed_dim=8, max_sequence_length=16,
    )  # fmt: skip


class BareAttention(torch.nn.Module):
    """Attention without a processor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def with_bare_attention() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The attention over the video of the second block cannot be exchanged."""
    model, inputs = own()
    model.blocks[1].attn1 = BareAttention()  # type: ignore[index,union-attr]
    return model, inputs


def hidream() -> torch.nn.Module:
    from diffusers import HiDreamImageTransformer2DModel

    return HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, caption_channels=[8, 8],
        text_emb_dim=8, num_routed_experts=2, num_activated_experts=1, axes_dims_rope=(8, 8), max_resolution=(16, 16),
        llama_layers=[0, 1], **HEADS,
    )  # fmt: skip


def sana() -> torch.nn.Module:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, num_cross_attention_heads=3, cross_attention_head_dim=16,
        cross_attention_dim=48, caption_channels=8, sample_size=8, **HEADS,
    )  # fmt: skip
