"""A reach picture as geometry: which cells get which shade, which are wrong, where shards end. The template draws it.

Paths are in units of one cell, x over keys and y over queries; cells side by side in a row are one stroke of width 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from .schema import Picture

WRONG_SHARE = 1e-4  # a share that is off by more is wrong: float32 measures it to about 1e-6
SHADES = ("none", "up to 1/4", "up to 1/2", "up to 3/4", "up to all", "more")
SIDE = 256  # pixels of the longer side at most, as long as a cell keeps 2
MIN_LABEL = 46  # pixels that "rank 0" takes

Shares = Sequence[Sequence[float | None]]
Mask = list[list[bool]]


@dataclasses.dataclass(frozen=True)
class Label:
    """A text at a place along an axis, in cells."""

    at: float
    text: str


@dataclasses.dataclass(frozen=True)
class Axis:
    """One side of the picture: tokens in global order, cut into the shards of the ranks."""

    length: int
    borders: tuple[int, ...]  # where one shard ends and the next begins, inside the picture
    ranks: tuple[Label, ...]
    tokens: tuple[Label, ...]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One half of a picture: what was measured, or what must be."""

    name: str
    description: str
    shades: dict[int, str]  # shade, from 1 on → path
    wrong: str  # path of the cells that are not as they must be, empty if all are
    outline: str  # path around them


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture, ready for the template. cell: pixels of one cell's side."""

    title: str
    cell: int
    queries: Axis
    keys: Axis
    panels: tuple[Panel, ...]
    wrong_cells: int


def _runs(rows: Iterable[Sequence[bool]]) -> Iterator[tuple[int, int, int]]:
    """(first column, row, length) of each run of true cells."""
    for y, row in enumerate(rows):
        x = 0
        for value, group in itertools.groupby(row):
            length = sum(1 for _ in group)
            if value:
                yield x, y, length
            x += length


def _stroke_rows(mask: Mask) -> str:
    """The path that covers the true cells when it is drawn one cell wide. Relative moves keep it short."""
    parts = []
    pen_x, pen_y = 0, 0.0
    for x, y, length in _runs(mask):
        parts.append(f"m{x - pen_x} {y + 0.5 - pen_y:g}h{length}")
        pen_x, pen_y = x + length, y + 0.5
    return "".join(parts)


def _outline(mask: Mask) -> str:
    """The path along every edge between a true cell and another or the outside."""

    def edges(rows: Mask) -> Iterator[tuple[int, int, int]]:
        nothing = [False] * len(rows[0])
        return _runs(
            [[a != b for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise([nothing, *rows, nothing])]
        )

    if not any(map(any, mask)):
        return ""
    columns = [list(column) for column in zip(*mask, strict=True)]
    horizontal = "".join(f"M{x} {y}h{length}" for x, y, length in edges(mask))
    return horizontal + "".join(f"M{x} {y}v{length}" for y, x, length in edges(columns))


def _shade(share: float | None, largest: float) -> int:
    """Index into SHADES: the share as a part of the largest that this query must give to one key."""
    if share is None or share <= WRONG_SHARE:
        return 0
    ratio = share / largest if largest > 0 else math.inf
    return 5 if ratio > 1.01 else max(1, math.ceil(4 * ratio - 0.01))


def _is_wrong(share: float | None, expected: float) -> bool:
    return share is None or not abs(share - expected) <= WRONG_SHARE


def _mask(rows: Shares, test: Callable[[int, int], bool]) -> Mask:
    return [[test(y, x) for x in range(len(row))] for y, row in enumerate(rows)]


def _panel(name: str, description: str, rows: Shares, expected: Sequence[Sequence[float]], wrong: Mask) -> Panel:
    shades = [[_shade(share, max(must)) for share in row] for row, must in zip(rows, expected, strict=True)]
    paths = {
        index: _stroke_rows([[shade == index for shade in row] for row in shades]) for index in range(1, len(SHADES))
    }
    return Panel(
        name, description, {k: path for k, path in paths.items() if path}, _stroke_rows(wrong), _outline(wrong)
    )


def _axis(shards: Sequence[int], cell: int) -> Axis:
    ends = list(itertools.accumulate(shards))
    labels = [
        Label(end - length / 2, f"rank {rank}" if length * cell >= MIN_LABEL else f"{rank}")
        for rank, (end, length) in enumerate(zip(ends, shards, strict=True))
        if length
    ]
    total = ends[-1]
    borders = tuple(sorted({end for end in ends if 0 < end < total}))
    tokens = tuple(Label(start, str(start)) for start in (0, *borders))
    return Axis(total, borders, tuple(labels), tokens)


def draw(picture: Picture) -> Drawing:
    """Measured and expected, side by side, wrong cells marked in the measured one."""
    weights, expected = picture["weights"], picture["expected"]
    wrong = [
        [_is_wrong(share, must) for share, must in zip(row, musts, strict=True)]
        for row, musts in zip(weights, expected, strict=True)
    ]
    count = sum(map(sum, wrong))
    size = f"{len(weights)} query tokens by {sum(picture['key_shards'])} key tokens on {picture['cp_size']} ranks"
    cell = max(2, SIDE // max(1, len(weights), sum(picture["key_shards"])))
    none = [[False] * len(row) for row in expected]
    measured_text = f"{size}. {count} cells differ from what must be." if count else f"{size}. All as it must be."
    return Drawing(
        title=picture["title"],
        cell=cell,
        queries=_axis(picture["query_shards"], cell),
        keys=_axis(picture["key_shards"], cell),
        panels=(
            _panel("measured", measured_text, weights, expected, wrong),
            _panel("must be", f"{size}.", expected, expected, none),
        ),
        wrong_cells=count,
    )
