"""The tile code of grouped products with an epilogue: that of the plain grouped product, up to what becomes of the sums.

The list of tiles, the main loop, and how results are stored, are those of `kernels.grouped_matmul.tiles`. A bias is that of the
tile's group. Rows of the next group, which a tile may hold, are finished like all others, and not stored.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.epilogue_tiles import KernelText, finished
from tiledsched.kernels.grouped_matmul.tiles import (
    GroupedConstants as GroupedConstants,
    rows_of,
    schedule_tiles as schedule_tiles,
)
from tiledsched.kernels.products import Bool as Bool, Int as Int

CONSTANTS = ("TILE_M", "TILE_N", "TILE_K", "GROUP_M", "LATENCY", "SWAP", "STORE_VIEW", "ALIGNED")
ENTRIES = {
    "grouped_matmul_epilogue": KernelText(
        "A B Gate Tiles",
        (*CONSTANTS, "PERSISTENT"),
        "schedule_tiles(A, B, Gate, Tiles, C, finish, extras, GroupedConstants(TILE_M, TILE_N, 0, TILE_K, GROUP_M, LATENCY, 1, "
        "SWAP, STORE_VIEW, ALIGNED), PERSISTENT)",
    )
}


def finish(acc, gate, group, column, rows, columns, extras, const):
    """What becomes of the sums of a work tile, in float32; see :func:`tiledsched.kernels.epilogue_tiles.finished`."""
    at = (group.row, column)
    bias = None if extras.bias is None else ct.gather(extras.bias, (group.index, columns))
    residual = None if extras.residual is None else rows_of(extras.residual, const.TILE_N, const).load(at)
    return finished(acc, gate, bias, residual, rows, columns, extras)
