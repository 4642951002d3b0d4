"""Context-parallel attention in one function of plain torch, to copy without installing anything."""

# mypy: ignore-errors
# (left without types: it must stay short enough to copy)

import torch
import torch.distributed as dist
import torch.nn.functional as F


def context_parallel_attention(q, k, v, seq_len=None, group=None):
    """q [B, S_local, H, D], k/v [B, S_local, H_kv, D] -> out like q. Shards of equal length, in rank order; if the
    sequence was padded at its end, seq_len is its real length and no query sees the padding. Differentiable. Not for
    causal attention: is_causal=True would compare local with global positions."""
    world, rows = dist.get_world_size(group), torch.tensor([k.shape[1], q.shape[1]], device=k.device)
    every = [torch.empty_like(rows) for _ in range(world)]
    dist.all_gather(every, rows, group=group)
    lengths = sorted({n for pair in every for n in pair.tolist()})
    if len(lengths) != 1:
        total = sum(int(pair[0]) for pair in every)
        raise ValueError(
            f"local lengths {[p.tolist() for p in every]} (k, q) differ: pad the end of the sequence from "
            f"{total} to {-(-total // world) * world} tokens, cut equal shards, pass seq_len={total}"
        )

    class GatherTokens(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            shards = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(shards, x, group=group)
            return torch.cat(shards, dim=1)

        @staticmethod
        def backward(ctx, grad):  # a rank's keys served every rank's queries: their gradients add up
            send = torch.stack(grad.chunk(world, dim=1))
            dist.all_to_all_single(received := torch.empty_like(send), send, group=group)
            return received.sum(dim=0)

    k, v = (GatherTokens.apply(x.contiguous())[:, :seq_len].transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True).transpose(1, 2)
