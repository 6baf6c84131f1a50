"""The tile code of grouped products: the rows of each group times the matrix of that group, with the schedule left open.

How many rows a group has is known on the device alone. A first launch, `list_tiles`, writes down where each tile of rows begins
and to which group it belongs: a table as long as it may have to be, and how much of it is used. The second launch,
`grouped_matmul`, walks over the table's tiles and the columns of C, in the order of the plain product (`kernels.products`).

A tile begins at any row. A is loaded through a view whose tiles begin at every row, so that a tile may hold rows of the next
group; what becomes of these must not be stored. STORE says how: `view`, by the TMA unit through a view of C that ends with the
group, or `rows`, by threads, sixteen bytes of a row of the group at a time. The TMA unit for whole tiles and threads for the
last tile of a group was slower than either on an H200.

The groups are not looked up in the product itself: the search takes vectors over all groups, and the compiler (13.5 on sm_90)
then refuses loops over work tiles, or gives warps to the search that the product needs.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.products import Bool, Int, ProductConstants, elements_of, place_of

ALIGNED_ELEMENTS = 8
"""Elements of which rows of C are multiples where they start at multiples of 16 bytes."""
GROUP, ROW, END, USED = 0, 1, 2, 3
"""Rows of the table of tiles: the group of each, its first row, and the end of its group; the last row begins with the number of
tiles.
"""


@dataclass(frozen=True)
class GroupedConstants(ProductConstants):
    """The compile-time constants of the product, whose work tiles have one part."""

    SWAP: bool
    """Whether the tensor cores multiply the transposed operands in exchanged order."""
    STORE_VIEW: bool
    """Whether the TMA unit stores through a view that ends with the group; see the top of this file."""
    ALIGNED: bool
    """Whether rows of C start at multiples of 16 bytes."""


@dataclass(frozen=True)
class Group:
    """Where a work tile's rows are."""

    index: Any
    """Index of the group."""
    row: Any
    """First row of the tile."""
    end: Any
    """End of the group's rows."""


def list_tiles(Offsets, Tiles, tokens, TILE_M: Int, GROUPS: Int):
    """Fill the current block's column of Tiles, int32 `[4, slots]`, from Offsets `[groups]`, the ends of the groups.

    GROUPS is a power of two, at least the number of groups. Whatever the offsets hold, no tile lies beyond the last of the
    `tokens` rows.
    """
    groups, last = ct.arange(GROUPS, dtype=ct.int32), Offsets.shape[0] - 1
    ends = ct.minimum(ct.gather(Offsets, ct.minimum(groups, last)), tokens)
    begins = ct.maximum(ct.gather(Offsets, ct.minimum(ct.maximum(groups - 1, 0), last)), 0)
    begins = ct.where(groups > 0, begins, 0)
    # Beyond the last group, ends and begins are alike.
    tiles = (ct.maximum(ends - begins, 0) + (TILE_M - 1)) // TILE_M
    before, slot = ct.cumsum(tiles, axis=0) - tiles, ct.bid(0)
    mine = (before <= slot) & (slot < before + tiles)
    ct.scatter(Tiles, (GROUP, slot), ct.sum(ct.where(mine, groups, 0)))
    ct.scatter(Tiles, (ROW, slot), ct.sum(ct.where(mine, begins + (slot - before) * TILE_M, 0)))
    ct.scatter(Tiles, (END, slot), ct.sum(ct.where(mine, ends, 0)))
    ct.scatter(Tiles, (USED, slot), min(ct.sum(tiles), Tiles.shape[1]))


def grouped_matmul(
    A,
    B,
    Tiles,
    C,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    PERSISTENT: Bool,
    LATENCY: Int,
    SWAP: Bool,
    STORE_VIEW: Bool,
    ALIGNED: Bool,
):
    """C[rows of group g] = A[rows of group g] @ B[g] for A `[tokens, k]`, B `[groups, k, n]` and C `[tokens, n]`."""
    const = GroupedConstants(TILE_M, TILE_N, 0, TILE_K, GROUP_M, LATENCY, 1, SWAP, STORE_VIEW, ALIGNED)
    schedule_tiles(A, B, None, Tiles, C, None, None, const, PERSISTENT)


def schedule_tiles(A, B, Gate, Tiles, C, finish, extras, const, PERSISTENT):
    """All of the current block's work tiles. Gate, `finish` and `extras` are those of an epilogue; None without one."""
    used, tiles_n = ct.load(Tiles, (USED, 0), (1, 1)).item(), ct.cdiv(C.shape[1], const.TILE_N)
    if PERSISTENT:
        for index in range(ct.bid(0), used * tiles_n, ct.num_blocks(0)):
            multiply(A, B, Gate, Tiles, C, place_of(index, used, tiles_n, const), finish, extras, const)
    elif ct.bid(0) < used * tiles_n:
        multiply(A, B, Gate, Tiles, C, place_of(ct.bid(0), used, tiles_n, const), finish, extras, const)


def multiply(A, B, Gate, Tiles, C, work, finish, extras, const):
    """One work tile, start to finish."""
    group = Group(get(Tiles, GROUP, work.row), get(Tiles, ROW, work.row), get(Tiles, END, work.row))
    rows, columns = elements_of(0, work.column, const.TILE_M, const.TILE_N)
    rows = rows + group.row
    acc, gate = main_loop(A, B, Gate, group, work.column, const)
    if finish is not None:
        acc = finish(acc, gate, group, work.column, rows, columns, extras, const)
    tile = acc.astype(C.dtype)
    if const.STORE_VIEW:
        store_view(C, group, work.column, tile, const)
    else:
        store_rows(C, group, work.column, tile, const)


def get(Tiles, row, slot):
    """One number of the table."""
    return ct.load(Tiles, (row, slot), (1, 1)).item()


def main_loop(A, B, Gate, group, column, const):
    """The products of a tile of rows and tiles of columns of B and of Gate, each `[TILE_M, TILE_N]` in float32; the second is
    None without a Gate."""
    latency, shape = None if const.LATENCY == 0 else const.LATENCY, (const.TILE_K, const.TILE_N)
    rows = rows_of(A, const.TILE_K, const)
    columns = B.tiled_view((1, *shape), padding_mode=ct.PaddingMode.ZERO)
    gates = None if Gate is None else Gate.tiled_view((1, *shape), padding_mode=ct.PaddingMode.ZERO)
    acc = ct.zeros((const.TILE_N, const.TILE_M) if const.SWAP else (const.TILE_M, const.TILE_N), ct.float32)
    gate = None if Gate is None else acc
    for step in range(ct.cdiv(A.shape[1], const.TILE_K)):
        a = rows.load((group.row, step), latency=latency)
        b = columns.load((group.index, step, column), latency=latency).reshape(shape)
        if Gate is None:
            acc = added(acc, a, b, const)
        else:
            g = gates.load((group.index, step, column), latency=latency).reshape(shape)
            acc, gate = added(acc, a, b, const), added(gate, a, g, const)
    if const.SWAP:
        acc, gate = ct.transpose(acc), None if Gate is None else ct.transpose(gate)
    return acc, gate


def added(acc, a, b, const):
    """Sums with the product of a step added to them, transposed where operands are exchanged."""
    return ct.mma(ct.transpose(b), ct.transpose(a), acc) if const.SWAP else ct.mma(a, b, acc)


def rows_of(array, COLUMNS, const):
    """A matrix as tiles of TILE_M rows, of which one begins at every row, with zeros beyond the edge."""
    steps = (1, COLUMNS)
    return array.tiled_view((const.TILE_M, COLUMNS), padding_mode=ct.PaddingMode.ZERO, traversal_steps=steps)


def store_view(C, group, column, tile, const):
    """Store a tile through a view of C that ends with the group, whose tiles begin at every row.

    The compiler takes the TMA unit only where it knows that rows are whole groups of elements.
    """
    mine = C.slice(0, 0, group.end)
    if const.ALIGNED:
        mine = mine.slice(1, 0, ct.assume_divisible_by(C.shape[1], ALIGNED_ELEMENTS))
    steps = (1, const.TILE_N)
    mine.tiled_view((const.TILE_M, const.TILE_N), traversal_steps=steps).store((group.row, column), tile)


def store_rows(C, group, column, tile, const):
    """Store those rows of a tile that belong to its group."""
    rows, columns = elements_of(0, column, const.TILE_M, const.TILE_N)
    rows = rows + group.row
    width = ct.assume_divisible_by(C.shape[1], ALIGNED_ELEMENTS) if const.ALIGNED else C.shape[1]
    ct.scatter(C, (rows, columns), tile, mask=(rows < group.end) & (columns < width), check_bounds=False)
