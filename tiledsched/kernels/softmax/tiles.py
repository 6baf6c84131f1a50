"""The tile code of softmax over rows, with its schedule left open.

Where a row is read twice, its maximum and sum are found in one pass: Milakov and Gimelshein, Online normalizer calculation for
softmax (arXiv:1805.02867), here one running maximum and sum for each column of a tile, which are combined at the end of the row.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math

import cuda.tile as ct

from tiledsched.kernels.rows import (
    LOG2_E,
    Bool,
    Int,
    RowConstants,
    column_indices,
    column_tiles,
    load_rows,
    over_tiles,
    store_rows,
)

LOWEST = -3.4e38
"""A running maximum below every element and yet finite, so that padding does not make NaN: minus infinity less LOWEST has the
exponential 0, and LOWEST less a maximum is 0 or below. Differences come before the product with log2(e): none can be contracted.
"""


def softmax(X, Out, columns: Int, TILE_ROWS: Int, TILE_COLUMNS: Int, HOLD: Bool, PERSISTENT: Bool, LOADS: Int):
    """Out = softmax of each row of X, both `[rows, columns]`."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, HOLD, PERSISTENT, LOADS)
    over_tiles(soften_rows, ct.cdiv(X.shape[0], TILE_ROWS), PERSISTENT, X, Out, const)


def soften_rows(row, X, Out, const):
    """One tile of rows."""
    if column_tiles(const) == 1:
        x = scores(X, row, 0, const)
        exponentials = power(x, ct.max(x, axis=1, keepdims=True))
        store_rows(Out, row, 0, exponentials * inverse(ct.sum(exponentials, axis=1, keepdims=True)), const)
    elif const.HOLD:
        rows_in_registers(X, Out, row, const)
    else:
        reread_rows(X, Out, row, const)


def rows_in_registers(X, Out, row, const):
    """Softmax of rows whose tiles stay in registers."""
    tiles = tuple(scores(X, row, j, const) for j in ct.static_iter(range(column_tiles(const))))
    highest = tiles[0]
    for j in ct.static_iter(range(1, column_tiles(const))):
        highest = ct.maximum(highest, tiles[j])
    row_max = ct.max(highest, axis=1, keepdims=True)
    exponentials = tuple(power(tile, row_max) for tile in ct.static_iter(tiles))
    total = exponentials[0]
    for j in ct.static_iter(range(1, column_tiles(const))):
        total = total + exponentials[j]
    scale = inverse(ct.sum(total, axis=1, keepdims=True))
    for j in ct.static_iter(range(column_tiles(const))):
        store_rows(Out, row, j, exponentials[j] * scale, const)


def reread_rows(X, Out, row, const):
    """Softmax of rows that are read twice."""
    highest = ct.full((const.TILE_ROWS, const.TILE_COLUMNS), LOWEST, ct.float32)
    total = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
    for j in range(column_tiles(const)):
        x = scores(X, row, j, const)
        higher = ct.maximum(highest, x)
        total = total * power(highest, higher) + power(x, higher)
        highest = higher
    row_max = ct.max(highest, axis=1, keepdims=True)
    scale = inverse(ct.sum(total * power(highest, row_max), axis=1, keepdims=True))
    for j in range(column_tiles(const)):
        store_rows(Out, row, j, power(scores(X, row, j, const), row_max) * scale, const)


def scores(X, row, j, const):
    """A tile of X in float32, with minus infinity beyond its last column. Not as padding: of that the TMA unit has zeros only."""
    x = load_rows(X, row, j, const)
    if const.COLUMNS % const.TILE_COLUMNS != 0:
        x = ct.where(column_indices(j, const) < const.COLUMNS, x, -math.inf)
    return x


def power(x, maximum):
    """e to the elements above a maximum."""
    return ct.exp2((x - maximum) * LOG2_E, flush_to_zero=True)


def inverse(total):
    """One over each of the sums."""
    return ct.truediv(1.0, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
