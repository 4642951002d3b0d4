"""diffusers: dispatch_attention_fn with a ParallelConfig of Ulysses over the world.

The configuration is set up as ModelMixin.enable_parallelism() does it, without its look-up of an accelerator.
A mask is handed over in slices, as the library's hooks shard it. `joint` keeps the text whole on every rank, which
the plans that come with the library's models avoid by sharding it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ulysses_attention.doctor.peers._parts import Result, Tensors, grouped, own_keys, refuse_padding, with_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ulysses_attention.layout import SequenceLayout

DISTRIBUTION = "diffusers"


def _parallel_config(**options: Any) -> Any:
    """Ulysses over every rank of the world; None, which is local attention, for a world of one."""
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    if world == 1:
        return None
    context = ContextParallelConfig(ulysses_degree=world, **options)
    config = ParallelConfig(context_parallel_config=context)
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config.setup(dist.get_rank(), world, torch.device("cpu"), mesh=mesh)
    return config


def _setup(backend: str, **options: Any) -> Callable[..., Any]:
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    config = _parallel_config(**options)

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: ProcessGroup,
        *,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        joint: Tensors | None = None,
        kv_layout: SequenceLayout | None = None,
    ) -> Result:
        refuse_padding(kv_layout)
        attend = functools.partial(
            dispatch_attention_fn,
            attn_mask=own_keys(attn_mask, k, group),
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=softmax_scale,
            enable_gqa=grouped(q, k),
            attention_kwargs={"return_lse": True} if return_lse else None,
            backend=AttentionBackendName(backend),
            parallel_config=config,
        )
        return with_text(attend, (q, k, v), joint, attn_mask)

    return attention


VARIANTS = {
    "native": functools.partial(_setup, "native"),
    "anything": functools.partial(_setup, "native", ulysses_anything=True),
    "_native_math": functools.partial(_setup, "_native_math"),
    "flex": functools.partial(_setup, "flex"),
}
