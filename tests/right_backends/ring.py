"""K and V travel round a ring; partial results are merged by lse. Backward sends K, V and their gradients round."""

import math
from typing import Any

import torch
from torch.nn import functional

from mutants.parts import lengths_of


def _rotate(x: torch.Tensor, group: Any) -> torch.Tensor:
    rank, world = group.rank(), group.size()
    if world == 1:
        return x
    received = torch.empty_like(x)
    works = [group.send([x], (rank + 1) % world, 0), group.recv([received], (rank - 1) % world, 0)]
    for work in works:
        work.wait()
    return received


class _Ring(torch.autograd.Function):
    """q [B, H, S, D], k, v [B, H, rows, D] with every rank's KV rows padded to the same number, in float."""

    @staticmethod
    def scores(ctx: Any, q: torch.Tensor, k: torch.Tensor, step: int) -> torch.Tensor:
        source = (ctx.group.rank() - step) % ctx.group.size()
        begin = sum(ctx.kv_rows[:source])
        positions = torch.arange(begin, begin + k.size(2))
        hidden = positions >= begin + ctx.kv_rows[source]
        if ctx.is_causal:
            hidden = hidden | (positions > ctx.begin + torch.arange(q.size(2)).unsqueeze(1))
        return (q @ k.transpose(2, 3) * ctx.scale).masked_fill(hidden, -math.inf)

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.group, ctx.kv_rows, ctx.begin, ctx.is_causal, ctx.scale = call
        block = torch.cat([k, v], 3)
        out = q.new_zeros(*q.shape[:3], v.size(3))
        lse = q.new_full(q.shape[:3], -math.inf)
        for step in range(ctx.group.size()):
            keys, values = block.split([k.size(3), v.size(3)], 3)
            scores = _Ring.scores(ctx, q, keys, step)
            merged = torch.logaddexp(lse, scores.logsumexp(-1))
            finite = merged.masked_fill(merged == -math.inf, 0.0).unsqueeze(-1)
            out = out * (lse.unsqueeze(-1) - finite).exp() + (scores - finite).exp() @ values
            lse = merged
            if step + 1 < ctx.group.size():
                block = _rotate(block, ctx.group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        sizes = [k.size(3), v.size(3)]
        finite = lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
        along_out = (grad * out).sum(-1, keepdim=True)
        dq, block, sums = torch.zeros_like(q), torch.cat([k, v], 3), torch.zeros_like(torch.cat([k, v], 3))
        for step in range(ctx.group.size()):
            keys, values = block.split(sizes, 3)
            weights = (_Ring.scores(ctx, q, keys, step) - finite).exp()
            d_scores = weights * (grad @ values.transpose(2, 3) - along_out) * ctx.scale
            dq += d_scores @ keys
            sums += torch.cat([d_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ grad], 3)
            block, sums = _rotate(block, ctx.group), _rotate(sums, ctx.group)
        return dq, *sums.split(sizes, 3), None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    layout: Any = None,
    kv_layout: Any = None,
    return_lse: bool = False,
) -> Any:
    rank = group.rank()
    q_rows, kv_rows = lengths_of(q, k, group, layout, kv_layout)
    scale = q.size(3) ** -0.5 if softmax_scale is None else softmax_scale

    def ready(x: torch.Tensor, real: int, rows: int) -> torch.Tensor:
        x = functional.pad(x[:, :real].transpose(1, 2), (0, 0, 0, rows - real))
        return x.repeat_interleave(q.size(2) // x.size(1), 1).to(torch.promote_types(x.dtype, torch.float32))

    own, longest = q_rows[rank], max(kv_rows)
    call = (group, kv_rows, sum(q_rows[:rank]), is_causal, scale)
    shards = (ready(q, own, own), ready(k, kv_rows[rank], longest), ready(v, kv_rows[rank], longest))
    out, lse = _Ring.apply(*shards, call)
    behind = q.size(1) - own
    out = functional.pad(out, (0, 0, 0, behind)).transpose(1, 2).to(q.dtype)
    return (out, functional.pad(lse, (0, behind), value=-math.inf)) if return_lse else out
