"""The tile code of layer normalisation, with its schedule left open.

Out = (X - mean) / sqrt(variance + eps) * W + B, row by row, in float32 throughout; the variance is that of the row itself
(divided by its length). After Ba, Kiros and Hinton, Layer Normalization (arXiv:1607.06450). The variance is taken of
differences: from the mean where the row is in registers, else from the mean of the row's first tile.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.rows import (
    Bool,
    Int,
    RowConstants,
    column_indices,
    column_tiles,
    load_rows,
    load_vector,
    over_tiles,
    store_rows,
)


def layer_norm(
    X,
    W,
    B,
    Out,
    eps,
    columns: Int,
    weighted: Bool,
    biased: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    HOLD: Bool,
    PERSISTENT: Bool,
    LOADS: Int,
):
    """Out = normalised X, for X and Out `[rows, columns]`, and W and B `[columns]`, which are read where the problem has them."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, HOLD, PERSISTENT, LOADS)
    one = column_tiles(const) == 1
    weight = load_vector(W, 0, const) if weighted and one else None
    bias = load_vector(B, 0, const) if biased and one else None
    W = W if weighted and not one else None
    B = B if biased and not one else None
    row_tiles = ct.cdiv(X.shape[0], TILE_ROWS)
    over_tiles(normalise_rows, row_tiles, PERSISTENT, X, W, B, Out, eps, weight, bias, const)


def normalise_rows(row, X, W, B, Out, eps, weight, bias, const):
    """One tile of rows. `weight` and `bias` are tiles where a row is one tile; else W and B are arrays. Each may be None."""
    if column_tiles(const) == 1:
        x = load_rows(X, row, 0, const)
        far = differences(x, mean_of(x, const), 0, const)
        store_rows(Out, row, 0, affine(far * scale_of(far * far, eps, const), weight, bias), const)
    elif const.HOLD:
        tiles = tuple(load_rows(X, row, j, const) for j in ct.static_iter(range(column_tiles(const))))
        total = tiles[0]
        for j in ct.static_iter(range(1, column_tiles(const))):
            total = total + tiles[j]
        mean = mean_of(total, const)
        squares = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
        for j in ct.static_iter(range(column_tiles(const))):
            far = differences(tiles[j], mean, j, const)
            squares = squares + far * far
        scale = scale_of(squares, eps, const)
        for j in ct.static_iter(range(column_tiles(const))):
            store_affine(Out, row, j, (tiles[j] - mean) * scale, W, B, const)
    else:
        near = ct.sum(load_rows(X, row, 0, const), axis=1, keepdims=True) / const.TILE_COLUMNS
        total = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
        squares = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
        for j in range(column_tiles(const)):
            far = differences(load_rows(X, row, j, const), near, j, const)
            total = total + far
            squares = squares + far * far
        off = mean_of(total, const)  # of the mean from `near`
        mean = near + off
        scale = ct.rsqrt(ct.maximum(mean_of(squares, const) - off * off, 0.0) + eps)
        for j in range(column_tiles(const)):
            store_affine(Out, row, j, (load_rows(X, row, j, const) - mean) * scale, W, B, const)


def mean_of(sums, const):
    """The mean of each row, `[TILE_ROWS, 1]`, from its elements, which may be summed up in part."""
    return ct.sum(sums, axis=1, keepdims=True) / const.COLUMNS


def scale_of(squares, eps, const):
    """What each row is multiplied with, `[TILE_ROWS, 1]`, from the squares of its differences from the mean."""
    return ct.rsqrt(mean_of(squares, const) + eps)


def differences(x, mean, j, const):
    """The differences of a tile's elements from a mean; 0 beyond the last column, where there are no elements."""
    if const.COLUMNS % const.TILE_COLUMNS != 0:
        return ct.where(column_indices(j, const) < const.COLUMNS, x - mean, 0.0)
    return x - mean


def store_affine(Out, row, j, x, W, B, const):
    """Store the `j`-th tile of the normalised rows, multiplied by W and increased by B where these are not None."""
    weight = load_vector(W, j, const) if W is not None else None
    bias = load_vector(B, j, const) if B is not None else None
    store_rows(Out, row, j, affine(x, weight, bias), const)


def affine(x, weight, bias):
    """`x * weight + bias`, of which each may be None."""
    if weight is not None:
        x = x * weight
    if bias is not None:
        x = x + bias
    return x
