"""Image, text and sinks as three disjoint sets of keys, each with its own softmax, merged by lse."""

from typing import Any

import torch
from torch.nn import functional

from mutants.parts import GatherRows, lengths_of, sum_over_ranks
from ulysses_attention import merge_attention

Part = tuple[torch.Tensor, torch.Tensor]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float | None) -> Part:
    logits = torch.einsum("bihd,bjhd->bhij", q, k)
    logits = logits if softcap is None else (logits / softcap).tanh() * softcap
    return torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v), logits.logsumexp(-1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    layout: Any = None,
    kv_layout: Any = None,
    joint: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    dtype, rank, per_kv = torch.promote_types(q.dtype, torch.float32), group.rank(), q.size(2) // k.size(2)
    scale = q.size(3) ** -0.5 if softmax_scale is None else softmax_scale
    q_rows, kv_rows = lengths_of(q, k, group, layout, kv_layout)
    own = q_rows[rank]

    def keys(x: torch.Tensor) -> torch.Tensor:
        rows = x[:, : kv_rows[rank]].to(dtype)
        rows = GatherRows.apply(rows, kv_rows, group, lambda grad: sum_over_ranks(grad, group))
        return rows.repeat_interleave(per_kv, 2)

    queries = [q[:, :own].to(dtype) * scale]
    sets = [(keys(k), keys(v))]
    if joint is not None:
        queries.append(joint[0].to(dtype) * scale)
        text_k, text_v = (x.to(dtype).repeat_interleave(per_kv, 2) for x in joint[1:])
        sets.append((text_k, text_v))
    everything = torch.cat(queries, 1)
    parts: list[Part] = [_attend(everything, *pair, softcap) for pair in sets]
    if sinks is not None:
        out, lse = parts[0]
        parts.append((torch.zeros_like(out), sinks.to(lse.dtype).view(1, -1, 1).expand_as(lse)))
    out, lse = merge_attention([part[0] for part in parts], [part[1] for part in parts])
    out = out.to(q.dtype)
    behind = q.size(1) - own
    mine = functional.pad(out[:, :own], (0, 0, 0, 0, 0, behind))
    lse_of_mine = functional.pad(lse[:, :, :own], (0, behind), value=float("-inf"))
    if joint is None:
        return (mine, lse_of_mine) if return_lse else mine
    outs = (mine, out[:, own:])
    return (outs, (lse_of_mine, lse[:, :, own:])) if return_lse else outs
