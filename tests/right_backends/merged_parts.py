"""One part per rank's keys, each with its own softmax, merged at the end by lse."""

import math
from typing import Any

import torch

from mutants.parts import Options, Steps


class _Merged(Steps):
    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = [], []
        parts = (x.split(self.kv_lengths, 1) for x in (keys, values, hidden))
        for rows, of_rows, mask in zip(*parts, strict=True):
            scores = (torch.einsum("bihd,bjhd->bhij", q, rows) * self.scale()).masked_fill(mask, -1e30)
            lses.append(scores.logsumexp(-1).masked_fill(mask.all(-1), -1e30))
            weights = (scores - lses[-1].unsqueeze(-1)).exp().masked_fill(mask, 0.0)
            outs.append(torch.einsum("bhij,bjhd->bihd", weights, of_rows))
        every = torch.stack(lses)
        lse = every.logsumexp(0)
        shares = (every - lse).exp().transpose(2, 3).unsqueeze(-1)
        return (torch.stack(outs) * shares).sum(0), lse.detach().masked_fill(hidden.all(-1), -math.inf)


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
    options = Options(is_causal, "top_left", softmax_scale, layout, kv_layout)
    out, lse = _Merged(q, k, v, group, options).run()
    return (out, lse) if return_lse else out
