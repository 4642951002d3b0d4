"""yunchang: UlyssesAttention over the world.

Stand-in: its kernels need CUDA, so its attribute attn_fn is torch's scaled_dot_product_attention here, with GQA by the
shapes. What is examined is the library's exchange and call, not its kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ulysses_attention.doctor.peers._parts import Result, Tensors, refuse_padding, sdpa, with_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ulysses_attention.layout import SequenceLayout

DISTRIBUTION = "yunchang"


def _stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    **flash_only: object,  # what UlyssesAttention passes of its own defaults: no window, no softcap, no alibi
) -> torch.Tensor:
    return sdpa(q, k, v, dropout_p=dropout_p, is_causal=causal, softmax_scale=softmax_scale)


def _setup() -> Callable[..., Any]:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    module = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    module.attn_fn = _stand_in

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: ProcessGroup,
        *,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        dropout_p: float = 0.0,
        joint: Tensors | None = None,
        kv_layout: SequenceLayout | None = None,
    ) -> Result:
        refuse_padding(kv_layout)
        attend = functools.partial(module, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=is_causal)
        return with_text(attend, (q, k, v), joint)

    return attention


VARIANTS = {"ulysses": _setup}
