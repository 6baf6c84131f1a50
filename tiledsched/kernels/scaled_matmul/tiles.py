"""The tile code of products of 8-bit floats: C = (A @ B) * scales + bias, with its schedule left open.

The order of the work tiles, and the shares of a split, are those of the plain product (`kernels.products`). Three things
differ. The tensor cores of sm_90 take 8-bit operands only with k contiguous in memory, for both. Few rows of A take the side
of the tensor core's tile that may be narrow (SWAP): the instruction has at least 64 rows, but may have 8 columns; B's columns
take its rows then, and the sums are transposed before they are stored. And C is stored by the TMA unit, which the compiler
chooses where it knows that rows of C are whole groups of 16 elements; in loops over work tiles it keeps products under way only
beside such stores.

A work tile is TILE_N columns wide, or REST_N more, in a second product. Without `fast_accum`, registers hold the sums of both
parts and the tensor cores' sums of one of them, where one part as wide as both would spill.

Scales of blocks belong to 128 elements of k. The tensor cores sum the products of one step, and each such sum is
scaled and added in float32. A tile lies in one block of B's columns, so that its scale is one number.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct

from tiledsched.kernels.products import (
    ROW_ELEMENTS,
    Bool,
    Int,
    ProductConstants,
    column_of,
    elements_of,
    part_view,
    place_of,
    row_view,
    sum_of_shares,
)

BLOCK = 128
"""Elements of k, and columns of B, that share a scale where blocks have scales."""


@dataclass(frozen=True)
class ScaledConstants(ProductConstants):
    """The compile-time constants of the product."""

    SWAP: bool
    """Whether the tensor cores multiply the transposed operands in exchanged order."""
    FAST: bool
    """Whether sums stay in the tensor cores' own precision, which is below float32 on sm_90."""
    BLOCKS: bool = False
    """Whether 128 elements of a row of A, and 128 x 128 of B, have a scale."""
    WHOLE: bool = True
    """Whether k is a multiple of 128; of scales of blocks."""


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
    REST_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    PERSISTENT: Bool,
    LATENCY: Int,
    SWAP: Bool,
    fast_accum: Bool,
    ROW_SCALES: Bool,
    BLOCK_SCALES: Bool,
    WHOLE: Bool,
    bias: Bool,
):
    """C = (A @ B) * ScaleA * ScaleB + Bias for A `[m, k]`, row-major, and B `[k, n]`, column-major; C `[m, n]` is row-major.

    Scales of blocks are ScaleA `[k / 128, m]` and ScaleB `[n / 128, k / 128]`, both rounded up.
    """
    const = ScaledConstants(TILE_M, TILE_N, REST_N, TILE_K, GROUP_M, LATENCY, 1, SWAP, fast_accum, BLOCK_SCALES, WHOLE)
    scaling = Scaling(ROW_SCALES, bias)
    tiles_m, tiles_n = ct.cdiv(C.shape[0], TILE_M), ct.cdiv(C.shape[1], TILE_N + REST_N)
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
    const = ScaledConstants(TILE_M, TILE_N, 0, TILE_K, GROUP_M, LATENCY, SPLIT_K, SWAP, fast_accum)
    multiply_share(A, B, None, None, Partial, const)


def scaled_blocks_partial(
    A,
    B,
    ScaleA,
    ScaleB,
    Partial,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    LATENCY: Int,
    SWAP: Bool,
    WHOLE: Bool,
    SPLIT_K: Int,
):
    """Partial[s] = the s-th share of A @ B with scales of blocks, for float32 Partial `[SPLIT_K, m, n]`."""
    const = ScaledConstants(TILE_M, TILE_N, 0, TILE_K, GROUP_M, LATENCY, SPLIT_K, SWAP, False, True, WHOLE)
    multiply_share(A, B, ScaleA, ScaleB, Partial, const)


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
    BLOCK_SCALES: Bool,
    bias: Bool,
):
    """C = the sum of Partial `[SPLIT_K, m, n]` over its first axis, scaled, plus Bias. COMBINE_EVEN: tiles divide C.

    Shares of products with scales of blocks have been scaled already.
    """
    rows, columns = elements_of(ct.bid(0), ct.bid(1), COMBINE_M, COMBINE_N)
    total = sum_of_shares(Partial, rows, columns, SPLIT_K, COMBINE_EVEN)
    if ROW_SCALES:
        total = total * ct.gather(ScaleA, rows, check_bounds=not COMBINE_EVEN)
        total = total * ct.gather(ScaleB, columns, check_bounds=not COMBINE_EVEN)
    elif not BLOCK_SCALES:
        total = total * only_scale(ScaleA, ScaleB)
    if bias:
        total = total + ct.gather(Bias, columns, check_bounds=not COMBINE_EVEN).astype(ct.float32)
    ct.scatter(C, (rows, columns), total.astype(C.dtype), check_bounds=not COMBINE_EVEN)


def multiply(A, B, ScaleA, ScaleB, Bias, C, work, const, scaling):
    """One work tile, start to finish."""
    parts = main_loop(A, B, ScaleA, ScaleB, work, const)
    out = C.slice(1, 0, ct.assume_divisible_by(C.shape[1], ROW_ELEMENTS))
    for part in ct.static_iter(range(2 if const.REST_N else 1)):
        column = column_of(work, part, const)
        if part == 0 or column * const.REST_N < C.shape[1]:
            sums = finished(parts[part], ScaleA, ScaleB, Bias, work, part, const, scaling)
            part_view(out, const.TILE_M, part, const).store((work.row, column), sums.astype(C.dtype))


def finished(sums, ScaleA, ScaleB, Bias, work, PART, const, scaling):
    """The sums of one part of a work tile with scales and bias."""
    if scaling.ROWS:
        rows = ct.load(ScaleA, (work.row,), (const.TILE_M,), padding_mode=ct.PaddingMode.ZERO)
        sums = sums * rows[:, None] * vector_of(ScaleB, work, PART, const)
    elif not const.BLOCKS:
        sums = sums * only_scale(ScaleA, ScaleB)
    if scaling.BIAS:
        sums = sums + vector_of(Bias, work, PART, const)
    return sums


def multiply_share(A, B, ScaleA, ScaleB, Partial, const):
    """The current block's share of a work tile."""
    tiles_m, tiles_n = ct.cdiv(Partial.shape[1], const.TILE_M), ct.cdiv(Partial.shape[2], const.TILE_N)
    work = place_of(ct.bid(0), tiles_m, tiles_n, const)
    sums = main_loop(A, B, ScaleA, ScaleB, work, const)[0].reshape((1, const.TILE_M, const.TILE_N))
    shares = Partial.slice(2, 0, ct.assume_divisible_by(Partial.shape[2], ROW_ELEMENTS))
    ct.store(shares, (work.share, work.row, work.column), sums)


def main_loop(A, B, ScaleA, ScaleB, work, const):
    """The product over a work tile's share of k in float32: a tuple of its parts, `[TILE_M, TILE_N]` and `[TILE_M, REST_N]`."""
    length = BLOCK if const.BLOCKS else const.TILE_K
    steps = ct.cdiv(A.shape[1], length)
    begin, end = 0, steps
    if const.SPLIT_K > 1:
        begin, end = steps * work.share // const.SPLIT_K, steps * (work.share + 1) // const.SPLIT_K
    if const.BLOCKS:
        return accumulate_blocks(A, B, ScaleA, ScaleB, work, begin, end, const)
    return accumulate(A, B, work, begin, end, const)


def accumulate(A, B, work, begin, end, const):
    """The parts of the product over the steps of TILE_K from `begin` to `end`."""
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows, columns = row_view(A, const), part_view(B, const.TILE_K, 0, const)
    acc = zeros(0, const)
    if const.REST_N == 0:
        for step in range(begin, end):
            a, b = rows.load((work.row, step), latency=latency), columns.load((step, work.column), latency=latency)
            acc = add_product(acc, a, b, const)
        return (ct.transpose(acc) if const.SWAP else acc,)
    more, second, rest = part_view(B, const.TILE_K, 1, const), last_column(B, work, const), zeros(1, const)
    for step in range(begin, end):
        a, b = rows.load((work.row, step), latency=latency), columns.load((step, work.column), latency=latency)
        acc = add_part(acc, a, b, 0, const)
        b = more.load((step, second), latency=latency)
        rest = add_part(rest, a, b, 1, const)
    return acc, rest


def accumulate_blocks(A, B, ScaleA, ScaleB, work, begin, end, const):
    """The product over the steps of 128 from `begin` to `end`: the products of a step are scaled and added to sums in float32.

    The compiler (13.5 on sm_90) would have the products of several steps under way, for which it spills registers. Shorter steps
    of TILE_K are therefore a loop of their own, and those of 128 begin with what depends on the sums, though it is always zero.
    Scales are loaded ahead of the products, which hide how long that takes.
    """
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows, columns = row_view(A, const), part_view(B, const.TILE_K, 0, const)
    inner, last, sums = BLOCK // const.TILE_K, ct.cdiv(A.shape[1], const.TILE_K), zeros(0, const)
    for step in range(begin, end):
        scales = ct.load(ScaleA, (step, work.row), (1, const.TILE_M), padding_mode=ct.PaddingMode.ZERO)
        scales = scales * ct.gather(ScaleB, (work.column * const.TILE_N // BLOCK, step))
        if const.TILE_K == BLOCK:
            a, b = rows.load((work.row, step), latency=latency), columns.load((step, work.column), latency=latency)
            part = add_product(ct.where(step < 0, sums, zeros(0, const)), a, b, const)
        else:
            part, stop = zeros(0, const), (step + 1) * inner
            for index in range(step * inner, stop if const.WHOLE else min(stop, last)):
                a, b = (
                    rows.load((work.row, index), latency=latency),
                    columns.load((index, work.column), latency=latency),
                )
                part = add_product(part, a, b, const)
        sums = sums + part * (scales if const.SWAP else scales.reshape((const.TILE_M, 1)))
    return (ct.transpose(sums) if const.SWAP else sums,)


def add_product(sums, a, b, const):
    """Sums and the product of a tile of A and a tile of B. Within blocks they begin at zero every 128 products."""
    if const.SWAP:
        return ct.mma(ct.transpose(b), ct.transpose(a), sums, use_fast_acc=const.FAST or const.BLOCKS)
    return ct.mma(a, b, sums, use_fast_acc=const.FAST or const.BLOCKS)


def add_part(sums, a, b, PART, const):
    """Sums of one of two parts with the product of a step, which is added in float32 where sums do not stay in the tensor cores.

    If the compiler (13.5 on sm_90) adds, persistent blocks wait for each instruction.
    """
    if const.FAST:
        return ct.mma(a, b, sums, use_fast_acc=True)
    return sums + ct.mma(a, b, zeros(PART, const), use_fast_acc=True)


def zeros(PART, const):
    """Sums of one part of a work tile, as the tensor cores have them."""
    width = const.REST_N if PART else const.TILE_N
    return ct.zeros((width, const.TILE_M) if const.SWAP else (const.TILE_M, width), ct.float32)


def last_column(B, work, const):
    """Index of a work tile's second part. Where that lies beyond the last column it is not stored, and yet must be something
    that can be loaded."""
    return min(column_of(work, 1, const), ct.cdiv(B.shape[1], const.REST_N) - 1)


def vector_of(vector, work, PART, const):
    """The elements of `[n]` that belong to one part of a work tile's columns, `[1, columns]` in float32."""
    width = const.REST_N if PART else const.TILE_N
    step = const.REST_N if PART else const.TILE_N + const.REST_N
    view = vector.tiled_view((width,), padding_mode=ct.PaddingMode.ZERO, traversal_steps=(step,))
    return view.load((column_of(work, PART, const),))[None, :].astype(ct.float32)


def only_scale(ScaleA, ScaleB):
    """The product of the scales of A and of B, where each has one."""
    return ct.load(ScaleA, (0,), (1,)).item() * ct.load(ScaleB, (0,), (1,)).item()
