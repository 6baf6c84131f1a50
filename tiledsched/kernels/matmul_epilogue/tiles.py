"""The tile code of matrix products with an epilogue: that of the plain product, up to what becomes of the sums.

The order of the work tiles, the main loop, the copies of operands that TMA cannot load, and the shares of k are those of
`kernels.matmul.tiles`, whose own kernels stay as they are. A gate is a second product of the same rows of A, whose sums are held
beside those of the first, so that a work tile has half as many columns.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.epilogue_tiles import (
    SUM,
    KernelText,
    accumulate_gated,
    combine as combine,
    schedule_tiles as schedule_tiles,
)
from tiledsched.kernels.matmul.tiles import MatmulConstants as MatmulConstants, copy_tile, main_loop
from tiledsched.kernels.products import Bool as Bool, Int as Int

PRODUCT = ("TILE_M", "TILE_N", "REST_N", "TILE_K", "GROUP_M", "PERSISTENT", "LATENCY")
SCHEDULE = (
    "schedule_tiles(sums, (A, B, Gate), C, extras, "
    "MatmulConstants(TILE_M, TILE_N, REST_N, TILE_K, GROUP_M, LATENCY, 1, PERSISTENT{}), PERSISTENT, TMA_STORE)"
)
ENTRIES = {
    "matmul_epilogue": KernelText("A B Gate", (*PRODUCT, "TMA_STORE"), SCHEDULE.format("")),
    "matmul_epilogue_in_shares": KernelText("A B Gate", (*PRODUCT, "TMA_STORE", "SHARES"), SCHEDULE.format(", SHARES")),
    "matmul_epilogue_padded": KernelText(
        "PaddedA PaddedB PaddedGate",
        (*PRODUCT, "TMA_STORE"),
        SCHEDULE.format("").replace("A, B, Gate", "PaddedA, PaddedB, PaddedGate"),
    ),
    "combine_epilogue": KernelText("Partial", SUM, f"combine(Partial, C, extras, {', '.join(SUM)})"),
}


def pad_gate(Gate, PaddedGate, PAD_ROWS: Int, PAD_COLUMNS: Int):
    """Copy Gate into PaddedGate, with zeros behind its rows and columns."""
    copy_tile(Gate, PaddedGate, PAD_ROWS, PAD_COLUMNS)


def sums(arrays, work, const):
    """The parts of the product of a work tile, and of that of the gate."""
    A, B, Gate = arrays
    if Gate is None:
        return main_loop(A, B, work, const), None
    acc, gate = accumulate_gated(A, B, Gate, work, ct.zeros((const.TILE_M, const.TILE_N), ct.float32), added, const)
    return (acc,), (gate,)


def added(acc, a, b, const):
    """Sums with the product of a step added to them."""
    return ct.mma(a, b, acc)
