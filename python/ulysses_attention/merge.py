"""Attention over several sets of keys, put together from the result over each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["merge_attention"]


def merge_attention(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the same queries over the union of disjoint sets of keys, from the result over each set.

    For keys that one call can't or needn't see together: a text cache beside image tokens, chunks of a long context.
    Each pair is what attention with return_lse=True gave for its keys. Differentiable through every out and lse.

    Shapes: outs n >= 1 times [B, S, H, D_v], lses n times [B, H, S] (natural log) -> out [B, S, H, D_v], lse [B, H, S].
    Dtype:  out in that of the outs, summed in float32 and rounded once; lse float32 (both float64 for float64 outs).
    Comm:   none; works under torch.compile.
    An lse of -inf says that a row saw no key: the other results decide, and where there is none out is 0, lse -inf.
    Errors: ValueError (CP020, CP021, CP024) for no result, another number of lses than outs, and shapes or dtypes that
            do not fit.
    Source: online softmax (arXiv 1805.02867).
    """
    out, lse = torch.ops.ulysses.merge_attention(list(outs), list(lses))
    return out, lse
