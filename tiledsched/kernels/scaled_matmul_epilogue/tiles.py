"""The tile code of products of 8-bit floats with an epilogue: that of the plain product, up to what becomes of the scaled sums.

The order of the work tiles, the main loop, the scales, and the shares of k are those of `kernels.scaled_matmul.tiles`. A gate is
a second product of the same rows of A, with scales of its own. The TMA unit stores all results, as it does in the plain product.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.epilogue_tiles import KernelText, store, store_combined
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
from tiledsched.kernels.scaled_matmul.tiles import (
    ROW_ELEMENTS,
    ScaledConstants as ScaledConstants,
    Scaling as Scaling,
    add_product,
    finished as scaled,
    main_loop,
    only_scale,
    row_view,
    zeros,
)

PRODUCT = ("TILE_M", "TILE_N", "REST_N", "TILE_K", "GROUP_M", "LATENCY", "SWAP", "fast_accum", "BLOCK_SCALES", "WHOLE")
SUM = ("SPLIT_K", "COMBINE_M", "COMBINE_N", "COMBINE_EVEN", "ROW_SCALES", "BLOCK_SCALES")
ENTRIES = {
    "scaled_matmul_epilogue": KernelText(
        "A B ScaleA ScaleB Gate ScaleGate",
        (*PRODUCT, "PERSISTENT", "ROW_SCALES"),
        f"schedule_tiles(A, B, ScaleA, ScaleB, Gate, ScaleGate, C, extras, "
        f"ScaledConstants({', '.join(PRODUCT[:6])}, 1, {', '.join(PRODUCT[6:])}), Scaling(ROW_SCALES, False), PERSISTENT)",
    ),
    "combine_scaled_epilogue": KernelText(
        "Partial ScaleA ScaleB", SUM, f"combine(Partial, ScaleA, ScaleB, C, extras, {', '.join(SUM)})"
    ),
}


def schedule_tiles(A, B, ScaleA, ScaleB, Gate, ScaleGate, C, extras, const, scaling, PERSISTENT):
    """All of the current block's work tiles."""
    tiles_m, tiles_n = ct.cdiv(C.shape[0], const.TILE_M), ct.cdiv(C.shape[1], const.TILE_N + const.REST_N)
    arrays = (A, B, ScaleA, ScaleB, Gate, ScaleGate, C)
    over_tiles(multiply, tiles_m * tiles_n, PERSISTENT, tiles_m, tiles_n, arrays, extras, const, scaling)


def multiply(index, tiles_m, tiles_n, arrays, extras, const, scaling):
    """One work tile, start to finish."""
    A, B, ScaleA, ScaleB, Gate, ScaleGate, C = arrays
    work = place_of(index, tiles_m, tiles_n, const)
    C = C.slice(1, 0, ct.assume_divisible_by(C.shape[1], ROW_ELEMENTS))
    if Gate is None:
        parts = main_loop(A, B, ScaleA, ScaleB, work, const)
        for part in ct.static_iter(range(2 if const.REST_N else 1)):
            if part == 0 or column_of(work, part, const) * const.REST_N < C.shape[1]:
                acc = scaled(parts[part], ScaleA, ScaleB, None, work, part, const, scaling)
                store(C, work, part, acc, None, extras, const)
    else:
        acc, gate = accumulate_gated(A, B, ScaleA, ScaleB, Gate, ScaleGate, work, const)
        acc = scaled(acc, ScaleA, ScaleB, None, work, 0, const, scaling)
        gate = scaled(gate, ScaleA, ScaleGate, None, work, 0, const, scaling)
        store(C, work, 0, acc, gate, extras, const)


def accumulate_gated(A, B, ScaleA, ScaleB, Gate, ScaleGate, work, const):
    """The sums of both products, each `[TILE_M, TILE_N]` in float32. With scales of blocks, one product after the other: both at
    once are more than registers hold."""
    if const.BLOCKS:
        return main_loop(A, B, ScaleA, ScaleB, work, const)[0], main_loop(A, Gate, ScaleA, ScaleGate, work, const)[0]
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows = row_view(A, const)
    columns, gates = part_view(B, const.TILE_K, 0, const), part_view(Gate, const.TILE_K, 0, const)
    acc, gate = zeros(0, const), zeros(0, const)
    for step in range(ct.cdiv(A.shape[1], const.TILE_K)):
        a = rows.load((work.row, step), latency=latency)
        acc = add_product(acc, a, columns.load((step, work.column), latency=latency), const)
        gate = add_product(gate, a, gates.load((step, work.column), latency=latency), const)
    return (ct.transpose(acc), ct.transpose(gate)) if const.SWAP else (acc, gate)


def combine(Partial, ScaleA, ScaleB, C, extras, SPLIT_K, COMBINE_M, COMBINE_N, EVEN, ROW_SCALES, BLOCK_SCALES):
    """C = the finished sum of Partial `[SPLIT_K, m, n]` over its first axis, always in the same order. EVEN: tiles divide C.

    Shares of products with scales of blocks have been scaled already.
    """
    row, column = elements_of(ct.bid(0), ct.bid(1), COMBINE_M, COMBINE_N)
    total = sum_of_shares(Partial, row, column, SPLIT_K, EVEN)
    if ROW_SCALES:
        total = total * ct.gather(ScaleA, row, check_bounds=not EVEN)
        total = total * ct.gather(ScaleB, column, check_bounds=not EVEN)
    elif not BLOCK_SCALES:
        total = total * only_scale(ScaleA, ScaleB)
    store_combined(C, row, column, total, extras, EVEN)
