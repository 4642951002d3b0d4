"""DeepSpeed: sequence.layer.DistributedAttention over the world, around torch's scaled_dot_product_attention.

The local attention is the caller's by design, and so is what it can: causal, scale, mask, dropout, GQA by the shapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ulysses_attention.doctor.peers._parts import Result, Tensors, key_mask, refuse_padding, sdpa, with_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ulysses_attention.layout import SequenceLayout

DISTRIBUTION = "deepspeed"


def _setup() -> Callable[..., Any]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at import
    import deepspeed.comm
    import deepspeed.ops
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups, logger

    logger.setLevel("ERROR")
    # An extension for reductions, which this attention has none of. It would be compiled at the first start, and a
    # process that is ended meanwhile leaves a lock on which every later start waits.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, dist_init_required=False, verbose=False
    )
    if dist.get_world_size() > 1:
        parallel_state_sp.initialize_sequence_parallel(dist.get_world_size())
        groups.mpu = parallel_state_sp  # as deepspeed.initialize(mpu=...): uneven heads ask it for this rank's number
    module = DistributedAttention(sdpa, dist.group.WORLD, scatter_idx=2, gather_idx=1)

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

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = module(
                q,
                k,
                v,
                0,  # the dimension of the batch
                attn_mask=key_mask(attn_mask),
                dropout_p=dropout_p,
                is_causal=is_causal,
                softmax_scale=softmax_scale,
            )
            return out

        return with_text(attend, (q, k, v), joint, attn_mask)

    return attention


VARIANTS = {"ulysses": _setup}
