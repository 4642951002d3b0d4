"""Queries in chunks of three against all gathered keys."""

from typing import Any

import torch

from mutants.parts import Options, Steps


class _Chunked(Steps):
    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attend = super().attend
        chunks = zip(q.split(3, 1), hidden.split(3, 0), strict=True)
        outs, lses = zip(*(attend(rows, keys, values, mask) for rows, mask in chunks), strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    softmax_scale: float | None = None,
    layout: Any = None,
    kv_layout: Any = None,
    return_lse: bool = False,
) -> Any:
    options = Options(is_causal, causal_alignment, softmax_scale, layout, kv_layout)
    out, lse = _Chunked(q, k, v, group, options).run()
    return (out, lse) if return_lse else out
