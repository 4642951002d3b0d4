"""Every rank gathers q, k and v, computes the whole output and keeps its own rows."""

from typing import Any

import torch

from mutants.parts import Options, Steps


class _Everything(Steps):
    def queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gather(self.q, self.q_lengths), torch.arange(sum(self.q_lengths))

    def finish(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.own_positions(self.q_lengths)
        return super().finish(out[:, own], lse[:, :, own])


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
    out, lse = _Everything(q, k, v, group, options).run()
    return (out, lse) if return_lse else out
