"""cache-dit: the dispatcher under its attention processors, Ulysses over the world. A plain q, k, v call has no public
name there, so two private ones are used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ulysses_attention.doctor.peers._parts import Result, Tensors, grouped, key_mask, refuse_padding, with_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ulysses_attention.layout import SequenceLayout

DISTRIBUTION = "cache-dit"


def _context(**options: Any) -> Any:
    """Ulysses over every rank of the world; None, which is local attention, for a world of one."""
    from cache_dit.distributed.core import _ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    if world == 1:
        return None
    context = _ContextParallelConfig(ulysses_degree=world, **options)
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    context.setup(dist.get_rank(), world, torch.device("cpu"), mesh)
    return context


def _setup(**options: Any) -> Callable[..., Any]:
    import cache_dit.attention.backends.native  # noqa: F401  (registers the backend "native")
    from cache_dit.attention import _dispatch_attention_fn

    context = _context(**options)

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
            _dispatch_attention_fn,
            attn_mask=key_mask(attn_mask),
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=softmax_scale,
            enable_gqa=grouped(q, k),
            attention_kwargs={"return_lse": True} if return_lse else None,
            backend="native",
            cp_config=context,
        )
        return with_text(attend, (q, k, v), joint, attn_mask)

    return attention


VARIANTS = {"native": _setup, "anything": functools.partial(_setup, ulysses_anything=True)}
