"""Inputs of a cell and the right values: attention written out in float64, one head at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from contest.cells import Cell

__all__ = ["RightValues", "error_of", "random_inputs", "right_values", "stored_values"]

Tensor = torch.Tensor
RightValues = dict[str, Tensor]  # out and, with backward, dq, dk, dv, each [1, S, heads, D] in float64


def random_inputs(cell: Cell) -> list[Tensor]:
    """q, k, v and the gradient of the output, each [1, S, heads, D]: the same on every rank."""
    generator = torch.Generator().manual_seed(cell.seq_len)
    heads = (cell.num_heads, cell.num_kv_heads, cell.num_kv_heads, cell.num_heads)
    shapes = [(1, cell.seq_len, count, cell.head_dim) for count in heads]
    return [torch.randn(shape, generator=generator).to(cell.torch_dtype) for shape in shapes]


def right_values(cell: Cell) -> RightValues:
    """Out and gradients of the whole sequence; of a KV head, the sum over its query heads."""
    q, k, v, grad_out = (x.double() for x in random_inputs(cell))
    values = {"out": torch.empty_like(q)}
    if cell.backward:
        values |= {"dq": torch.empty_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    scale = cell.head_dim**-0.5
    for head in range(cell.num_heads):
        kv_head = head * cell.num_kv_heads // cell.num_heads
        own_q, own_k, own_v, grad = q[0, :, head], k[0, :, kv_head], v[0, :, kv_head], grad_out[0, :, head]
        weights = (own_q @ own_k.T) * scale
        if cell.is_causal:
            weights.masked_fill_(torch.ones_like(weights, dtype=torch.bool).triu(1), float("-inf"))
        weights = weights.softmax(-1)
        out = weights @ own_v
        values["out"][0, :, head] = out
        if cell.backward:
            grad_scores = weights * (grad @ own_v.T - (grad * out).sum(-1, keepdim=True)) * scale
            values["dq"][0, :, head] = grad_scores @ own_k
            values["dk"][0, :, kv_head] += grad_scores.T @ own_q
            values["dv"][0, :, kv_head] += weights.T @ grad
    return values


def stored_values(cell: Cell, folder: Path) -> str:
    """The file of a cell's right values, computed where it is missing; the number of ranks doesn't matter to them."""
    file = folder / f"{cell._replace(world=1).name}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        torch.save(right_values(cell), unfinished)
        unfinished.rename(file)
    return str(file)


def error_of(got: Tensor, want: Tensor) -> float:
    """The largest difference as a part of the largest right value; infinity for NaN or another shape."""
    if got.shape != want.shape:
        return float("inf")
    error = float((got.double() - want).abs().max() / want.abs().max())
    return error if error == error else float("inf")
