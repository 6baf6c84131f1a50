"""Tile code that matrix products share: the order of their work tiles, and sums of shares of k."""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.rows import Bool as Bool, Int as Int


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
