"""Two streams that see different keys: understanding tokens see themselves, causally; generation tokens see both.

One call per stream. The second one's queries are the generation tokens and its keys those of both streams, each rank's
own side by side: without causality the order of the keys does not matter. Both streams are cut unevenly over 3 ranks.
Run: python examples/two_streams.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from ulysses_attention import SequenceLayout, UlyssesContextParallelPolicy, run_ranks, ulysses_attention

CP_SIZE = 3
UNDERSTANDING, GENERATION, HEADS, KV_HEADS, HEAD_DIM = 13, 20, 4, 2, 16
TOLERANCE = 1e-5
EXACT = UlyssesContextParallelPolicy(require_seq_divisible=False)  # no padding rows that would stand between the keys

Stream = list[torch.Tensor]  # q, k, v


def two_streams(
    understanding: Stream, generation: Stream, group: Any, layouts: tuple[SequenceLayout, SequenceLayout]
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's output of both streams, from this rank's q, k and v of both. Five collectives, five in backward."""
    seen = ulysses_attention(*understanding, group, layout=layouts[0], is_causal=True)
    keys, values = (torch.cat(pair, dim=1) for pair in zip(understanding[1:], generation[1:], strict=True))
    both = SequenceLayout.from_lengths([a + b for a, b in zip(layouts[0].lengths, layouts[1].lengths, strict=True)])
    made = ulysses_attention(generation[0], keys, values, group, layout=layouts[1], kv_layout=both)
    return seen, made


def one_process(understanding: Stream, generation: Stream) -> torch.Tensor:
    """The same in float64 as one attention with a mask over [understanding | generation]."""
    q, k, v = (torch.cat(pair, 1).double().transpose(1, 2) for pair in zip(understanding, generation, strict=True))
    visible = torch.ones(UNDERSTANDING + GENERATION, UNDERSTANDING + GENERATION, dtype=torch.bool)
    visible[:UNDERSTANDING] = visible[:UNDERSTANDING].tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(1, 2)


def make_stream(tokens: int, seed: int) -> Stream:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def main() -> int:
    streams = make_stream(UNDERSTANDING, 0), make_stream(GENERATION, 1)
    layouts = SequenceLayout(UNDERSTANDING, CP_SIZE, EXACT), SequenceLayout(GENERATION, CP_SIZE, EXACT)

    def on_rank(rank: int, group: Any) -> list[torch.Tensor]:
        mine = [[layout.shard(x.detach(), rank).clone().requires_grad_() for x in stream]
                for stream, layout in zip(streams, layouts, strict=True)]  # fmt: skip
        outs = two_streams(mine[0], mine[1], group, layouts)
        grads = torch.autograd.grad(outs, mine[0] + mine[1], outs)
        return [x.detach() for x in outs] + list(grads)

    ranks = [torch.cat(parts, dim=1) for parts in zip(*run_ranks(on_rank, CP_SIZE), strict=True)]
    expected = one_process(*streams)
    gradients = torch.autograd.grad(expected, streams[0] + streams[1], expected)
    wanted = [*expected.detach().split([UNDERSTANDING, GENERATION], dim=1), *gradients]
    errors = [float((got - x).abs().max()) for got, x in zip(ranks, wanted, strict=True)]
    names = ["understanding", "generation"]
    names += [f"{stream}: gradient of {x}" for stream in names for x in "qkv"]
    for name, error in zip(names, errors, strict=True):
        print(f"{name:29} largest difference to one process {error:.1e}")
    ok = max(errors) <= TOLERANCE
    print("As expected." if ok else "NOT as expected.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
