"""The tile code of root-mean-square normalisation, with its schedule left open.

Out = X / sqrt(mean(X * X) + eps) * W, row by row, in float32 throughout; with a residual, X + R takes the place of X, and is
an output too. Rows are rounded to the type of X, or to 8-bit floats with scales. After Zhang and Sennrich, Root Mean Square Layer
Normalization (arXiv:1910.07467).
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.rows import (
    Bool,
    Int,
    RowConstants,
    column_tiles,
    load_rows,
    load_vector,
    over_tiles,
    store_quantized,
    store_rows,
)


def rms_norm(X, W, Out, eps, columns: Int, TILE_ROWS: Int, TILE_COLUMNS: Int, HOLD: Bool, PERSISTENT: Bool, LOADS: Int):
    """Out = normalised X, for X and Out `[rows, columns]` and W `[columns]`."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, HOLD, PERSISTENT, LOADS)
    normalise(X, None, W, None, Out, eps, const)


def rms_norm_residual(
    X, R, W, Sum, Out, eps, columns: Int, TILE_ROWS: Int, TILE_COLUMNS: Int, HOLD: Bool, PERSISTENT: Bool, LOADS: Int
):
    """Sum = X + R and Out = normalised X + R, before it is rounded to Sum's type."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, HOLD, PERSISTENT, LOADS)
    normalise(X, R, W, Sum, Out, eps, const)


def normalise(X, R, W, Sum, Out, eps, const):
    """All rows of the current block. `R` and `Sum` are None without a residual."""
    weight = load_vector(W, 0, const) if column_tiles(const) == 1 else None
    arguments = (X, R, W, Sum, Out, eps, weight, const)
    over_tiles(normalise_rows, ct.cdiv(X.shape[0], const.TILE_ROWS), const.PERSISTENT, *arguments)


def normalise_rows(row, X, R, W, Sum, Out, eps, weight, const):
    """One tile of rows; `weight` is W where a row is one tile."""
    if column_tiles(const) == 1:
        x = summed(X, R, Sum, row, 0, const)
        store_rows(Out, row, 0, x * scale_of(x * x, eps, const) * weight, const)
    elif const.HOLD:
        tiles = tuple(summed(X, R, Sum, row, j, const) for j in ct.static_iter(range(column_tiles(const))))
        squares = tiles[0] * tiles[0]
        for j in ct.static_iter(range(1, column_tiles(const))):
            squares = squares + tiles[j] * tiles[j]
        scale = scale_of(squares, eps, const)
        for j in ct.static_iter(range(column_tiles(const))):
            store_rows(Out, row, j, tiles[j] * scale * load_vector(W, j, const), const)
    else:
        squares = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
        for j in range(column_tiles(const)):
            x = summed(X, R, Sum, row, j, const)
            squares = squares + x * x
        scale = scale_of(squares, eps, const)
        for j in range(column_tiles(const)):
            x = summed(X, R, None, row, j, const)
            store_rows(Out, row, j, x * scale * load_vector(W, j, const), const)


def rms_norm_quantized(
    X,
    R,
    W,
    Given,
    Out,
    Sum,
    Scale,
    eps,
    columns: Int,
    residual: Bool,
    static: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    PERSISTENT: Bool,
    LOADS: Int,
):
    """Out = normalised X, or X + R, over Scale `[rows]`, in 8-bit floats; and Sum = X + R."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, True, PERSISTENT, LOADS)
    arguments = (X, R if residual else None, W, Given if static else None, Out, Sum, Scale, eps, const)
    over_tiles(quantize_rows, ct.cdiv(X.shape[0], TILE_ROWS), PERSISTENT, *arguments)


def quantize_rows(row, X, R, W, Given, Out, Sum, Scale, eps, const):
    """One tile of rows; `R` is None without a residual, and `Given` where each row has a scale of its own."""
    tiles = tuple(summed(X, R, Sum, row, j, const) for j in ct.static_iter(range(column_tiles(const))))
    squares = tiles[0] * tiles[0]
    for j in ct.static_iter(range(1, column_tiles(const))):
        squares = squares + tiles[j] * tiles[j]
    scale = scale_of(squares, eps, const)
    tiles = tuple(tiles[j] * scale * load_vector(W, j, const) for j in ct.static_iter(range(column_tiles(const))))
    store_quantized(Out, Scale, Given, row, tiles, const)


def scale_of(squares, eps, const):
    """What each row is multiplied with, `[TILE_ROWS, 1]`, from its squares, which may be summed up in part."""
    return ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / const.COLUMNS + eps)


def summed(X, R, Sum, row, j, const):
    """A tile of what is normalised, in float32; stored where there is a Sum."""
    x = load_rows(X, row, j, const)
    if R is not None:
        x = x + load_rows(R, row, j, const)
        if Sum is not None:
            store_rows(Sum, row, j, x, const)
    return x
