"""Two usual mistakes with context-parallel attention, and the fix beside each. No GPU, 4 ranks.

Run: python examples/reproduce.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from ulysses_attention import SequenceLayout, UlyssesContextParallelPolicy, run_ranks, ulysses_attention

CP_SIZE = 4
TOLERANCE = 1e-5


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of q to the given k and v, all [B, S, H, D]."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def largest_error(run: str, inputs: list[torch.Tensor]) -> float:
    """The largest difference between a run on CP_SIZE ranks and float64 attention in one process."""
    layout = SequenceLayout(inputs[0].shape[1], CP_SIZE)  # default policy: pads the end to equal shards

    def on_rank(rank: int, group: object) -> torch.Tensor:
        q, k, v = (layout.shard(x, rank) for x in inputs)
        if run == "local K/V":
            real = layout.lengths[rank]
            out = torch.zeros_like(q)
            out[:, :real] = attention(q[:, :real], k[:, :real], v[:, :real])  # nothing fails
        else:
            out = ulysses_attention(q, k, v, group, CP_SIZE, layout=layout)
        return layout.gather(out, group, grad="slice")

    expected = attention(*(x.double() for x in inputs))
    return float((torch.stack(run_ranks(on_rank, CP_SIZE)).double() - expected).abs().max())


def length_error() -> int:
    """The refused length, and the padded length of the policy, which works. Returns the length to use."""
    seq_len = 3000
    strict = UlyssesContextParallelPolicy(auto_pad=False)
    print(f"1. The length. {seq_len} tokens on {CP_SIZE} ranks, under a policy that does not pad by itself:")
    try:
        SequenceLayout(seq_len, CP_SIZE, strict)
        raise SystemExit("expected an error: this length must be refused")
    except ValueError as error:
        print(f"   ValueError: {error}")
    padded = strict.padded_seq_len(seq_len, CP_SIZE)
    lengths = SequenceLayout(padded, CP_SIZE, strict).lengths
    print(f"   The pad that works: {seq_len} -> {padded} tokens, {list(lengths)} a rank.")
    layout = SequenceLayout(seq_len, CP_SIZE)
    print(f"   Or leave it to the default policy: real tokens a rank {list(layout.lengths)}, padding never attended.\n")
    return seq_len


def main() -> int:
    seq_len = length_error()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, seq_len, 2, 16, generator=generator) for _ in range(3)]
    print("2. The keys. Each rank holds its own tokens; attention must see everybody's.")
    wrong = largest_error("local K/V", inputs)
    right = largest_error("ulysses_attention", inputs)
    print(f"   local K/V, attention(q, k, v) on the shard:       largest error {wrong:.1e}, and no exception")
    print(f"   ulysses_attention(q, k, v, group, layout=layout): largest error {right:.1e}")
    ok = right <= TOLERANCE and wrong > 100 * TOLERANCE
    print("\n" + ("As expected." if ok else "NOT as expected."))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
