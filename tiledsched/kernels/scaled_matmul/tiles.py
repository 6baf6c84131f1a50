"""The tile code of products of 8-bit floats: C = (A @ B) * scales + bias, with its schedule left open.

The order of the work tiles, and the shares of a split, are those of the plain product (`kernels.products`). Three things
differ. The tensor cores of sm_90 take 8-bit operands only with k contiguous in memory, for both. Few rows of A take the side
of the tensor core's tile that may be narrow (SWAP): the instruction has at least 64 rows, but may have 8 columns; B's columns
take its rows then, and the sums are transposed before they are stored. And C is stored by the TMA unit, which the compiler
chooses where it knows that rows of C are whole groups of 16 elements; in loops over work tiles it keeps products under way only
beside such stores.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct

from tiledsched.kernels.products import Bool, Int, elements_of, place_of, sum_of_shares

ROW_ELEMENTS = 16
"""Rows of A, B and C are multiples of this many elements."""


@dataclass(frozen=True)
class ScaledConstants:
    """The compile-time constants of the product."""

    TILE_M: int
    """Rows of a work tile."""
    TILE_N: int
    """Columns of a work tile."""
    TILE_K: int
    """Columns of A, and rows of B, that one step of the main loop takes."""
    GROUP_M: int
    """Rows of work tiles that are taken together, column after column."""
    LATENCY: int
    """Latency hint of the main loop's loads; 0 for none."""
    SPLIT_K: int
    """Blocks that share the walk over k of one tile of C."""
    SWAP: bool
    """Whether the tensor cores multiply the transposed operands in exchanged order."""
    FAST: bool
    """Whether sums stay in the tensor cores' own precision, which is below float32 on sm_90."""


@dataclass(frozen=True)
class Scaling:
    """What is done to sums."""

    ROWS: bool
    """Whether every row of A and every column of B has a scale of its own; else each of them has one."""
    BIAS: bool
    """Whether a bias is added."""


def scaled_matmul(
    A,
    B,
    ScaleA,
    ScaleB,
    Bias,
    C,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    PERSISTENT: Bool,
    LATENCY: Int,
    SWAP: Bool,
    fast_accum: Bool,
    ROW_SCALES: Bool,
    bias: Bool,
):
    """C = (A @ B) * ScaleA * ScaleB + Bias for A `[m, k]`, row-major, and B `[k, n]`, column-major; C `[m, n]` is row-major."""
    const = ScaledConstants(TILE_M, TILE_N, TILE_K, GROUP_M, LATENCY, 1, SWAP, fast_accum)
    scaling = Scaling(ROW_SCALES, bias)
    tiles_m, tiles_n = ct.cdiv(C.shape[0], TILE_M), ct.cdiv(C.shape[1], TILE_N)
    if PERSISTENT:
        for index in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
            multiply(A, B, ScaleA, ScaleB, Bias, C, place_of(index, tiles_m, tiles_n, const), const, scaling)
    else:
        multiply(A, B, ScaleA, ScaleB, Bias, C, place_of(ct.bid(0), tiles_m, tiles_n, const), const, scaling)


def scaled_matmul_partial(
    A,
    B,
    Partial,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    LATENCY: Int,
    SWAP: Bool,
    fast_accum: Bool,
    SPLIT_K: Int,
):
    """Partial[s] = the s-th share of A @ B, without scales, for float32 Partial `[SPLIT_K, m, n]`."""
    const = ScaledConstants(TILE_M, TILE_N, TILE_K, GROUP_M, LATENCY, SPLIT_K, SWAP, fast_accum)
    tiles_m, tiles_n = ct.cdiv(Partial.shape[1], TILE_M), ct.cdiv(Partial.shape[2], TILE_N)
    work = place_of(ct.bid(0), tiles_m, tiles_n, const)
    sums = main_loop(A, B, work, const).reshape((1, TILE_M, TILE_N))
    shares = Partial.slice(2, 0, ct.assume_divisible_by(Partial.shape[2], ROW_ELEMENTS))
    ct.store(shares, (work.share, work.row, work.column), sums)


def combine_scaled(
    Partial,
    ScaleA,
    ScaleB,
    Bias,
    C,
    SPLIT_K: Int,
    COMBINE_M: Int,
    COMBINE_N: Int,
    COMBINE_EVEN: Bool,
    ROW_SCALES: Bool,
    bias: Bool,
):
    """C = the sum of Partial `[SPLIT_K, m, n]` over its first axis, scaled, plus Bias. COMBINE_EVEN: tiles divide C."""
    rows, columns = elements_of(ct.bid(0), ct.bid(1), COMBINE_M, COMBINE_N)
    total = sum_of_shares(Partial, rows, columns, SPLIT_K, COMBINE_EVEN)
    if ROW_SCALES:
        total = total * ct.gather(ScaleA, rows, check_bounds=not COMBINE_EVEN)
        total = total * ct.gather(ScaleB, columns, check_bounds=not COMBINE_EVEN)
    else:
        total = total * only_scale(ScaleA, ScaleB)
    if bias:
        total = total + ct.gather(Bias, columns, check_bounds=not COMBINE_EVEN).astype(ct.float32)
    ct.scatter(C, (rows, columns), total.astype(C.dtype), check_bounds=not COMBINE_EVEN)


def multiply(A, B, ScaleA, ScaleB, Bias, C, work, const, scaling):
    """One work tile, start to finish."""
    sums = main_loop(A, B, work, const)
    if scaling.ROWS:
        rows = ct.load(ScaleA, (work.row,), (const.TILE_M,), padding_mode=ct.PaddingMode.ZERO)
        sums = sums * rows[:, None] * vector_of(ScaleB, work, const)
    else:
        sums = sums * only_scale(ScaleA, ScaleB)
    if scaling.BIAS:
        sums = sums + vector_of(Bias, work, const)
    out = C.slice(1, 0, ct.assume_divisible_by(C.shape[1], ROW_ELEMENTS))
    out.tiled_view((const.TILE_M, const.TILE_N)).store((work.row, work.column), sums.astype(C.dtype))


def main_loop(A, B, work, const):
    """The product over a work tile's share of k, `[TILE_M, TILE_N]` in float32."""
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows = A.tiled_view((const.TILE_M, const.TILE_K), padding_mode=ct.PaddingMode.ZERO)
    columns = B.tiled_view((const.TILE_K, const.TILE_N), padding_mode=ct.PaddingMode.ZERO)
    steps = ct.cdiv(A.shape[1], const.TILE_K)
    begin, end = 0, steps
    if const.SPLIT_K > 1:
        begin, end = steps * work.share // const.SPLIT_K, steps * (work.share + 1) // const.SPLIT_K
    acc = ct.zeros((const.TILE_N, const.TILE_M) if const.SWAP else (const.TILE_M, const.TILE_N), ct.float32)
    for step in range(begin, end):
        a, b = rows.load((work.row, step), latency=latency), columns.load((step, work.column), latency=latency)
        if const.SWAP:
            acc = ct.mma(ct.transpose(b), ct.transpose(a), acc, use_fast_acc=const.FAST)
        else:
            acc = ct.mma(a, b, acc, use_fast_acc=const.FAST)
    return ct.transpose(acc) if const.SWAP else acc


def vector_of(vector, work, const):
    """The elements of `[n]` that belong to a work tile's columns, `[1, TILE_N]` in float32."""
    found = ct.load(vector, (work.column,), (const.TILE_N,), padding_mode=ct.PaddingMode.ZERO)
    return found[None, :].astype(ct.float32)


def only_scale(ScaleA, ScaleB):
    """The product of the scales of A and of B, where each has one."""
    return ct.load(ScaleA, (0,), (1,)).item() * ct.load(ScaleB, (0,), (1,)).item()
