"""All arithmetic in float64, cast back at the end."""

from typing import Any

import torch

from mutants.parts import Options, Steps


class _InFloat64(Steps):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dtype = torch.float64

    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().finish(out, lse.to(torch.promote_types(self.q.dtype, torch.float32)))


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
    out, lse = _InFloat64(q, k, v, group, options).run()
    return (out, lse) if return_lse else out
