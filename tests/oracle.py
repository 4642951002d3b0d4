"""Plain attention on one process in float64, and how close an implementation must come to it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

import torch

Numbers = dict[str, torch.Tensor]  # out, lse, dq, dk, dv

_CHUNK = 1 << 18  # scores held at a time: 2 MiB


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """On a busy machine, torch's threads wait for each other longer than these small products take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [B, S, H, D] over k [B, S_kv, H_kv, D], v [B, S_kv, H_kv, D_v], in float64 and in chunks.

    Shapes: → out [B, S, H, D_v], lse [B, H, S] (natural log). Query head i reads KV head i // (H // H_kv).
    Causal: query i sees key j ≤ i. A query that sees no key: out 0, lse −inf.
    """
    numbers = _in_chunks(q, k, v, None, is_causal, softmax_scale)
    return numbers["out"], numbers["lse"]


def oracle_with_grads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> Numbers:
    """out and lse as oracle(), and the gradients of (out * grad_out).sum() by autograd."""
    return _in_chunks(q, k, v, grad_out, is_causal, softmax_scale)


@one_thread()
def _in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float | None,
) -> Numbers:
    """A loop over query rows and over KV heads, each KV head with the queries that read it: what fits in a cache."""
    (batch, seq_len, heads, head_dim), (kv_len, kv_heads, v_dim) = q.shape, v.shape[1:]
    per_kv = heads // kv_heads
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale

    def by_query(x: torch.Tensor) -> torch.Tensor:  # [B, S, H, ·] → [B · H_kv, H / H_kv, S, ·]
        return x.detach().double().transpose(1, 2).reshape(batch * kv_heads, per_kv, seq_len, x.size(3))

    def by_key(x: torch.Tensor) -> torch.Tensor:  # [B, S_kv, H_kv, ·] → [B · H_kv, S_kv, ·]
        return x.detach().double().transpose(1, 2).reshape(batch * kv_heads, kv_len, x.size(3))

    queries, keys, values = by_query(q), by_key(k), by_key(v)
    grads = None if grad_out is None else by_query(grad_out)
    out = queries.new_zeros(batch * kv_heads, per_kv, seq_len, v_dim)
    lse = queries.new_full((batch * kv_heads, per_kv, seq_len), -math.inf)
    dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)

    step = min(max(1, seq_len), max(64, _CHUNK // max(1, per_kv * kv_len)))
    together = max(1, _CHUNK // max(1, per_kv * step * kv_len))
    corners = itertools.product(range(0, batch * kv_heads, together), range(0, seq_len, step))
    for head, row in corners if kv_len > 0 else ():
        n, rows = slice(head, head + together), slice(row, min(seq_len, row + step))
        seen = slice(0, min(kv_len, rows.stop) if is_causal else kv_len)  # the keys that some row of the chunk sees
        part = [x.requires_grad_(grads is not None) for x in (queries[n, :, rows], keys[n, seen], values[n, seen])]
        scores = (part[0].flatten(1, 2) @ part[1].transpose(1, 2)).unflatten(1, (per_kv, -1)).mul_(scale)
        if is_causal:
            below = torch.arange(seen.stop) <= torch.arange(rows.start, rows.stop).unsqueeze(1)
            scores.masked_fill_(~below, -math.inf)
        peak = scores.detach().amax(-1, keepdim=True)
        weights = scores.sub_(peak).exp_()  # in place: at 32760 keys, fresh memory costs more than the arithmetic
        total = weights.sum(-1, keepdim=True)
        attended = (weights.flatten(1, 2) @ part[2]).unflatten(1, (per_kv, -1)) / total
        out[n, :, rows], lse[n, :, rows] = attended.detach(), (peak + total.log()).detach().squeeze(-1)
        if grads is not None:
            gradients = torch.autograd.grad(attended, part, grads[n, :, rows])
            for sums, gradient in zip((dq[n, :, rows], dk[n, seen], dv[n, seen]), gradients, strict=True):
                sums += gradient

    def tokens(x: torch.Tensor, num_heads: int, length: int) -> torch.Tensor:
        return x.reshape(batch, num_heads, length, x.size(-1)).transpose(1, 2)

    numbers = {"out": tokens(out, heads, seq_len), "lse": lse.reshape(batch, heads, seq_len)}
    if grads is not None:
        numbers["dq"] = tokens(dq, heads, seq_len)
        numbers.update(dk=tokens(dk, kv_heads, kv_len), dv=tokens(dv, kv_heads, kv_len))
    return numbers


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64, differentiable, of the whole score matrix: for small sizes with any option.

    seen (bool) and added (a number per score) broadcast to [B, H, S, S_kv]; sinks [H]. A query that sees nothing: out
    0, lse −inf, or the sink.
    """
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(2) // k.size(2), 2) for x in (k, v))
    scale = 1.0 / math.sqrt(q.size(3)) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if added is None else scores + added
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    lse = logits.logsumexp(3)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(3)).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def joined(text: torch.Tensor, sequence: torch.Tensor, position: str) -> torch.Tensor:
    """Joint tokens and a sequence as one, along dim 1."""
    return torch.cat([text, sequence] if position == "prefix" else [sequence, text], 1)


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
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max()) if difference.numel() else 0.0


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
