"""The tile code of grouped products with an epilogue: that of the plain grouped product, up to what becomes of the sums.

The list of tiles, and how results are stored, are those of `kernels.grouped_matmul.tiles`. A bias is that of the tile's group.
Rows of the next group, which a tile may hold, are finished like all others, and not stored.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.epilogue_tiles import Entry, finished
from tiledsched.kernels.grouped_matmul.tiles import (
    END,
    GROUP,
    ROW,
    USED,
    Group,
    GroupedConstants as GroupedConstants,
    get,
    main_loop,
    store_rows,
    store_view,
)
from tiledsched.kernels.products import Bool as Bool, Int as Int, elements_of, place_of

CONSTANTS = ("TILE_M", "TILE_N", "TILE_K", "GROUP_M", "LATENCY", "SWAP", "STORE_VIEW", "ALIGNED")
ENTRIES = {
    "grouped_matmul_epilogue": Entry(
        "A B Gate Tiles",
        (*CONSTANTS, "PERSISTENT"),
        f"schedule_tiles(A, B, Gate, Tiles, C, extras, GroupedConstants({', '.join(CONSTANTS)}), PERSISTENT)",
    )
}


def schedule_tiles(A, B, Gate, Tiles, C, extras, const, PERSISTENT):
    """All of the current block's work tiles."""
    used, tiles_n = ct.load(Tiles, (USED, 0), (1, 1)).item(), ct.cdiv(C.shape[1], const.TILE_N)
    if PERSISTENT:
        for index in range(ct.bid(0), used * tiles_n, ct.num_blocks(0)):
            multiply(A, B, Gate, Tiles, C, place_of(index, used, tiles_n, const), extras, const)
    elif ct.bid(0) < used * tiles_n:
        multiply(A, B, Gate, Tiles, C, place_of(ct.bid(0), used, tiles_n, const), extras, const)


def multiply(A, B, Gate, Tiles, C, work, extras, const):
    """One work tile, start to finish."""
    group = Group(get(Tiles, GROUP, work.row), get(Tiles, ROW, work.row), get(Tiles, END, work.row))
    row, column = elements_of(0, work.column, const.TILE_M, const.TILE_N)
    row = row + group.row
    gate = None
    if Gate is None:
        acc = main_loop(A, B, group, work.column, const)
    else:
        acc, gate = both_products(A, B, Gate, group, work.column, const)
    at = (group.row, work.column)
    bias = None if extras.bias is None else ct.gather(extras.bias, (group.index, column))
    residual = None if extras.residual is None else rows_of(extras.residual, const.TILE_N, const).load(at)
    tile = finished(acc, gate, bias, residual, row, column, extras).astype(C.dtype)
    if const.STORE_VIEW:
        store_view(C, group, work.column, tile, const)
    else:
        store_rows(C, group, work.column, tile, const)


def both_products(A, B, Gate, group, column, const):
    """The sums of both products of a tile of rows, each `[TILE_M, TILE_N]` in float32."""
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows, shape = rows_of(A, const.TILE_K, const), (const.TILE_K, const.TILE_N)
    columns = B.tiled_view((1, *shape), padding_mode=ct.PaddingMode.ZERO)
    gates = Gate.tiled_view((1, *shape), padding_mode=ct.PaddingMode.ZERO)
    acc = ct.zeros((const.TILE_N, const.TILE_M) if const.SWAP else (const.TILE_M, const.TILE_N), ct.float32)
    gate = acc
    for step in range(ct.cdiv(A.shape[1], const.TILE_K)):
        a = rows.load((group.row, step), latency=latency)
        b = columns.load((group.index, step, column), latency=latency).reshape(shape)
        g = gates.load((group.index, step, column), latency=latency).reshape(shape)
        acc = ct.mma(ct.transpose(b), ct.transpose(a), acc) if const.SWAP else ct.mma(a, b, acc)
        gate = ct.mma(ct.transpose(g), ct.transpose(a), gate) if const.SWAP else ct.mma(a, g, gate)
    return (ct.transpose(acc), ct.transpose(gate)) if const.SWAP else (acc, gate)


def rows_of(array, COLUMNS, const):
    """A matrix as tiles of TILE_M rows, of which one begins at every row, with zeros beyond the edge."""
    steps = (1, COLUMNS)
    return array.tiled_view((const.TILE_M, COLUMNS), padding_mode=ct.PaddingMode.ZERO, traversal_steps=steps)
