"""What is measured, as data."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["QUICK", "SECTIONS", "TOLERANCES", "Cell", "all_cells"]

#: Largest error against float64 that passes, as a part of the largest right value: (output, gradients).
TOLERANCES = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 3e-2)}


class Cell(NamedTuple):
    """One shape of one call. Units: tokens of the whole sequence, heads before they are cut."""

    world: int
    seq_len: int
    dtype: str = "float32"
    backward: bool = False
    num_heads: int = 8
    num_kv_heads: int = 8
    head_dim: int = 64
    is_causal: bool = False

    @property
    def name(self) -> str:
        heads = f"h{self.num_heads}" + (f"kv{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else "")
        passes = "backward" if self.backward else "forward"
        causal = "-causal" if self.is_causal else ""
        return f"w{self.world}-s{self.seq_len}-{heads}-d{self.head_dim}-{self.dtype}-{passes}{causal}"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def lengths(self) -> list[int]:
        """Tokens per rank; the first ranks hold one more where they differ."""
        least, more = divmod(self.seq_len, self.world)
        return [least + (rank < more) for rank in range(self.world)]

    @property
    def is_uneven(self) -> bool:
        return any(size % self.world for size in (self.seq_len, self.num_heads, self.num_kv_heads))

    @property
    def neighbour(self) -> Cell | None:
        """The next larger shape that the ranks divide, for an uneven one."""
        if not self.is_uneven:
            return None

        def up(size: int) -> int:
            return -(-size // self.world) * self.world

        return self._replace(seq_len=up(self.seq_len), num_heads=up(self.num_heads), num_kv_heads=up(self.num_kv_heads))

    def heads_of_a_rank(self) -> tuple[int, int]:
        """Query heads and KV heads of the busiest rank when heads are cut: what the bare kernel computes."""
        return -(-self.num_heads // self.world), -(-self.num_kv_heads // self.world)


def _lengths(world: int, dtype: str, backward: bool, *seq_lens: int) -> list[Cell]:
    return [Cell(world, seq_len, dtype, backward) for seq_len in seq_lens]


_FLUX = Cell(2, 4608, "bfloat16", num_heads=24, num_kv_heads=24, head_dim=128)
_GROUPED = Cell(2, 1024, "bfloat16", num_heads=32, num_kv_heads=8)
_TWELVE = Cell(2, 1024, num_heads=12, num_kv_heads=12)

SECTIONS: dict[str, list[Cell]] = {
    "float32, forward, 2 ranks, H8 D64": _lengths(2, "float32", False, 64, 256, 1024, 4096),
    "float32, forward, 4 ranks, H8 D64": _lengths(4, "float32", False, 64, 256, 1024, 4096),
    "bfloat16, forward, 2 ranks, H8 D64": _lengths(2, "bfloat16", False, 64, 256, 1024, 4096),
    "bfloat16, forward, 4 ranks, H8 D64": _lengths(4, "bfloat16", False, 64, 256, 1024, 4096),
    "float32, forward and backward, 2 ranks, H8 D64": _lengths(2, "float32", True, 64, 256, 1024, 4096),
    "float32, forward and backward, 4 ranks, H8 D64": _lengths(4, "float32", True, 64, 256, 1024),
    "bfloat16, forward and backward, 2 ranks, H8 D64": _lengths(2, "bfloat16", True, 64, 256, 1024, 4096),
    "bfloat16, forward and backward, 4 ranks, H8 D64": _lengths(4, "bfloat16", True, 256, 1024),
    "Like FLUX: bfloat16, forward, H24 D128": [_FLUX, _FLUX._replace(world=4)],
    "12 heads, float32, forward, D64": [_TWELVE, _TWELVE._replace(world=4)],
    "32 query heads over 8 KV heads, bfloat16, D64": [
        _GROUPED,
        _GROUPED._replace(world=4),
        _GROUPED._replace(backward=True),
    ],
    "Causal, H8 D64": [
        Cell(2, 1024, is_causal=True),
        Cell(4, 1024, is_causal=True),
        Cell(2, 1024, "bfloat16", True, is_causal=True),
    ],
    "Uneven lengths and heads, D64": [
        Cell(2, 1023),
        Cell(4, 1022, "bfloat16"),
        Cell(2, 1024, num_heads=7, num_kv_heads=7),
        Cell(4, 1024, "bfloat16", num_heads=30, num_kv_heads=30),
        Cell(2, 1023, "float32", True),
    ],
}

QUICK: dict[str, list[Cell]] = {
    "Quick: 2 ranks, H8 D64": [
        Cell(2, 256),
        Cell(2, 1024, "bfloat16", True),
        Cell(2, 1024, is_causal=True),
    ],
}


def all_cells(sections: dict[str, list[Cell]]) -> list[Cell]:
    """In the order of measuring: by number of ranks, so that each world is started once."""
    return sorted((cell for cells in sections.values() for cell in cells), key=lambda cell: cell.world)
