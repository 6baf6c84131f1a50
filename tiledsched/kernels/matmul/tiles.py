"""The tile code of the matrix product: C = A @ B with its schedule left open.

A work tile is one tile of C, or one share of its walk over k where SPLIT_K blocks divide that walk. The main loop multiplies
and accumulates in float32; the epilogue rounds and stores. From the outside in: `schedule_tiles` is the tile scheduler,
`place_of` the order of the work tiles, `main_loop` one work tile's products, `epilogue` its store. A work tile is TILE_N
columns wide, a power of two, or REST_N more, in a second product: 160 or 192 columns divide some problems into fewer waves.

Split-K makes float32 partial products in a workspace, which a second launch, `combine`, sums. One launch whose last block
to arrive combines, by an atomic counter, would be shorter; the counter's release would order the TMA loads of the main
loop too, and the compiler (13.4 on sm_90) then overwrites tiles in shared memory while they are read.

To compute the same bits without a workspace, one block sums the shares of its tile each for itself, and then adds them up.

Where rows do not start at multiples of 16 bytes, the TMA unit cannot load them. `pad_a` and `pad_b` copy the operands into
workspaces whose rows do, and the product reads those.

These functions run on the GPU through cuTile and, unmodified, on the CPU through `tiledsched.interpreter`.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct

from tiledsched.kernels.products import (
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


@dataclass(frozen=True)
class MatmulConstants(ProductConstants):
    """The compile-time constants of the kernels."""

    PERSISTENT: bool
    """Whether a block takes one work tile of every `num_blocks`; else one each."""
    SHARES: int = 1
    """Shares of k that one block sums each for itself, before it adds them up."""


def matmul(A, B, C, TILE_M: Int, TILE_N: Int, REST_N: Int, TILE_K: Int, GROUP_M: Int, PERSISTENT: Bool, LATENCY: Int):
    """C = A @ B for A `[m, k]` and B `[k, n]`, each row- or column-major, and C `[m, n]`, row-major, of one type."""
    const = MatmulConstants(TILE_M, TILE_N, REST_N, TILE_K, GROUP_M, LATENCY, 1, PERSISTENT)
    schedule_tiles(A, B, C, const)


def matmul_partial(
    A,
    B,
    Partial,
    TILE_M: Int,
    TILE_N: Int,
    REST_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    PERSISTENT: Bool,
    LATENCY: Int,
    SPLIT_K: Int,
):
    """Partial[s] = the s-th share of A @ B, for float32 Partial `[SPLIT_K, m, n]`."""
    const = MatmulConstants(TILE_M, TILE_N, REST_N, TILE_K, GROUP_M, LATENCY, SPLIT_K, PERSISTENT)
    schedule_tiles(A, B, Partial, const)


def matmul_in_shares(
    A,
    B,
    C,
    TILE_M: Int,
    TILE_N: Int,
    REST_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    PERSISTENT: Bool,
    LATENCY: Int,
    SHARES: Int,
):
    """C = A @ B as `matmul_partial` and `combine` compute it, bit for bit, for SPLIT_K = SHARES, in one launch."""
    const = MatmulConstants(TILE_M, TILE_N, REST_N, TILE_K, GROUP_M, LATENCY, 1, PERSISTENT, SHARES)
    schedule_tiles(A, B, C, const)


def matmul_padded(
    PaddedA,
    PaddedB,
    C,
    TILE_M: Int,
    TILE_N: Int,
    REST_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    PERSISTENT: Bool,
    LATENCY: Int,
):
    """C = A @ B from row-major copies whose sizes are rounded up, PaddedA `[>= m, >= k]` and PaddedB `[>= k, >= n]`."""
    const = MatmulConstants(TILE_M, TILE_N, REST_N, TILE_K, GROUP_M, LATENCY, 1, PERSISTENT)
    schedule_tiles(PaddedA, PaddedB, C, const)


def pad_a(A, PaddedA, PAD_ROWS: Int, PAD_COLUMNS: Int):
    """Copy A into PaddedA, with zeros behind its rows and columns."""
    copy_tile(A, PaddedA, PAD_ROWS, PAD_COLUMNS)


def pad_b(B, PaddedB, PAD_ROWS: Int, PAD_COLUMNS: Int):
    """Copy B into PaddedB, with zeros behind its rows and columns."""
    copy_tile(B, PaddedB, PAD_ROWS, PAD_COLUMNS)


def copy_tile(array, Padded, ROWS, COLUMNS):
    """The current block's tile of a copy. The copy's sizes are multiples of its tile's."""
    tile = ct.load(array, (ct.bid(0), ct.bid(1)), (ROWS, COLUMNS), padding_mode=ct.PaddingMode.ZERO)
    ct.scatter(Padded, elements_of(ct.bid(0), ct.bid(1), ROWS, COLUMNS), tile, check_bounds=False)


def combine(Partial, C, SPLIT_K: Int, COMBINE_M: Int, COMBINE_N: Int, COMBINE_EVEN: Bool):
    """C = the sum of Partial `[SPLIT_K, m, n]` over its first axis, always in the same order. COMBINE_EVEN: tiles divide C."""
    rows, columns = elements_of(ct.bid(0), ct.bid(1), COMBINE_M, COMBINE_N)
    total = sum_of_shares(Partial, rows, columns, SPLIT_K, COMBINE_EVEN)
    ct.scatter(C, (rows, columns), total.astype(C.dtype), check_bounds=not COMBINE_EVEN)


def schedule_tiles(A, B, Out, const):
    """All of the current block's work tiles."""
    first = 1 if const.SPLIT_K > 1 else 0
    tiles_m = ct.cdiv(Out.shape[first], const.TILE_M)
    tiles_n = ct.cdiv(Out.shape[first + 1], const.TILE_N + const.REST_N)
    if const.PERSISTENT:
        for index in range(ct.bid(0), tiles_m * tiles_n * const.SPLIT_K, ct.num_blocks(0)):
            multiply(A, B, Out, place_of(index, tiles_m, tiles_n, const), const)
    else:
        multiply(A, B, Out, place_of(ct.bid(0), tiles_m, tiles_n, const), const)


def multiply(A, B, Out, work, const):
    """One work tile, start to finish."""
    accumulators = main_loop(A, B, work, const)
    for part in ct.static_iter(range(2 if const.REST_N else 1)):
        epilogue(Out, work, part, accumulators[part], const)


def main_loop(A, B, work, const):
    """One work tile's product over its share of k, in float32: a tuple of its parts."""
    steps = ct.cdiv(A.shape[1], const.TILE_K)
    begin, end = 0, steps
    if const.SPLIT_K > 1:
        begin, end = steps * work.share // const.SPLIT_K, steps * (work.share + 1) // const.SPLIT_K
    if const.SHARES > 1:
        return (accumulate_shares(A, B, work, steps, const),)
    if const.REST_N == 0:
        return (accumulate(A, B, work, begin, end, const),)
    return accumulate_parts(A, B, work, begin, end, const)


def accumulate(A, B, work, begin, end, const):
    """The product over the steps from `begin` to `end`, `[TILE_M, TILE_N]` in float32."""
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows, columns = row_view(A, const), part_view(B, const.TILE_K, 0, const)
    acc = ct.zeros((const.TILE_M, const.TILE_N), ct.float32)
    for step in range(begin, end):
        a, b = rows.load((work.row, step), latency=latency), columns.load((step, work.column), latency=latency)
        acc = ct.mma(a, b, acc)
    return acc


def accumulate_shares(A, B, work, steps, const):
    """The product over all steps, `[TILE_M, TILE_N]` in float32: the sum of its shares, added up in their order."""
    total = ct.zeros((const.TILE_M, const.TILE_N), ct.float32)
    for share in range(const.SHARES):
        begin, end = steps * share // const.SHARES, steps * (share + 1) // const.SHARES
        total = total + accumulate(A, B, work, begin, end, const)
    return total


def accumulate_parts(A, B, work, begin, end, const):
    """The accumulator in two parts, `[TILE_M, TILE_N]` and `[TILE_M, REST_N]`."""
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows = row_view(A, const)
    columns, more = part_view(B, const.TILE_K, 0, const), part_view(B, const.TILE_K, 1, const)
    first, second = column_of(work, 0, const), column_of(work, 1, const)
    # Beyond the last column the second part is not stored, and yet must be something that can be loaded.
    second = min(second, ct.cdiv(B.shape[1], const.REST_N) - 1)
    acc = ct.zeros((const.TILE_M, const.TILE_N), ct.float32)
    rest = ct.zeros((const.TILE_M, const.REST_N), ct.float32)
    for step in range(begin, end):
        a = rows.load((work.row, step), latency=latency)
        b = columns.load((step, first), latency=latency)
        acc = ct.mma(a, b, acc)
        b = more.load((step, second), latency=latency)
        rest = ct.mma(a, b, rest)
    return acc, rest


def epilogue(Out, work, PART, acc, const):
    """Store one part of a work tile's product, rounded to the type of the output."""
    tile, column = acc.astype(Out.dtype), column_of(work, PART, const)
    if const.SPLIT_K == 1 and PART == 0:
        part_view(Out, const.TILE_M, PART, const).store((work.row, column), tile)
    elif const.SPLIT_K == 1:
        if column * const.REST_N < Out.shape[1]:
            part_view(Out, const.TILE_M, PART, const).store((work.row, column), tile)
    else:  # of shares there is one part
        ct.store(Out, (work.share, work.row, column), tile.reshape((1, const.TILE_M, const.TILE_N)))
