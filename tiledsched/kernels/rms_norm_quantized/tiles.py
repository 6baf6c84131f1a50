"""The tile code of root-mean-square normalisation to 8-bit floats, with its schedule left open.

The arithmetic is that of `rms_norm` in float32, before its result is rounded; `quantized_rows` says how rows are rounded.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.quantized_rows import store_quantized
from tiledsched.kernels.rms_norm.tiles import scale_of, summed
from tiledsched.kernels.rows import Bool, Int, RowConstants, column_tiles, load_vector, over_tiles


def rms_norm_quantized(
    X,
    R,
    W,
    Given,
    Out,
    Scale,
    Sum,
    eps,
    columns: Int,
    residual: Bool,
    static: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    HOLD: Bool,
    PERSISTENT: Bool,
    LOADS: Int,
):
    """Out = normalised X, or X + R, over Scale `[rows]`; Out `[rows, columns]` is of 8-bit floats, and Sum = X + R."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, HOLD, PERSISTENT, LOADS)
    arguments = (X, R if residual else None, W, Given if static else None, Out, Scale, Sum, eps, const)
    over_tiles(quantize_tile, ct.cdiv(X.shape[0], TILE_ROWS), PERSISTENT, *arguments)


def quantize_tile(row, X, R, W, Given, Out, Scale, Sum, eps, const):
    """One tile of rows; `R` is None without a residual, and `Given` where each row has a scale of its own."""
    squares = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
    if const.HOLD or column_tiles(const) == 1:
        held = tuple(summed(X, R, Sum, row, j, const) for j in ct.static_iter(range(column_tiles(const))))
        for j in ct.static_iter(range(column_tiles(const))):
            squares = squares + held[j] * held[j]
        arguments = (held, None, None, W, scale_of(squares, eps, const))
        store_quantized(Out, Scale, Given, row, normalised, arguments, const)
    else:
        for j in range(column_tiles(const)):
            x = summed(X, R, Sum, row, j, const)
            squares = squares + x * x
        arguments = (None, X, R, W, scale_of(squares, eps, const))
        store_quantized(Out, Scale, Given, row, normalised, arguments, const)


def normalised(j, row, const, held, X, R, W, scale):
    """The `j`-th tile of normalised rows, of which the sums with the residual are held, or read again."""
    x = held[j] if held is not None else summed(X, R, None, row, j, const)
    return x * scale * load_vector(W, j, const)
