"""The tile code of the gradient of softmax over rows, with its schedule left open.

dX = Out * (dOut - sum(dOut * Out)), row by row, in float32 throughout and rounded once.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.rows import Bool, Int, RowConstants, column_tiles, load_rows, load_tile, over_tiles, store_rows


def softmax_backward(
    dOut, Out, dX, columns: Int, TILE_ROWS: Int, TILE_COLUMNS: Int, HOLD: Bool, PERSISTENT: Bool, LOADS: Int
):
    """dX of each row, from dOut and Out = softmax of X, all `[rows, columns]`."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, HOLD, PERSISTENT, LOADS)
    over_tiles(differentiate_rows, ct.cdiv(Out.shape[0], TILE_ROWS), PERSISTENT, dOut, Out, dX, const)


def differentiate_rows(row, dOut, Out, dX, const):
    """One tile of rows."""
    tiles = column_tiles(const)
    if tiles == 1 or const.HOLD:
        gradients = tuple(load_tile(dOut, row, j, const) for j in ct.static_iter(range(tiles)))
        shares = tuple(load_tile(Out, row, j, const) for j in ct.static_iter(range(tiles)))
        products = gradients[0].astype(ct.float32) * shares[0].astype(ct.float32)
        for j in ct.static_iter(range(1, tiles)):
            products = products + gradients[j].astype(ct.float32) * shares[j].astype(ct.float32)
        mean = ct.sum(products, axis=1, keepdims=True)
        for j in ct.static_iter(range(tiles)):
            store_rows(dX, row, j, shares[j].astype(ct.float32) * (gradients[j].astype(ct.float32) - mean), const)
    else:
        products = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
        for j in range(tiles):
            products = products + load_rows(dOut, row, j, const) * load_rows(Out, row, j, const)
        mean = ct.sum(products, axis=1, keepdims=True)
        for j in range(tiles):
            gradient, share = load_rows(dOut, row, j, const), load_rows(Out, row, j, const)
            store_rows(dX, row, j, share * (gradient - mean), const)
