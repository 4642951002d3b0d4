"""The base class of every backend, and the registry of backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from ulysses_attention import _C
from ulysses_attention._C import AttendCall
from ulysses_attention._request import resolve_group, run_call
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import UlyssesContextParallelPolicy
from ulysses_attention.tokens import JointTokens, MaskLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AttendCall", "UlyssesAttentionProcessor", "backends", "register_backend", "unregister_backend"]

KERNEL_BACKEND = "ulysses"  # built in: attends with a kernel of the C++ registry

# What a backend can declare to honour.
ATTEND_FIELDS = ("is_causal", "softmax_scale", "q_positions", "need_lse", "attn_mask", "sinks", "softcap")

AttendResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class UlyssesAttentionProcessor(_C.UlyssesAttentionProcessor):
    """Context-parallel attention around a local attention: a subclass writes attend() and nothing else.

    forward = validate, collecting every problem → agree with the other ranks → raise on every rank or on none →
    exchange → attend → restore → check. A step cannot be skipped by forgetting it.
    """

    #: The fields of AttendCall that attend() honours, of "is_causal", "softmax_scale", "q_positions" (causal queries
    #: that do not start at position 0), "need_lse", "attn_mask", "sinks" and "softcap". A field that a caller sets and
    #: this does not name is refused.
    supports: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        declared = [cls.supports] if isinstance(cls.supports, str) else list(cls.supports)
        unknown = [field for field in declared if field not in ATTEND_FIELDS]
        if unknown or isinstance(cls.supports, str):
            raise ValueError(
                f"[{cls.__name__}] supports={cls.supports!r} is not a set of fields of AttendCall. "
                f"Fix: a set of {', '.join(ATTEND_FIELDS)}. [CP050]"
            )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttendCall) -> AttendResult:
        """Local attention over complete keys and values; any differentiable code.

        Shapes: q [B, Sq, h, D], k [B, Skv, h_kv, D], v [B, Skv, h_kv, D_v], strided, h % h_kv == 0, never empty →
                out [B, Sq, h, D_v], or (out, lse [B, h, Sq]) where call.need_lse.
        Comm:   none. Called 0–3 times a forward.
        """
        raise NotImplementedError(f"{type(self).__name__} must define attend(self, q, k, v, call)")

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cp_group: ProcessGroup | DeviceMesh | None = None,
        cp_size: int | None = None,
        *,
        policy: UlyssesContextParallelPolicy | None = None,
        strategy: str = "ulysses",
        is_causal: bool = False,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        mask_layout: MaskLayout | None = None,
        layout: SequenceLayout | None = None,
        kv_layout: SequenceLayout | None = None,
        kv_role: str = "sharded",
        joint: JointTokens | None = None,
        qkv_format: str = "bshd",
        return_lse: bool = False,
        agreement: str = "auto",
    ) -> Any:
        """Attention over the whole sequence with this backend's attend(). Arguments, shapes and errors: as
        ulysses_attention, of which these are the ones that a backend can honour today."""
        group, mesh_2d = resolve_group(cp_group)
        return run_call(
            lambda q, k, v, mask, sinks, request: self._forward(q, k, v, mask, sinks, group, *request),
            (q, k, v),
            mesh_2d=mesh_2d,
            cp_size=cp_size,
            policy=policy,
            strategy=strategy,
            is_causal=is_causal,
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            attn_mask=attn_mask,
            mask_layout=mask_layout,
            layout=layout,
            kv_layout=kv_layout,
            kv_role=kv_role,
            joint=joint,
            qkv_format=qkv_format,
            return_lse=return_lse,
            agreement=agreement,
        )


class CallableProcessor(UlyssesAttentionProcessor):
    """The `kernel=` function of one call as a backend."""

    supports = frozenset(ATTEND_FIELDS)

    def __init__(self, function: Callable[..., AttendResult]) -> None:
        super().__init__()
        self._function = function

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttendCall) -> AttendResult:
        return self._function(q, k, v, call)


Processor = TypeVar("Processor", bound=type)

_registered: dict[str, Any] = {KERNEL_BACKEND: _C.find_backend(KERNEL_BACKEND)}


def register_backend(name: str, backend: Processor) -> Processor:
    """Make a subclass of UlyssesAttentionProcessor selectable by policy.backend_name; returns the class.

    Errors: CP051 for a class that does not inherit the base class, and for the name of the built-in backend.
    """
    if not (isinstance(backend, type) and issubclass(backend, UlyssesAttentionProcessor)):
        shown = backend.__name__ if isinstance(backend, type) else repr(backend)
        raise ValueError(
            f"[register_backend] {shown} does not inherit UlyssesAttentionProcessor, so nothing enforces the policy. "
            f"Fix: class {shown}(UlyssesAttentionProcessor) with attend(self, q, k, v, call). [CP051]"
        )
    if name == KERNEL_BACKEND or name not in name.splitlines():
        raise ValueError(
            f"[register_backend] name={name!r} is the built-in backend's, which nothing replaces, or not one line of "
            f'text. Fix: register_backend("{backend.__name__}", {backend.__name__}). [CP051]'
        )
    instance = backend()
    _C.register_backend(name, instance)
    _registered[name] = instance  # the C++ registry does not keep Python objects alive
    return backend


def unregister_backend(name: str) -> None:
    """Forget a backend. The built-in one stays."""
    if name != KERNEL_BACKEND and _registered.pop(name, None) is not None:
        _C.unregister_backend(name)


def backends() -> dict[str, Any]:
    """The registered backends by name, the built-in one first."""
    return dict(_registered)
