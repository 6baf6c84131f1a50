"""The tile code of products of 8-bit floats with an epilogue: that of the plain product, up to what becomes of the scaled sums.

The order of the work tiles, the main loop, and the shares of k are those of `kernels.scaled_matmul.tiles`. A gate is
a second product of the same rows of A, with scales of its own. The TMA unit stores all results, as it does in the plain product.
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
from tiledsched.kernels.products import Bool as Bool, Int as Int
from tiledsched.kernels.scaled_matmul.tiles import ScaledConstants as ScaledConstants, add_product, main_loop, zeros

PRODUCT = ("TILE_M", "TILE_N", "REST_N", "TILE_K", "GROUP_M", "LATENCY", "SWAP", "fast_accum", "BLOCK_SCALES", "WHOLE")
ENTRIES = {
    "scaled_matmul_epilogue": KernelText(
        "A B ScaleA ScaleB Gate ScaleGate",
        (*PRODUCT, "PERSISTENT", "ROW_SCALES"),
        "schedule_tiles(sums, (A, B, ScaleA, ScaleB, Gate, ScaleGate), C, extras, "
        f"ScaledConstants({', '.join(PRODUCT[:6])}, 1, {', '.join(PRODUCT[6:])}), PERSISTENT, True)",
    ),
    "combine_scaled_epilogue": KernelText(
        "Partial ScaleA ScaleB", (*SUM, "ROW_SCALES"), f"combine(Partial, C, extras, {', '.join(SUM)})"
    ),
}


def sums(arrays, work, const):
    """The parts of the product of a work tile, and of that of the gate. With scales of blocks, which sums have then, one product
    is computed after the other: both at once are more than registers hold."""
    A, B, ScaleA, ScaleB, Gate, ScaleGate = arrays
    if Gate is None:
        return main_loop(A, B, ScaleA, ScaleB, work, const), None
    if const.BLOCKS:
        return main_loop(A, B, ScaleA, ScaleB, work, const), main_loop(A, Gate, ScaleA, ScaleGate, work, const)
    acc, gate = accumulate_gated(A, B, Gate, work, zeros(0, const), add_product, const)
    if const.SWAP:
        acc, gate = ct.transpose(acc), ct.transpose(gate)
    return (acc,), (gate,)
