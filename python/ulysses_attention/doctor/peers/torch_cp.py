"""torch: torch.distributed.tensor.experimental.context_parallel around scaled_dot_product_attention.

The context wants to shard a model's buffers itself; q, k and v are shards already, so it gets a buffer that nothing
reads. Its load balancing is switched off by a private option: it would expect head-tail order, and these shards are in
token order. Forward and backward each run inside the context, as a training step in one `with` does.

Its ring has rules for CUDA's kernels only. On CPU, DTensor's general rules serve the call: with torch's math kernel
(the variant "math") at once, gradients too; with the fused kernel that torch chooses by itself ("fused") the forward
takes 20 to 50 s for each new shape, and there is no backward. Seen with torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from ulysses_attention.doctor.peers._parts import Result, Tensors, key_mask, refuse_padding, sdpa, with_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ulysses_attention.layout import SequenceLayout

DISTRIBUTION = "torch"

Context = Callable[[], contextlib.AbstractContextManager[None]]


class _InsideContext(torch.autograd.Function):
    """attend(q, k, v) and its gradients, both under context()."""

    @staticmethod
    def forward(ctx: Any, context: Context, attend: Callable[..., torch.Tensor], *qkv: torch.Tensor) -> torch.Tensor:
        ctx.context = context
        ctx.leaves = [x.detach().requires_grad_(x.requires_grad) for x in qkv]
        with context(), torch.enable_grad():
            ctx.out = attend(*ctx.leaves)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        wanted = [x for x in ctx.leaves if x.requires_grad]
        with ctx.context():
            grads = iter(torch.autograd.grad(ctx.out, wanted, grad_out))
        return None, None, *(next(grads) if x.requires_grad else None for x in ctx.leaves)


def _setup(*kernels: SDPBackend) -> Callable[..., Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    _cp_options.enable_load_balance = False

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        choice = sdpa_kernel(list(kernels)) if kernels else contextlib.nullcontext()
        with context_parallel(mesh, buffers=[torch.zeros(mesh.size())], buffer_seq_dims=[0]), choice:
            yield

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

        attend = functools.partial(
            sdpa,
            attn_mask=key_mask(attn_mask),
            dropout_p=dropout_p,
            is_causal=is_causal,
            softmax_scale=softmax_scale,
        )

        def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = _InsideContext.apply(context, attend, q, k, v)
            return out

        return with_text(inside, (q, k, v), joint, attn_mask)

    return attention


VARIANTS = {"math": functools.partial(_setup, SDPBackend.MATH), "fused": _setup}
