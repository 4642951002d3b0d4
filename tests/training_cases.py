"""What the tests of training share: a small decoder, of which only attention and dropout know about ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ulysses_attention as ua

CLASSES, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 11, 24, 4, 2, 6, 2
IGNORED = -100

# x, p, seed -> x
Dropout = Callable[[torch.Tensor, float, tuple[int, ...]], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One process: softmax written out."""
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k).float() * q.size(3) ** -0.5
    future = torch.ones(q.size(1), q.size(1), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def sharded_attention(group: Any, layout: ua.SequenceLayout) -> Attend:
    return functools.partial(ua.ulysses_attention, cp_group=group, layout=layout, is_causal=True)


def dropout_of(layout: ua.SequenceLayout, rank: int) -> Dropout:
    return lambda x, p, seed: ua.token_dropout(x, p, seed, layout, rank)


def whole_dropout(seq_len: int) -> Dropout:
    return dropout_of(ua.SequenceLayout.from_lengths([seq_len]), 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, attend: Attend, drop: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + drop(self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    """tokens [B, S_local] -> logits [B, S_local, CLASSES]."""

    def __init__(self, attend: Attend, dropout: Dropout, p: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.attend, self.dropout, self.p, self.recompute = attend, dropout, p, recompute
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor, seed: tuple[int, ...] = (0,)) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):

            def run(x: torch.Tensor, block: nn.Module = block, index: int = index) -> torch.Tensor:
                return block(x, self.attend, lambda y: self.dropout(y, self.p, (*seed, index)))

            x = checkpoint(run, x, use_reentrant=False) if self.recompute else run(x)
        return self.head(x)


def new_decoder(attend: Attend, dropout: Dropout, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    """The same parameters in every thread and process."""
    model = Decoder(attend, dropout, **options).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 2:
                parameter.copy_(values * parameter.size(1) ** -0.5)
            else:
                parameter.copy_(0.1 * values + name.endswith("norm.weight"))
    return model


def new_batch(seq_len: int, batch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and labels [B, S]: twice the token before, plus its place; a quarter has no label."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(CLASSES, (batch, seq_len), generator=generator)
    labels = (2 * tokens + torch.roll(tokens, 1, dims=1)) % CLASSES
    return tokens, labels.masked_fill(torch.rand(batch, seq_len, generator=generator) < 0.25, IGNORED)


def loss_of_one_process(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(tokens, **options).flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def own_sum_and_count(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], layout: ua.SequenceLayout, rank: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of this rank's real, labelled tokens, and how many these are."""
    tokens, labels = (layout.shard(x, rank) for x in batch)
    real = layout.lengths[rank]
    logits, targets = model(tokens, **options)[:, :real], labels[:, :real]
    sums = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return sums, (targets != IGNORED).sum()


def layouts_of(seq_len: int, world: int) -> dict[str, ua.SequenceLayout]:
    exact = ua.UlyssesContextParallelPolicy(require_seq_divisible=False)
    return {"padded": ua.SequenceLayout(seq_len, world), "uneven": ua.SequenceLayout(seq_len, world, exact)}
