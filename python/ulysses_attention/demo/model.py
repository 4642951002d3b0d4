"""A small bidirectional byte transformer. How it attends is an argument; nothing else knows about ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .task import PASSAGE, VOCABULARY

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

WIDTH = 64
HEADS = 4
LAYERS = 2


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention to the given tokens. Shapes: q, k, v [B, S, H, D] -> out like q."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # no key bias: its true gradient is 0
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3 * HEADS, -1)).split(HEADS, dim=2)
        x = x + self.proj(attend(q, k, v).flatten(2))
        hidden: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return hidden


class ByteTransformer(nn.Module):
    """Shapes: tokens [B, S] int64, positions [S] int64 (place in the passage) -> logits [B, S, 256]."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(PASSAGE, WIDTH)  # shared by the copies of the passage
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)
        generator = torch.Generator().manual_seed(seed)  # its own: thread ranks share the global one
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith(("bytes", "places")):
                    parameter.normal_(0.0, 1.0, generator=generator)
                elif parameter.dim() == 2:
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.bytes(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, attend)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
