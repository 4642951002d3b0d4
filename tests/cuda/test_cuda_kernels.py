"""The operation on one GPU against the float64 oracle: every CUDA kernel by name, and the choice of "auto"."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oracle import oracle_with_grads
from ulysses_attention import SequenceLayout, ulysses_attention
from ulysses_attention.launch import run_processes

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}


def errors(rank: int, group: Any, kernel: str, dtype: torch.dtype, kv_heads: int, is_causal: bool) -> list[float]:
    torch.manual_seed(0)
    layout = SequenceLayout(257, group.size())
    whole = [torch.randn(2, 257, h, 64, dtype=torch.float64) for h in (8, kv_heads, kv_heads)]
    grad_out = torch.randn(2, 257, 8, 64, dtype=torch.float64)
    exact = oracle_with_grads(*(x.to(dtype) for x in whole), grad_out.to(dtype), is_causal=is_causal)
    local = [layout.shard(x.to(dtype), rank).cuda().requires_grad_() for x in whole]
    got = ulysses_attention(*local, group, layout=layout, is_causal=is_causal, kernel=kernel)
    got.backward(layout.shard(grad_out.to(dtype), rank).cuda())
    found = [got.detach(), *(x.grad for x in local)]
    pairs = zip(found, (exact[name] for name in ("out", "dq", "dk", "dv")), strict=True)
    rows = layout.lengths[rank]
    return [
        ((a[:, :rows].cpu().double() - layout.shard(b, rank)[:, :rows]).abs().max() / b.abs().max()).item()
        for a, b in pairs
    ]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("auto", torch.float32),
        ("auto", torch.bfloat16),
        ("cuda_flash", torch.bfloat16),
        ("cuda_flash", torch.float16),
        ("cuda_efficient", torch.float32),
        ("cuda_efficient", torch.bfloat16),
        ("math", torch.float32),
    ],
)
def test_kernel_equals_the_oracle(kernel: str, dtype: torch.dtype, kv_heads: int, is_causal: bool) -> None:
    world = torch.cuda.device_count()
    for found in run_processes(errors, world, kernel, dtype, kv_heads, is_causal, backend="nccl"):
        assert max(found) <= LIMITS[dtype], found


@pytest.mark.parametrize("is_causal", [False, True])
def test_cudnn_equals_the_oracle(is_causal: bool) -> None:
    world = torch.cuda.device_count()
    for found in run_processes(errors, world, "cuda_cudnn", torch.bfloat16, 8, is_causal, backend="nccl"):
        assert max(found) <= LIMITS[torch.bfloat16], found
