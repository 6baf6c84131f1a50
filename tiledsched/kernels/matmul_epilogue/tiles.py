"""The tile code of matrix products with an epilogue: that of the plain product, up to what becomes of the sums.

The order of the work tiles, the main loop, the copies of operands that TMA cannot load, and the shares of k are those of
`kernels.matmul.tiles`, whose own kernels stay as they are. A gate is a second product of the same rows of A, whose sums are held
beside those of the first, so that a work tile has half as many columns.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.epilogue_tiles import KernelText, store, store_combined
from tiledsched.kernels.matmul.tiles import MatmulConstants as MatmulConstants, copy_tile, main_loop, row_view
from tiledsched.kernels.products import (
    Bool as Bool,
    Int as Int,
    column_of,
    elements_of,
    part_view,
    place_of,
    sum_of_shares,
)
from tiledsched.kernels.rows import over_tiles

PRODUCT = ("TILE_M", "TILE_N", "REST_N", "TILE_K", "GROUP_M", "PERSISTENT", "LATENCY")
SUM = ("SPLIT_K", "COMBINE_M", "COMBINE_N", "COMBINE_EVEN")
SCHEDULE = "schedule_tiles(A, B, Gate, C, extras, MatmulConstants({}, 1{}))"
ENTRIES = {
    "matmul_epilogue": KernelText("A B Gate", (*PRODUCT, "TMA_STORE"), SCHEDULE.format(", ".join(PRODUCT), "")),
    "matmul_epilogue_in_shares": KernelText(
        "A B Gate", (*PRODUCT, "TMA_STORE", "SHARES"), SCHEDULE.format(", ".join(PRODUCT), ", SHARES")
    ),
    "matmul_epilogue_padded": KernelText(
        "PaddedA PaddedB PaddedGate",
        (*PRODUCT, "TMA_STORE"),
        SCHEDULE.format(", ".join(PRODUCT), "").replace("A, B, Gate", "PaddedA, PaddedB, PaddedGate"),
    ),
    "combine_epilogue": KernelText("Partial", SUM, f"combine(Partial, C, extras, {', '.join(SUM)})"),
}


def pad_gate(Gate, PaddedGate, PAD_ROWS: Int, PAD_COLUMNS: Int):
    """Copy Gate into PaddedGate, with zeros behind its rows and columns."""
    copy_tile(Gate, PaddedGate, PAD_ROWS, PAD_COLUMNS)


def schedule_tiles(A, B, Gate, C, extras, const):
    """All of the current block's work tiles."""
    tiles_m = ct.cdiv(C.shape[0], const.TILE_M)
    tiles_n = ct.cdiv(C.shape[1], const.TILE_N + const.REST_N)
    over_tiles(multiply, tiles_m * tiles_n, const.PERSISTENT, tiles_m, tiles_n, A, B, Gate, C, extras, const)


def multiply(index, tiles_m, tiles_n, A, B, Gate, C, extras, const):
    """One work tile, start to finish."""
    work = place_of(index, tiles_m, tiles_n, const)
    if Gate is None:
        accumulators = main_loop(A, B, work, const)
        store(C, work, 0, accumulators[0], None, extras, const)
        if const.REST_N and column_of(work, 1, const) * const.REST_N < C.shape[1]:
            store(C, work, 1, accumulators[1], None, extras, const)
    else:
        acc, gate = accumulate_gated(A, B, Gate, work, const)
        store(C, work, 0, acc, gate, extras, const)


def accumulate_gated(A, B, Gate, work, const):
    """The sums of both products, each `[TILE_M, TILE_N]` in float32."""
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows = row_view(A, const)
    columns, gates = part_view(B, const.TILE_K, 0, const), part_view(Gate, const.TILE_K, 0, const)
    acc = ct.zeros((const.TILE_M, const.TILE_N), ct.float32)
    gate = ct.zeros((const.TILE_M, const.TILE_N), ct.float32)
    for step in range(ct.cdiv(A.shape[1], const.TILE_K)):
        a = rows.load((work.row, step), latency=latency)
        acc = ct.mma(a, columns.load((step, work.column), latency=latency), acc)
        gate = ct.mma(a, gates.load((step, work.column), latency=latency), gate)
    return acc, gate


def combine(Partial, C, extras, SPLIT_K, COMBINE_M, COMBINE_N, EVEN):
    """C = the finished sum of Partial `[SPLIT_K, m, n]` over its first axis, always in the same order. EVEN: tiles divide C."""
    row, column = elements_of(ct.bid(0), ct.bid(1), COMBINE_M, COMBINE_N)
    store_combined(C, row, column, sum_of_shares(Partial, row, column, SPLIT_K, EVEN), extras, EVEN)
