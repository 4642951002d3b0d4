"""ParaAttention: ulysses_attn_func over the group. It takes [B, H, S, D]; GQA through its attn_func argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ulysses_attention.doctor.peers._parts import Result, Tensors, grouped, key_mask, refuse_padding, with_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ulysses_attention.layout import SequenceLayout

DISTRIBUTION = "para-attn"


def _setup() -> Callable[..., Any]:
    from para_attn.para_attn_interface import ulysses_attn_func

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: ProcessGroup,
        *,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        joint: Tensors | None = None,
        kv_layout: SequenceLayout | None = None,
    ) -> Result:
        refuse_padding(kv_layout)
        kernel = functools.partial(F.scaled_dot_product_attention, enable_gqa=True) if grouped(q, k) else None

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = ulysses_attn_func(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=key_mask(attn_mask),
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=softmax_scale,
                mesh=group,
                attn_func=kernel,
            )
            return out.transpose(1, 2)

        return with_text(attend, (q, k, v), joint, attn_mask)

    return attention


VARIANTS = {"ulysses": _setup}
