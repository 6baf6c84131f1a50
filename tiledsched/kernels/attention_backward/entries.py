"""The kernels that are launched: thin entries over the tile code of :mod:`tiledsched.kernels.attention_backward.tiles`.

cuTile (1.7) takes no dataclass as a kernel's parameter, so that each constant is a parameter. Arrays that a problem does without
have one element, and are not read.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated

import cuda.tile as ct

from tiledsched.kernels.attention.features import Features
from tiledsched.kernels.attention_backward import queries, rows, tiles
from tiledsched.kernels.rows import Bool, Int

# Columns are compile-time constants. Saying so also keeps cuTile from making a size-one batch axis static, which would give
# batch 1 its own machine code.
HeadArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
RowArray = Annotated[ct.Array, ct.ArrayAnnotation(static_stride_dims=(2,))]


def attention_backward_rows(
    Out: HeadArray,
    dOut: HeadArray,
    Lse: RowArray,
    dLse: ct.Array,
    CuQ: ct.Array,
    LseLog2: RowArray,
    Delta: RowArray,
    dQSum: HeadArray,
    ROWS: Int,
    TILE_V_WHOLE: Int,
    DQ_COLUMNS: Int,
    DLSE: Bool,
    PACKED: Bool,
    ADDS: Bool,
):
    """Delta and LseLog2 of the query rows, and with ADDS zeros in dQSum."""
    dlse, offsets = dLse if DLSE else None, CuQ if PACKED else None
    rows.prepare_rows(Out, dOut, Lse, dlse, offsets, LseLog2, Delta, dQSum, ROWS, TILE_V_WHOLE, DQ_COLUMNS, ADDS)


def attention_backward_keys(
    Q: HeadArray,
    K: HeadArray,
    V: HeadArray,
    dOut: HeadArray,
    LseLog2: RowArray,
    Delta: RowArray,
    dQSum: HeadArray,
    dK: HeadArray,
    dV: HeadArray,
    dKParts: HeadArray,
    dVParts: HeadArray,
    Starts: ct.Array,
    Lengths: ct.Array,
    CuQ: ct.Array,
    CuK: ct.Array,
    scale_log2,
    cap_scale,
    scale,
    window,
    window_right,
    TILE_M: Int,
    TILE_N: Int,
    TILE_D: Int,
    REST_D: Int,
    TILE_V: Int,
    REST_V: Int,
    GROUP: Int,
    EVEN: Bool,
    CAUSAL: Bool,
    BOTTOM_RIGHT: Bool,
    WINDOW: Bool,
    WINDOW_RIGHT: Bool,
    SOFTCAP: Bool,
    STARTS: Bool,
    LENGTHS: Bool,
    PACKED: Bool,
    LATENCY_Q: Int,
    LATENCY_DO: Int,
    TMA_LOADS: Bool,
    LOOP_SPLIT: Bool,
    BLOCK_ORDER: Int,
    PERSISTENT: Bool,
    TRANSPOSED: Bool,
    AHEAD: Bool,
    DQ_LATE: Bool,
    DV_PLACE: Int,
    DQ_TRANSPOSED: Bool,
    DELTA_FIRST: Bool,
    TOGETHER: Bool,
    ADDS: Bool,
):
    """dK and dV, or the shares of every query head in them, and shares of dQ."""
    const = tiles.BackwardConstants(
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        TILE_D=TILE_D,
        REST_D=REST_D,
        TILE_V=TILE_V,
        REST_V=REST_V,
        GROUP=GROUP,
        EVEN=EVEN,
        CAUSAL=CAUSAL,
        BOTTOM_RIGHT=BOTTOM_RIGHT,
        WINDOW=WINDOW,
        WINDOW_RIGHT=WINDOW_RIGHT,
        SOFTCAP=SOFTCAP,
        STARTS=STARTS,
        LENGTHS=LENGTHS,
        PACKED=PACKED,
        LATENCY_Q=LATENCY_Q,
        LATENCY_DO=LATENCY_DO,
        TMA_LOADS=TMA_LOADS,
        LOOP_SPLIT=LOOP_SPLIT,
        BLOCK_ORDER=BLOCK_ORDER,
        PERSISTENT=PERSISTENT,
        TRANSPOSED=TRANSPOSED,
        AHEAD=AHEAD,
        DQ_LATE=DQ_LATE,
        DV_PLACE=DV_PLACE,
        DQ_TRANSPOSED=DQ_TRANSPOSED,
        DELTA_FIRST=DELTA_FIRST,
        TOGETHER=TOGETHER,
        ADDS=ADDS,
    )
    features = Features(None, Starts, Lengths, window, window_right, cap_scale, CuQ, CuK)
    dk, dv = (dK, dV) if TOGETHER else (dKParts, dVParts)
    tiles.compute_keys(Q, K, V, dOut, LseLog2, Delta, dQSum, dk, dv, scale_log2, scale, features, const)


def attention_backward_spans(Blocks: ct.Array, Spans: ct.Array):
    """Which query rows may see each block of keys, from lists of blocks."""
    rows.store_spans(Blocks, Spans)


def attention_backward_groups(
    dKParts: HeadArray,
    dVParts: HeadArray,
    dK: HeadArray,
    dV: HeadArray,
    ROWS: Int,
    TILE_D_WHOLE: Int,
    TILE_V_WHOLE: Int,
    GROUP: Int,
):
    """dK and dV from the shares of the query heads."""
    rows.sum_groups(dKParts, dVParts, dK, dV, ROWS, TILE_D_WHOLE, TILE_V_WHOLE, GROUP)


def attention_backward_store(dQSum: HeadArray, dQ: HeadArray, scale, ROWS: Int, DQ_COLUMNS: Int):
    """dQ from its sums."""
    rows.store_queries(dQSum, dQ, scale, ROWS, DQ_COLUMNS)


def attention_backward_queries(
    Q: HeadArray,
    K: HeadArray,
    V: HeadArray,
    dOut: HeadArray,
    LseLog2: RowArray,
    Delta: RowArray,
    dQ: HeadArray,
    Starts: ct.Array,
    Lengths: ct.Array,
    CuQ: ct.Array,
    CuK: ct.Array,
    scale_log2,
    cap_scale,
    scale,
    window,
    window_right,
    TILE_M_DQ: Int,
    TILE_N_DQ: Int,
    TILE_D: Int,
    REST_D: Int,
    TILE_V: Int,
    REST_V: Int,
    GROUP: Int,
    EVEN_DQ: Bool,
    CAUSAL: Bool,
    BOTTOM_RIGHT: Bool,
    WINDOW: Bool,
    WINDOW_RIGHT: Bool,
    SOFTCAP: Bool,
    STARTS: Bool,
    LENGTHS: Bool,
    PACKED: Bool,
    LATENCY_Q: Int,
    LATENCY_DO: Int,
    TMA_LOADS: Bool,
    LOOP_SPLIT: Bool,
    BLOCK_ORDER: Int,
    PERSISTENT: Bool,
):
    """dQ, for which a block goes over the keys."""
    const = tiles.BackwardConstants(
        TILE_M=TILE_M_DQ,
        TILE_N=TILE_N_DQ,
        TILE_D=TILE_D,
        REST_D=REST_D,
        TILE_V=TILE_V,
        REST_V=REST_V,
        GROUP=GROUP,
        EVEN=EVEN_DQ,
        CAUSAL=CAUSAL,
        BOTTOM_RIGHT=BOTTOM_RIGHT,
        WINDOW=WINDOW,
        WINDOW_RIGHT=WINDOW_RIGHT,
        SOFTCAP=SOFTCAP,
        STARTS=STARTS,
        LENGTHS=LENGTHS,
        PACKED=PACKED,
        LATENCY_Q=LATENCY_Q,
        LATENCY_DO=LATENCY_DO,
        TMA_LOADS=TMA_LOADS,
        LOOP_SPLIT=LOOP_SPLIT,
        BLOCK_ORDER=BLOCK_ORDER,
        PERSISTENT=PERSISTENT,
    )
    features = Features(None, Starts, Lengths, window, window_right, cap_scale, CuQ, CuK)
    queries.compute_queries(Q, K, V, dOut, LseLog2, Delta, dQ, scale_log2, scale, features, const)


def attention_backward_sinks(LseLog2: RowArray, Delta: RowArray, Sinks: ct.Array, dSinks: ct.Array, SINK_ROWS: Int):
    """The gradients of the sinks."""
    rows.sum_sinks(LseLog2, Delta, Sinks, dSinks, SINK_ROWS)
