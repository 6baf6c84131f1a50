"""How kernels that work on whole rows read, hold and write them: tile code that several kernels share.

A block takes TILE_ROWS rows at a time. A row is walked in tiles of TILE_COLUMNS: one tile where that is enough; else several,
which are either held in registers between the two passes (HOLD) or read again, from the L2 cache as a rule. What is memory-bound
wants many bytes under way at once: through the TMA unit, by several blocks on an SM, or by many rows in a tile.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.tile as ct

Int = ct.Constant[int]
Bool = ct.Constant[bool]
LOG2_E = 1.0 / math.log(2.0)
PLAIN, TMA, GATHER = range(3)
"""How rows move, by the index into `row_schedules.LOADS`."""
LARGEST = 448.0
"""The largest float8_e4m3fn."""
LEAST_HIGHEST = 1e-12
"""The least that a row's largest magnitude counts as: it keeps rows of zeros from being divided by zero."""


@dataclass(frozen=True)
class RowConstants:
    """The compile-time constants of a kernel over rows."""

    COLUMNS: int
    """Columns of a row."""
    TILE_ROWS: int
    """Rows of a tile."""
    TILE_COLUMNS: int
    """Columns of a tile."""
    HOLD: bool
    """Whether the tiles of a row stay in registers between two passes; else they are loaded twice."""
    PERSISTENT: bool
    """Whether a block takes rows of every `num_blocks`; else one tile of rows each."""
    LOADS: int
    """Index into `row_schedules.LOADS`."""


def over_tiles(function, count, persistent, *arguments):
    """Call a function for each of `count` tiles of the current block: with the tile's index, and with further arguments."""
    if persistent:
        for tile in range(ct.bid(0), count, ct.num_blocks(0)):
            function(tile, *arguments)
    else:
        function(ct.bid(0), *arguments)


def column_tiles(const):
    """Tiles that a row takes."""
    return (const.COLUMNS + const.TILE_COLUMNS - 1) // const.TILE_COLUMNS


def load_rows(array, row, column, const):
    """The tile of `array` at (row, column), counted in tiles, in float32, with zeros beyond the edge."""
    return load_tile(array, row, column, const).astype(ct.float32)


def load_tile(array, row, column, const):
    """The tile of `array` at (row, column), counted in tiles, in the type of `array`, with zeros beyond the edge."""
    if const.LOADS == GATHER:
        return ct.gather(array, elements_of(row, column, const))
    return ct.load(
        array,
        (row, column),
        (const.TILE_ROWS, const.TILE_COLUMNS),
        padding_mode=ct.PaddingMode.ZERO,
        allow_tma=None if const.LOADS == TMA else False,
    )


def is_rotated(array, const):
    """Whether :func:`load_rotated` is faster: for rows that begin anywhere, of which a plain load takes an element at a time."""
    begins_anywhere = const.COLUMNS % elements_of_16_bytes(array) != 0
    return const.LOADS == PLAIN and const.TILE_ROWS == 1 and begins_anywhere and rotated_tiles(array, const) > 0


def elements_of_16_bytes(array):
    """Elements of an array of floats that 16 bytes hold, which is the most that a thread loads at once."""
    return 4 if array.dtype == ct.float32 else 8


def rotated_tiles(array, const):
    """Tiles of a rotated row of which the elements are neighbours in memory, wherever the row begins."""
    return (const.COLUMNS - elements_of_16_bytes(array) + 1) // const.TILE_COLUMNS


def load_rotated(array, row, j, whole, const):
    """The `j`-th tile of a row that begins with its first element at a multiple of 16 bytes, `[1, TILE_COLUMNS]`, in the type of
    `array`: the elements before that one come last. What is beyond the row's end is undetermined.

    `whole` tells whether the tile is one of :func:`rotated_tiles`, which are loaded 16 bytes at a time.
    """
    unit = elements_of_16_bytes(array)
    begin = row * array.strides[0]
    ahead = (unit - begin % unit) % unit
    if whole:
        storage = ct.Array.from_foreign(array.foreign_pointer, (begin + const.COLUMNS,), (1,))
        first = ct.assume_divisible_by(begin + ahead, unit)
        size = rotated_tiles(array, const) * const.TILE_COLUMNS  # a constant, so that no element is masked
        aligned = storage.slice(0, first, first + size)
        return ct.load(aligned, (j,), (const.TILE_COLUMNS,), allow_tma=False)[None, :]
    column = column_indices(j, const) + ahead
    return ct.gather(array, (row, ct.where(column < const.COLUMNS, column, column - const.COLUMNS)))


def store_rows(array, row, column, tile, const):
    """Store a float32 tile at (row, column), counted in tiles, rounded to the type of `array`."""
    if const.LOADS == GATHER:
        ct.scatter(array, elements_of(row, column, const), tile.astype(array.dtype))
    else:
        ct.store(array, (row, column), tile.astype(array.dtype), allow_tma=None if const.LOADS == TMA else False)


def store_quantized(Out, Scale, Given, row, tiles, const):
    """Store the tiles of a tile of rows, float32 and 0 beyond the edge, over a scale and rounded to 8-bit floats; and the scale.

    Each row's own scale brings its largest element to the largest number of `Out`; a scale that is `Given`, `[1]`, may be too
    small for some elements, for which the largest number is stored.
    """
    if Given is None:
        highest = ct.abs(tiles[0])
        for j in ct.static_iter(range(1, column_tiles(const))):
            highest = ct.maximum(highest, ct.abs(tiles[j]))
        scale = ct.maximum(ct.max(highest, axis=1, keepdims=True), LEAST_HIGHEST) / LARGEST
    else:
        scale = ct.zeros((const.TILE_ROWS, 1), ct.float32) + ct.load(Given, (0,), (1,)).item()
    ct.store(Scale, (row,), scale.reshape((const.TILE_ROWS,)), allow_tma=False)
    inverse = 1.0 / scale
    for j in ct.static_iter(range(column_tiles(const))):
        x = tiles[j] * inverse
        if Given is not None:
            x = ct.where(x > LARGEST, LARGEST, ct.where(x < -LARGEST, -LARGEST, x))  # NaN stays NaN
        store_rows(Out, row, j, x, const)


def load_vector(array, column, const):
    """A tile of an array `[columns]` that all rows share, `[1, TILE_COLUMNS]` in float32, with zeros beyond the edge."""
    tile = ct.load(array, (column,), (const.TILE_COLUMNS,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return tile.astype(ct.float32).reshape((1, const.TILE_COLUMNS))


def elements_of(row, column, const):
    """Indices of a tile's elements, `[TILE_ROWS, 1]` and `[1, TILE_COLUMNS]`."""
    rows = row * const.TILE_ROWS + ct.arange(const.TILE_ROWS, dtype=ct.int32)[:, None]
    return rows, column_indices(column, const)


def column_indices(column, const):
    """The columns of a tile, `[1, TILE_COLUMNS]`."""
    return column * const.TILE_COLUMNS + ct.arange(const.TILE_COLUMNS, dtype=ct.int32)[None, :]
