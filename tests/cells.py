"""One cell of the grid of shapes and options: its inputs, a run on one rank of a group, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ulysses_attention as ua
from oracle import Numbers, max_error, oracle_with_grads, single_process, tolerance

UNEVEN = ua.UlyssesContextParallelPolicy(require_seq_divisible=False)
HEADS = [(8, 8), (30, 30), (12, 3), (8, 1), (3, 3), (2, 1)]
STRATEGIES = ["ulysses", "allgather_kv"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Which tokens, heads and options. See run_cell for what each means on a rank."""

    seq_len: int
    heads: tuple[int, int]  # H, H_kv
    strategy: str = "ulysses"
    is_causal: bool = False
    batch: int = 1
    layout: str = "uneven"  # "padded": rows of NaN behind the tokens; "exchanged": no layout, the uneven policy
    dtype: torch.dtype = torch.float32
    head_dim: int = 8
    v_head_dim: int | None = None  # None: head_dim
    kv_seq_len: int | None = None  # None: seq_len; else k and v have a layout of their own
    softmax_scale: float | None = None
    lengths: tuple[int, ...] | None = None  # tokens per rank made elsewhere, instead of `layout`
    kv_lengths: tuple[int, ...] | None = None
    storage: str = "contiguous"  # a key of STORAGES
    grad_storage: str = "contiguous"
    kernel: str = "auto"
    return_lse: bool = True

    @property
    def kv_len(self) -> int:
        return self.seq_len if self.kv_seq_len is None else self.kv_seq_len

    def layouts(self, world: int) -> tuple[ua.SequenceLayout, ua.SequenceLayout]:
        """Where the tokens of q, and of k and v, lie."""

        def one(seq_len: int, lengths: tuple[int, ...] | None) -> ua.SequenceLayout:
            if lengths is not None:
                return ua.SequenceLayout.from_lengths(lengths)
            return ua.SequenceLayout(seq_len, world, policy=None if self.layout == "padded" else UNEVEN)

        return one(self.seq_len, self.lengths), one(self.kv_len, self.kv_lengths or self.lengths)


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand(x.shape)  # every token alike; shards are views with stride 0


# How a tensor [B, S, H, D] may lie in memory. Each returns another tensor of equal shape; "expanded" other values.
STORAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "head_major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "token_major": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "dim_first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "sliced": lambda x: torch.stack([x, x + 1.0], 4).flatten(3)[..., ::2],
    "of_larger": lambda x: torch.nn.functional.pad(x, (1, 2, 1, 1, 2, 1), value=math.nan)[:, 2:-1, 1:-1, 1:-2],
    "expanded": _expanded,
}


def inputs(cell: Cell) -> tuple[torch.Tensor, ...]:
    """q, k, v and the weights of the loss, for the whole sequence; the same on every rank and in every process."""
    return _inputs(_mathematics(cell))


def _mathematics(cell: Cell) -> Cell:
    """The cell without what must not change the numbers."""
    return dataclasses.replace(
        cell, strategy="", layout="", lengths=None, kv_lengths=None, kernel="", return_lse=True, kv_seq_len=cell.kv_len
    )


@functools.lru_cache(maxsize=256)
def _inputs(cell: Cell) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * cell.seq_len + 10 * cell.heads[0] + cell.heads[1])
    (heads, kv_heads), v_dim = cell.heads, cell.v_head_dim or cell.head_dim
    shapes = [
        (cell.batch, cell.seq_len, heads, cell.head_dim),
        (cell.batch, cell.kv_len, kv_heads, cell.head_dim),
        (cell.batch, cell.kv_len, kv_heads, v_dim),
        (cell.batch, cell.seq_len, heads, v_dim),
    ]
    tensors = [torch.randn(shape, generator=generator).to(cell.dtype) for shape in shapes]
    if cell.storage == "expanded":
        tensors[:3] = [_expanded(x) for x in tensors[:3]]
    if cell.grad_storage == "expanded":
        tensors[3] = _expanded(tensors[3])
    return tuple(tensors)


def with_nan_behind(x: torch.Tensor, real: int) -> torch.Tensor:
    """x [B, S, ..] with NaN in every row behind the real ones."""
    return torch.cat([x[:, :real], torch.full_like(x[:, real:], math.nan)], 1) if real < x.size(1) else x


def run_cell(rank: int, group: Any, cell: Cell) -> Numbers:
    """This rank's rows of out, lse, dq, dk and dv; rows behind the tokens hold NaN on the way in."""
    layouts = cell.layouts(group.size())
    local = []
    for index, x in enumerate(inputs(cell)):
        layout = layouts[1 if index in (1, 2) else 0]
        rows = with_nan_behind(layout.shard(x, rank), layout.lengths[rank])
        local.append(STORAGES[cell.grad_storage if index == 3 else cell.storage](rows) if rows.numel() else rows)
    leaves = [x.detach().requires_grad_() for x in local[:3]]
    options: dict[str, Any] = {"layout": layouts[0], "kv_layout": None if layouts[0] == layouts[1] else layouts[1]}
    if cell.layout == "exchanged":
        options = {"policy": UNEVEN}
    result = ua.ulysses_attention(
        *leaves,
        group,
        strategy=cell.strategy,
        is_causal=cell.is_causal,
        softmax_scale=cell.softmax_scale,
        kernel=cell.kernel,
        return_lse=cell.return_lse,
        **options,
    )
    out, lse = result if cell.return_lse else (result, torch.empty(0))
    dq, dk, dv = torch.autograd.grad(out, leaves, local[3])
    numbers = {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
    return {**numbers, "lse": lse.detach()} if cell.return_lse else numbers


def run_cells(rank: int, group: Any, cells: Sequence[Cell]) -> list[Numbers]:
    """run_cell for each, so that one trip to a world of processes serves many."""
    return [run_cell(rank, group, cell) for cell in cells]


@functools.lru_cache(maxsize=256)
def _expected(cell: Cell) -> tuple[Numbers, Numbers | None]:
    q, k, v, weights = inputs(cell)
    reference = oracle_with_grads(q, k, v, weights, cell.is_causal, cell.softmax_scale)
    if cell.dtype in (torch.float32, torch.float64):
        return reference, None
    return reference, single_process(q, k, v, weights, cell.is_causal, cell.softmax_scale)


def expected(cell: Cell) -> tuple[Numbers, Numbers | None]:
    """The oracle's numbers, and for 16-bit types those of one process; of what the ranks do, nothing plays a part."""
    return _expected(_mathematics(cell))


def problems(cell: Cell, ranks: Sequence[Numbers]) -> list[str]:
    """What is wrong with the ranks' results, in words; [] if nothing is."""
    world = len(ranks)
    q_layout, kv_layout = cell.layouts(world)
    reference, single = expected(cell)
    found = []
    for name in ranks[0]:
        layout, dim = (kv_layout if name in ("dk", "dv") else q_layout), (2 if name == "lse" else 1)
        real = [part[name].narrow(dim, 0, n) for part, n in zip(ranks, layout.lengths, strict=True)]
        error = max_error(torch.cat(real, dim), reference[name])
        allowed = tolerance(cell.dtype, reference[name], None if single is None else single[name])
        if not error <= allowed:
            found.append(f"{name} is off by {error:.2e}, allowed {allowed:.2e}")
        wanted = -math.inf if name == "lse" else 0.0
        for rank, (part, n) in enumerate(zip(ranks, layout.lengths, strict=True)):
            if part[name].size(dim) != layout.padded_lengths[rank]:
                found.append(f"{name} of rank {rank} has shape {tuple(part[name].shape)}")
            elif not bool((part[name].narrow(dim, n, layout.padded_lengths[rank] - n) == wanted).all()):
                found.append(f"{name} of rank {rank} is not {wanted} behind its {n} tokens")
    return found


def assert_right(cells: Sequence[Cell], ranks: Sequence[Sequence[Numbers]]) -> None:
    """ranks[r][i] is what run_cells gave on rank r for cell i; the assertion names every cell that is wrong."""
    wrong = []
    for index, cell in enumerate(cells):
        if found := problems(cell, [parts[index] for parts in ranks]):
            wrong.append(f"W={len(ranks)} {cell}: {'; '.join(found)}")
    assert not wrong, f"{len(wrong)} of {len(cells)} cells are wrong:\n" + "\n".join(wrong[:20])
