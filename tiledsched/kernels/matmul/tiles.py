"""The tile code of the matrix product: C = A @ B with its schedule left open.

A work tile is one `[TILE_M, TILE_N]` tile of C, or one share of its walk over k where SPLIT_K blocks divide that walk. The
main loop multiplies and accumulates in float32; the epilogue rounds and stores. From the outside in: `schedule_tiles` is the
tile scheduler, `place_of` the order of work tiles, `main_loop` one work tile's products, `epilogue` its store.

Split-K makes float32 partial products in a workspace, which a second launch, `combine`, sums. One launch whose last block
to arrive combines, by an atomic counter, would be shorter; the counter's release would order the TMA loads of the main
loop too, and the compiler (13.4 on sm_90) then overwrites tiles in shared memory while they are read.

Where rows do not start at multiples of 16 bytes, the TMA unit cannot load them. `pad` copies such an operand into a workspace
whose rows do, and the product reads that.

These functions run on the GPU through cuTile and, unmodified, on the CPU through `tiledsched.interpreter`.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

Int = ct.Constant[int]
Bool = ct.Constant[bool]


@dataclass(frozen=True)
class Constants:
    """What is known when the kernel is compiled."""

    TILE_M: int
    """Rows of a work tile."""
    TILE_N: int
    """Columns of a work tile."""
    TILE_K: int
    """Columns of A, and rows of B, that one step of the main loop takes."""
    GROUP_M: int
    """Rows of work tiles that are taken together, column after column, so that their operands stay in the L2 cache."""
    PERSISTENT: bool
    """Whether a block takes one work tile of every `num_blocks`; else one each."""
    STORE_LATE: bool
    """Whether a persistent block stores a work tile after the main loop of the next one has begun."""
    TMA_STORE: bool
    """Whether the epilogue may use the TMA unit."""
    LATENCY: int
    """Latency hint of the main loop's loads; 0 for none."""
    SPLIT_K: int
    """Blocks that share the walk over k of one tile of C."""
    A_COLUMN: bool
    """Whether A is column-major."""
    B_COLUMN: bool
    """Whether B is column-major."""


@dataclass(frozen=True)
class Work:
    """A work tile: which tile of C, and which share of k."""

    row: Any
    """Index of the tile along the rows of C."""
    column: Any
    """And along its columns."""
    share: Any
    """Which of the SPLIT_K shares."""


def matmul(A, B, C,
           TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP_M: Int, PERSISTENT: Bool, STORE_LATE: Bool,
           TMA_STORE: Bool, LATENCY: Int, A_COLUMN: Bool, B_COLUMN: Bool):  # fmt: skip
    """C = A @ B for A `[m, k]`, B `[k, n]` and C `[m, n]`, of one type; C is row-major."""
    const = Constants(TILE_M, TILE_N, TILE_K, GROUP_M, PERSISTENT, STORE_LATE, TMA_STORE, LATENCY, 1,
                      A_COLUMN, B_COLUMN)  # fmt: skip
    schedule_tiles(A, B, C, const)


def matmul_partial(A, B, Partial,
                   TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP_M: Int, PERSISTENT: Bool, STORE_LATE: Bool,
                   TMA_STORE: Bool, LATENCY: Int, SPLIT_K: Int,
                   A_COLUMN: Bool, B_COLUMN: Bool):  # fmt: skip
    """Partial[s] = the s-th share of A @ B, for float32 Partial `[SPLIT_K, m, n]`."""
    const = Constants(TILE_M, TILE_N, TILE_K, GROUP_M, PERSISTENT, STORE_LATE, TMA_STORE, LATENCY, SPLIT_K,
                      A_COLUMN, B_COLUMN)  # fmt: skip
    schedule_tiles(A, B, Partial, const)


def matmul_padded(PaddedA, PaddedB, C,
                  TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP_M: Int, PERSISTENT: Bool, STORE_LATE: Bool,
                  TMA_STORE: Bool, LATENCY: Int):  # fmt: skip
    """As `matmul`, of copies whose sizes are rounded up, PaddedA `[>= m, >= k]` and PaddedB `[>= k, >= n]`, both row-major."""
    const = Constants(TILE_M, TILE_N, TILE_K, GROUP_M, PERSISTENT, STORE_LATE, TMA_STORE, LATENCY, 1, False, False)
    schedule_tiles(PaddedA, PaddedB, C, const)


def pad_a(A, PaddedA, PAD_ROWS: Int, PAD_COLUMNS: Int, A_COLUMN: Bool):
    """Copy A into PaddedA, with zeros behind its columns."""
    copy_tile(A, PaddedA, PAD_ROWS, PAD_COLUMNS, A_COLUMN)


def pad_b(B, PaddedB, PAD_ROWS: Int, PAD_COLUMNS: Int, B_COLUMN: Bool):
    """Copy B into PaddedB, with zeros behind its columns."""
    copy_tile(B, PaddedB, PAD_ROWS, PAD_COLUMNS, B_COLUMN)


def copy_tile(array, Padded, ROWS, COLUMNS, COLUMN_MAJOR):
    """The current block's tile of a copy. The copy's sizes are multiples of its tile's."""
    tile = load_tile(array, ct.bid(0), ct.bid(1), ROWS, COLUMNS, COLUMN_MAJOR, None)
    ct.scatter(Padded, elements_of(ct.bid(0), ct.bid(1), ROWS, COLUMNS), tile, check_bounds=False)


def combine(Partial, C, SPLIT_K: Int, COMBINE_M: Int, COMBINE_N: Int, COMBINE_EVEN: Bool):
    """C = the sum of Partial `[SPLIT_K, m, n]` over its first axis, always in the same order. COMBINE_EVEN: tiles divide C."""
    rows, columns = elements_of(ct.bid(0), ct.bid(1), COMBINE_M, COMBINE_N)
    total = ct.zeros((COMBINE_M, COMBINE_N), ct.float32)
    for share in ct.static_iter(range(SPLIT_K)):
        total = total + ct.gather(Partial, (share, rows, columns), check_bounds=not COMBINE_EVEN)
    ct.scatter(C, (rows, columns), total.astype(C.dtype), check_bounds=not COMBINE_EVEN)


def elements_of(row, column, ROWS, COLUMNS):
    """Indices of a tile's elements, `[ROWS, 1]` and `[1, COLUMNS]`: gathers and scatters without bounds move 16 bytes at a time,
    which loads and stores do only where the compiler knows what the sizes are multiples of.
    """
    rows = row * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]
    return rows, column * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32)[None, :]


def schedule_tiles(A, B, Out, const):
    """All of the current block's work tiles."""
    tiles_m, tiles_n = tiles_of(Out, const)
    total = tiles_m * tiles_n * const.SPLIT_K
    if const.STORE_LATE:
        work = Work(0, 0, 0)
        acc = ct.zeros((const.TILE_M, const.TILE_N), ct.float32)
        for index in range(ct.bid(0), total, ct.num_blocks(0)):
            # Not the first one's: there is none before it. The compiler gives a first turn that it can tell by the index code of
            # its own.
            if index >= ct.num_blocks(0):
                epilogue(Out, work, acc, const)
            work = place_of(index, tiles_m, tiles_n, const)
            acc = main_loop(A, B, work, const)
        epilogue(Out, work, acc, const)
    elif const.PERSISTENT:
        for index in range(ct.bid(0), total, ct.num_blocks(0)):
            work = place_of(index, tiles_m, tiles_n, const)
            epilogue(Out, work, main_loop(A, B, work, const), const)
    else:
        work = place_of(ct.bid(0), tiles_m, tiles_n, const)
        epilogue(Out, work, main_loop(A, B, work, const), const)


def tiles_of(Out, const):
    """Tiles along the rows and the columns of the output, or of each share of it."""
    first = 1 if const.SPLIT_K > 1 else 0
    return ct.cdiv(Out.shape[first], const.TILE_M), ct.cdiv(Out.shape[first + 1], const.TILE_N)


def place_of(index, tiles_m, tiles_n, const):
    """The `index`-th work tile: groups of GROUP_M rows of tiles, within a group column after column; shares slowest."""
    share = 0
    if const.SPLIT_K > 1:
        share = index // (tiles_m * tiles_n)
        index = index % (tiles_m * tiles_n)
    if const.GROUP_M == 1:
        return Work(index // tiles_n, index % tiles_n, share)
    first = index // (const.GROUP_M * tiles_n) * const.GROUP_M
    rows = min(const.GROUP_M, tiles_m - first)
    within = index % (const.GROUP_M * tiles_n)
    return Work(first + within % rows, within // rows, share)


def main_loop(A, B, work, const):
    """One work tile's product over its share of k, `[TILE_M, TILE_N]` in float32."""
    steps = ct.cdiv(A.shape[1], const.TILE_K)
    begin, end = 0, steps
    if const.SPLIT_K > 1:
        begin, end = steps * work.share // const.SPLIT_K, steps * (work.share + 1) // const.SPLIT_K
    latency = None if const.LATENCY == 0 else const.LATENCY
    acc = ct.zeros((const.TILE_M, const.TILE_N), ct.float32)
    for step in range(begin, end):
        a = load_tile(A, work.row, step, const.TILE_M, const.TILE_K, const.A_COLUMN, latency)
        b = load_tile(B, step, work.column, const.TILE_K, const.TILE_N, const.B_COLUMN, latency)
        acc = ct.mma(a, b, acc)
    return acc


def load_tile(array, row, column, ROWS, COLUMNS, COLUMN_MAJOR, latency):
    """The tile `[ROWS, COLUMNS]` of a matrix at `row` and `column`, counted in tiles, with zeros beyond the edge."""
    if COLUMN_MAJOR:  # along memory, and turned afterwards, which the tensor cores' operands are for nothing
        tile = ct.load(array, (column, row), (COLUMNS, ROWS), order=(1, 0), padding_mode=ct.PaddingMode.ZERO,
                       latency=latency)  # fmt: skip
        return ct.permute(tile, (1, 0))
    return ct.load(array, (row, column), (ROWS, COLUMNS), padding_mode=ct.PaddingMode.ZERO, latency=latency)


def epilogue(Out, work, acc, const):
    """Store a work tile's product, rounded to the type of the output. The compiler does so in parts where it uses TMA."""
    tile, allow_tma = acc.astype(Out.dtype), None if const.TMA_STORE else False
    if const.SPLIT_K > 1:
        ct.store(Out, (work.share, work.row, work.column), tile.reshape((1, const.TILE_M, const.TILE_N)),
                 allow_tma=allow_tma)  # fmt: skip
    else:
        ct.store(Out, (work.row, work.column), tile, allow_tma=allow_tma)
