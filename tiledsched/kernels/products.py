"""Tile code that matrix products share: the order of their work tiles, and sums of shares of k."""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.rows import Bool as Bool, Int as Int

ROW_ELEMENTS = 16
"""Elements of which rows are multiples where arrays have 8 bits, and where the TMA unit stores what an epilogue makes."""


@dataclass(frozen=True)
class ProductConstants:
    """The compile-time constants that all kernels of products know."""

    TILE_M: int
    """Rows of a work tile."""
    TILE_N: int
    """Columns of a work tile, or of its first part."""
    REST_N: int
    """Columns of its second part, a half or a quarter of the first's; 0 where there is one part."""
    TILE_K: int
    """Columns of A, and rows of B, that one step of the main loop takes."""
    GROUP_M: int
    """Rows of work tiles that are taken together, column after column, so that their operands stay in the L2 cache."""
    LATENCY: int
    """Latency hint of the main loop's loads; 0 for none. It decides how shared memory is divided, too."""
    SPLIT_K: int
    """Blocks that share the walk over k of one tile of C."""


@dataclass(frozen=True)
class Work:
    """A work tile: which tile of C, and which share of k."""

    row: Any
    """Index of the tile along the rows of C."""
    column: Any
    """And along its columns."""
    share: Any
    """Which of the SPLIT_K shares."""


def place_of(index, tiles_m, tiles_n, const):
    """The `index`-th work tile: groups of GROUP_M rows of tiles, within a group column after column; shares slowest."""
    share = 0
    if const.SPLIT_K > 1:
        share = index // (tiles_m * tiles_n)
        index = index % (tiles_m * tiles_n)
    if const.GROUP_M == 1:
        return Work(index // tiles_n, index % tiles_n, share)
    first = index // (const.GROUP_M * tiles_n) * const.GROUP_M
    rows = min(const.GROUP_M, tiles_m - first)
    within = index % (const.GROUP_M * tiles_n)
    return Work(first + within % rows, within // rows, share)


def sum_of_shares(Partial, rows, columns, SPLIT_K, EVEN):
    """The sum of the partial products at these elements, in float32. EVEN: none of them lies beyond the edge."""
    total = ct.zeros((rows.shape[0], columns.shape[1]), ct.float32)
    for share in ct.static_iter(range(SPLIT_K)):
        total = total + ct.gather(Partial, (share, rows, columns), check_bounds=not EVEN)
    return total


def elements_of(row, column, ROWS, COLUMNS):
    """Indices of a tile's elements, `[ROWS, 1]` and `[1, COLUMNS]`: gathers and scatters without bounds move 16 bytes at a
    time, which loads and stores do only where the compiler knows what the sizes are multiples of.
    """
    rows = row * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]
    return rows, column * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32)[None, :]


def row_view(A, const):
    """A as a grid of tiles, with zeros beyond the edge."""
    return A.tiled_view((const.TILE_M, const.TILE_K), padding_mode=ct.PaddingMode.ZERO)


def part_view(array, ROWS, PART, const):
    """A matrix as a grid of tiles of `ROWS` rows and the columns of one part of a work tile, with zeros beyond the edge."""
    width = const.REST_N if PART else const.TILE_N
    # First parts stand apart by the second ones between them; where second parts begin is a multiple of their own width.
    step = const.REST_N if PART else const.TILE_N + const.REST_N
    return array.tiled_view((ROWS, width), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(ROWS, step))


def column_of(work, PART, const):
    """Index of one part of a work tile in its view."""
    if PART == 0:
        return work.column
    return work.column * (const.TILE_N // const.REST_N + 1) + const.TILE_N // const.REST_N
