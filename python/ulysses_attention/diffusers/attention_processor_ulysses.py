"""An attention processor of diffusers whose attention sees the tokens of every rank.

`parallelize` puts one on every attention of a model. By itself, for a model whose tokens the caller shards:

    processor = ulysses_processor(model.transformer_blocks[0].attn.processor, group)
    model.set_attn_processor(processor)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from ulysses_attention._request import resolve_group
from ulysses_attention.attention import ulysses_attention
from ulysses_attention.diffusers.plan import Attend
from ulysses_attention.diffusers.seam import NATIVE, Options, has_seam, rebind
from ulysses_attention.diffusers.streams import Streams
from ulysses_attention.layout import SequenceLayout
from ulysses_attention.policy import EXACT, UlyssesContextParallelPolicy
from ulysses_attention.processor import AttendCall, UlyssesAttentionProcessor
from ulysses_attention.tokens import JointTokens, MaskLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["UlyssesAttnProcessor", "ulysses_processor"]

OWN_KEYS = MaskLayout(q="broadcast", kv="local")
ALL_KEYS = MaskLayout(q="broadcast", kv="global")

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v


class UlyssesAttnProcessor(UlyssesAttentionProcessor):
    """Runs another processor's own code with an attention over the tokens of every rank.

    Its attend() is the attention that the processor would have called: the backend that is active in diffusers. Made by
    `ulysses_processor`, which also makes it an instance of the processor's own class.
    """

    supports = frozenset({"softmax_scale", "attn_mask"})

    group: ProcessGroup
    attends: Attend | Literal["local"]
    streams: Streams | None  # of a parallelized model; None: layout says which tokens the ranks hold
    layout: SequenceLayout | None
    policy: UlyssesContextParallelPolicy  # of a parallelized model; how tokens are cut is in its streams
    strategy: str
    kernel: str | Callable[..., Any]
    agreement: str
    num_q_per_kv: int  # of a processor that repeats keys and values
    removed: bool  # from its model, to which something else may bring it back
    _forget: Callable[[], None]
    _local: Callable[..., Any]  # of the call that runs

    def retire(self) -> None:
        """Ends its use: what it holds outside itself is let go, and a later call is an error."""
        self._forget()
        self.removed = True

    def __reduce__(self) -> Any:
        raise TypeError(
            f"[parallelize] {type(self).__name__} belongs to the ranks of a group and can be neither copied nor saved. "
            f"Fix: handle.remove() first, then copy or save the model, then parallelize again."
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttendCall) -> torch.Tensor:
        out: torch.Tensor = self._local(q, k, v, call.attn_mask, call.softmax_scale)
        return out

    def over_ranks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        options: Options,
        local: Callable[..., Any],
    ) -> torch.Tensor:
        """The processor's attention, over all tokens. Shapes: [B, S_local, H, D] → [B, S_local, H, D_v]."""
        if self.removed:
            raise RuntimeError(
                f"[parallelize] {type(self).__name__} was set again after handle.remove() took it off the model. Fix: "
                f"set_attn_processor with processors of diffusers; undo what was done in between before remove()."
            )
        if isinstance(self.attends, str):
            return local(query, key, value, attn_mask, options.softmax_scale)
        if options.dropout_p != 0.0 or options.is_causal or options.attention_kwargs:
            raise NotImplementedError(
                f"[parallelize] {type(self).__name__} asks its attention for dropout_p={options.dropout_p}, "
                f"is_causal={options.is_causal}, attention_kwargs={options.attention_kwargs}, which this path does not "
                f"honour over ranks. Fix: leave them out; model.eval() turns dropout off."
            )
        if self.attends.repeats_kv:
            key, value = key[:, :, :: self.num_q_per_kv], value[:, :, :: self.num_q_per_kv]
        qkv, mask = (query, key, value), _key_mask(attn_mask, self.attends)
        arguments = {"strategy": self.strategy, "agreement": self.agreement, "softmax_scale": options.softmax_scale}
        if options.backend == NATIVE or self.kernel != "auto" or self.policy.backend_name != EXACT.backend_name:
            return self._attention(ulysses_attention, qkv, mask, arguments | {"kernel": self.kernel})
        self._local = local
        try:
            return self._attention(self.forward, qkv, mask, arguments)
        finally:
            del self._local

    def _attention(
        self, run: Callable[..., Any], qkv: Tensors, mask: torch.Tensor | None, arguments: dict[str, Any]
    ) -> torch.Tensor:
        streams = self.streams
        assert not isinstance(self.attends, str)
        if mask is not None:
            arguments |= {"attn_mask": mask, "mask_layout": OWN_KEYS}
        if streams is None or not self.attends.q:
            policy = self.policy if self.layout is None else None
            return run(*qkv, self.group, layout=self.layout, policy=policy, **arguments)
        arguments["policy"] = self.policy
        kv = self.attends.q if self.attends.kv is None else self.attends.kv
        whole = [stream for stream in {*self.attends.q, *kv} if streams.layout(stream) is None]
        if not whole:
            layouts = {"layout": streams.joined(self.attends.q)}
            if self.attends.kv is not None:
                layouts["kv_layout"] = streams.joined(kv)
            return run(*qkv, self.group, **layouts, **arguments)
        if len(whole) == len({*self.attends.q, *kv}):
            arguments.pop("mask_layout", None)
            return run(*qkv, self.group, kv_role="replicated", **arguments)
        return self._beside_whole_streams(run, qkv, mask, arguments)

    def _beside_whole_streams(
        self, run: Callable[..., Any], qkv: Tensors, mask: torch.Tensor | None, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """Attention where some streams are whole on every rank: they attend as joint tokens, counted once."""
        streams, attends = self.streams, self.attends
        assert streams is not None and not isinstance(attends, str)
        is_whole = [streams.layout(stream) is None for stream in attends.q]
        in_front = is_whole[0]
        if attends.kv is not None or sorted(is_whole, reverse=in_front) != is_whole:
            fewest = min(streams.tokens(s) for s in attends.q)
            raise NotImplementedError(
                f"[parallelize] streams shorter than cp_size={streams.cp_size} are whole on every rank, and an "
                f"attention of {attends.q} to {attends.kv or attends.q} does not offer that. "
                f"Fix: a group of at most {fewest} rank{'s' * (fewest != 1)}, or `may_be_empty`."
            )
        own = [stream for stream, whole in zip(attends.q, is_whole, strict=True) if not whole]
        tokens = sum(streams.tokens(s) for s, whole in zip(attends.q, is_whole, strict=True) if whole)
        own_tokens = qkv[0].size(1) - tokens
        sizes = [tokens, own_tokens] if in_front else [own_tokens, tokens]
        parts = [x.split(sizes, 1) if in_front else x.split(sizes, 1)[::-1] for x in qkv]
        layout = streams.joined(own)
        if mask is not None:
            shares = mask.split(sizes, -1)
            sharded = layout.gather(shares[in_front], streams.group, shares[in_front].dim() - 1, grad="slice")
            whole_mask = torch.cat([shares[0], sharded] if in_front else [sharded, shares[1]], -1)
            arguments = arguments | {"attn_mask": whole_mask, "mask_layout": ALL_KEYS}
        (text_q, own_q), (text_k, own_k), (text_v, own_v) = parts
        joint = JointTokens(text_q, text_k, text_v, "prefix" if in_front else "suffix")
        out, text = run(own_q, own_k, own_v, self.group, layout=layout, joint=joint, **arguments)
        return torch.cat([text, out] if in_front else [out, text], 1)


def _key_mask(mask: torch.Tensor | None, attends: Attend) -> torch.Tensor | None:
    """The mask as one row over this rank's keys. Shapes: [B, S_local] or [B, 1|H, 1, S_local]."""
    if mask is None or mask.dim() == 2:
        return mask
    if mask.dim() == 4 and attends.mask == "outer" and mask.size(2) == mask.size(3):
        return torch.diagonal(mask, dim1=2, dim2=3)[:, :, None, :]
    if mask.dim() == 4 and mask.size(2) == 1:
        return mask
    raise NotImplementedError(
        f"[parallelize] an attention mask of shape {list(mask.shape)} has a row for each query of this rank and says "
        f"nothing of the keys of others. Fix: a mask over keys, [B, S] or [B, 1, 1, S]."
    )


def _q_per_kv(attention: torch.nn.Module | None) -> int:
    """Query heads per KV head, by the widths of the projections."""
    if not all(hasattr(attention, name) for name in ("heads", "to_q", "to_k")):
        raise ValueError(
            f"[ulysses_processor] repeats_kv=True reads how often from heads, to_q and to_k of the attention, and "
            f"{type(attention).__name__} has none. Fix: attention=module, or repeats_kv=False (repeated keys travel)."
        )
    assert attention is not None
    heads = int(attention.heads)  # type: ignore[arg-type]
    head_dim = attention.to_q.out_features // heads  # type: ignore[union-attr,operator]
    return int(heads // (attention.to_k.out_features // head_dim))  # type: ignore[union-attr,operator]


def ulysses_processor(
    processor: Any,
    cp_group: ProcessGroup | DeviceMesh | None,
    *,
    attends: Attend | Literal["local"] = Attend(()),  # noqa: B008  (frozen)
    attention: torch.nn.Module | None = None,
    streams: Streams | None = None,
    layout: SequenceLayout | None = None,
    strategy: str = "ulysses",
    kernel: str | Callable[..., Any] = "auto",
    agreement: str = "auto",
) -> UlyssesAttnProcessor:
    """A processor with the code of another one, and attention over the tokens of every rank of the group.

    Without a layout the ranks exchange their numbers of tokens in every call. attention: the module that it is for,
    needed where attends.repeats_kv. retire() of what it returns ends its use.
    Comm:   as ulysses_attention; none for attends="local".
    Errors: NotImplementedError for a processor whose attention cannot be exchanged, or that is asked for dropout,
            is_causal or attention_kwargs; ValueError for repeats_kv without an attention that says how often.
    """
    if isinstance(processor, (UlyssesAttnProcessor, torch.nn.Module)) or not has_seam(processor):
        raise NotImplementedError(
            f"[ulysses_processor] the attention of {type(processor).__name__} cannot be exchanged: it is ours already, "
            f"has weights of its own (an IP adapter), or calls neither diffusers' attention dispatch nor torch's "
            f"scaled_dot_product_attention. Fix: set another processor first."
        )
    group, _ = resolve_group(cp_group)
    repeats = not isinstance(attends, str) and attends.repeats_kv
    num_q_per_kv = _q_per_kv(attention) if repeats else 1
    made: UlyssesAttnProcessor

    def attend(*call: Any) -> torch.Tensor:
        return made.over_ranks(*call)

    rebound = rebind(processor, attend)
    kind = type(processor)
    made_kind: Any = type(
        f"Ulysses{kind.__name__}", (UlyssesAttnProcessor, kind), {**rebound.methods, "__module__": kind.__module__}
    )
    made = made_kind.__new__(made_kind)
    UlyssesAttentionProcessor.__init__(made)
    made.__dict__.update(vars(processor))
    made.group, made.attends, made.streams, made.layout = group, attends, streams, layout
    made.strategy, made.kernel, made.agreement, made.num_q_per_kv = strategy, kernel, agreement, num_q_per_kv
    made.policy = EXACT if streams is None else streams.policy.replace(require_seq_divisible=False)
    made.removed, made._forget = False, rebound.forget
    return made
