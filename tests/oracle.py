"""Plain attention on one process in float64, and how close an implementation must come to it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

Numbers = dict[str, torch.Tensor]  # out, lse, dq, dk, dv

_CHUNK = 1 << 21  # scores held at a time


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [B, S, H, D] over k [B, S_kv, H_kv, D], v [B, S_kv, H_kv, D_v], in float64 and in chunks of rows.

    Shapes: → out [B, S, H, D_v], lse [B, H, S] (natural log). Query head i reads KV head i // (H // H_kv).
    Causal: query i sees key j ≤ i. A query that sees no key: out 0, lse −inf.
    """
    chunks = list(_chunks(q.double(), k.double(), v.double(), is_causal, softmax_scale))
    return torch.cat([out for _, out, _ in chunks], 1), torch.cat([lse for _, _, lse in chunks], 2)


def oracle_with_grads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> Numbers:
    """out and lse as oracle(), and the gradients of (out * grad_out).sum() by autograd."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    outs, lses = [], []
    for begin, out, lse in _chunks(*leaves, is_causal, softmax_scale):
        (out * grad_out[:, begin : begin + out.size(1)].double()).sum().backward()
        outs.append(out.detach())
        lses.append(lse.detach())
    dq, dk, dv = (torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
    return {"out": torch.cat(outs, 1), "lse": torch.cat(lses, 2), "dq": dq, "dk": dk, "dv": dv}


def _chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, softmax_scale: float | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first row, out, lse) of runs of query rows."""
    batch, seq_len, heads, head_dim = q.shape
    kv_len, per_group = k.size(1), heads // k.size(2)
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    rows = max(1, _CHUNK // max(1, batch * heads * kv_len))
    for begin in range(0, max(1, seq_len), rows):
        part = q[:, begin : begin + rows]
        seen = min(kv_len, begin + rows) if is_causal else kv_len  # the keys that some row of the chunk sees
        keys = k[:, :seen].repeat_interleave(per_group, 2)
        values = v[:, :seen].repeat_interleave(per_group, 2)
        if seen == 0:
            out = q.new_zeros(batch, part.size(1), heads, v.size(3)) + 0.0 * part.sum()
            yield begin, out, q.new_full((batch, heads, part.size(1)), -math.inf)
            continue
        scores = torch.einsum("bqhd,bkhd->bhqk", part, keys) * scale
        if is_causal:
            positions = torch.arange(begin, begin + part.size(1)).unsqueeze(1)
            scores = scores.masked_fill(torch.arange(seen) > positions, -math.inf)
        lse = torch.logsumexp(scores, -1)
        yield begin, torch.einsum("bhqk,bkhd->bqhd", (scores - lse.unsqueeze(-1)).exp(), values), lse


def single_process(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> Numbers:
    """torch's own fused CPU kernel on one process, in the dtype of the inputs, D_v = D: out, lse, and with a grad_out
    dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_(grad_out is not None) for x in (q, k, v)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in leaves), is_causal=is_causal, scale=softmax_scale
    )
    numbers = {"out": out.detach().transpose(1, 2), "lse": lse.detach()}
    if grad_out is not None:
        grads = torch.autograd.grad(out, leaves, grad_out.transpose(1, 2))
        numbers.update(zip(("dq", "dk", "dv"), grads, strict=True))
    return numbers


def max_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference; equal infinities differ by nothing, NaN by infinity."""
    if got.shape != reference.shape:
        return math.inf
    got, reference = got.double(), reference.double()
    difference = (got - reference).abs().masked_fill(got == reference, 0.0)
    return float(difference.nan_to_num(math.inf).max()) if difference.numel() else 0.0


def tolerance(dtype: torch.dtype, reference: torch.Tensor, single: torch.Tensor | None = None) -> float:
    """How far a result in `dtype` may lie from the float64 reference.

    single: the same numbers from single_process, needed for 16-bit types: how far one process lies itself.
    """
    finite = reference[reference.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if dtype == torch.float64:
        return 1e-12 * max(1.0, largest)
    if dtype == torch.float32:
        return 1e-5 * max(1.0, largest)
    assert single is not None, f"the tolerance of {dtype} needs what a single process computes"
    return 2.0 * max_error(single, reference) + torch.finfo(dtype).eps * largest
