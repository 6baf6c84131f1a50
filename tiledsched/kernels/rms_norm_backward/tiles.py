"""The tile code of the gradients of root-mean-square normalisation, with its schedule left open.

With r = 1 / sqrt(mean(X * X) + eps) and G = dOut * W, row by row:

    dX = r * (G - X * r * r * mean(G * X)),   dW = the sum of dOut * X * r over all rows,

in float32 throughout, each rounded once. A block takes rows of every `num_blocks` and sums up its part of dW on the way; a
second launch adds the parts. The order of all sums is fixed by the schedule, so that the same call gives the same bits.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.rows import Bool, Int, RowConstants, column_tiles, load_rows, load_tile, load_vector, store_rows


def rms_norm_backward(
    dOut,
    X,
    W,
    dSum,
    dX,
    Parts,
    eps,
    columns: Int,
    residual: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    HOLD: Bool,
    AHEAD: Bool,
    LOADS: Int,
):
    """dX `[rows, columns]`, and each block's part of dW in Parts `[blocks, columns]`.

    dOut, X and, with a residual, dSum are `[rows, columns]`; W is `[columns]`.
    """
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, HOLD, True, LOADS)
    dSum = dSum if residual else None
    if column_tiles(const) > 1 and not HOLD:
        sums_in_memory(dOut, X, W, dSum, dX, Parts, eps, const)
    else:
        sums_in_registers(dOut, X, W, dSum, dX, Parts, eps, AHEAD, const)


def sums_in_registers(dOut, X, W, dSum, dX, Parts, eps, ahead, const):
    """All rows of the current block, each of which is read once. With `ahead`, the next row is read before one is worked on."""
    tiles = column_tiles(const)
    weight = load_vector(W, 0, const) if tiles == 1 else None
    sums = tuple(ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32) for j in ct.static_iter(range(tiles)))
    row_tiles = ct.cdiv(X.shape[0], const.TILE_ROWS)
    if ahead:
        given = read_row(dOut, X, ct.bid(0), const)
        for row in range(ct.bid(0), row_tiles, ct.num_blocks(0)):
            following = read_row(dOut, X, min(row + ct.num_blocks(0), row_tiles - 1), const)
            sums = one_row(given, W, weight, dSum, dX, sums, eps, row, X.shape[0], const)
            given = following
    else:
        for row in range(ct.bid(0), row_tiles, ct.num_blocks(0)):
            given = read_row(dOut, X, row, const)
            sums = one_row(given, W, weight, dSum, dX, sums, eps, row, X.shape[0], const)
    for j in ct.static_iter(range(tiles)):
        store_part(Parts, j, sums[j], const)


def read_row(dOut, X, row, const):
    """(dOut, X) of a tile of rows, each as a tuple of its column tiles in the type of the array."""
    gradients = tuple(load_tile(dOut, row, j, const) for j in ct.static_iter(range(column_tiles(const))))
    return gradients, tuple(load_tile(X, row, j, const) for j in ct.static_iter(range(column_tiles(const))))


def one_row(given, W, weight, dSum, dX, sums, eps, row, rows, const):
    """Store dX of a tile of rows, and return what dW adds up to with it. `weight` is W where a row is one tile."""
    tiles = column_tiles(const)
    gradients = tuple(each.astype(ct.float32) for each in ct.static_iter(given[0]))
    x = tuple(each.astype(ct.float32) for each in ct.static_iter(given[1]))
    weighed = tuple(gradients[j] * weight_of(W, weight, j, const) for j in ct.static_iter(range(tiles)))
    squares, dots = x[0] * x[0], weighed[0] * x[0]
    for j in ct.static_iter(range(1, tiles)):
        squares = squares + x[j] * x[j]
        dots = dots + weighed[j] * x[j]
    scale, pull = factors_of(squares, dots, eps, row, rows, const)
    for j in ct.static_iter(range(tiles)):
        store_gradient(dX, dSum, row, j, scale * (weighed[j] - x[j] * pull), const)
    return tuple(sums[j] + gradients[j] * (x[j] * scale) for j in ct.static_iter(range(tiles)))


def sums_in_memory(dOut, X, W, dSum, dX, Parts, eps, const):
    """All rows of the current block, each of which is read twice; the block's part of dW is added to where it is stored."""
    for j in range(column_tiles(const)):
        store_part(Parts, j, ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32), const)
    for row in range(ct.bid(0), ct.cdiv(X.shape[0], const.TILE_ROWS), ct.num_blocks(0)):
        squares = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
        dots = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
        for j in range(column_tiles(const)):
            x = load_rows(X, row, j, const)
            squares = squares + x * x
            dots = dots + load_rows(dOut, row, j, const) * load_vector(W, j, const) * x
        scale, pull = factors_of(squares, dots, eps, row, X.shape[0], const)
        for j in range(column_tiles(const)):
            x, gradient = load_rows(X, row, j, const), load_rows(dOut, row, j, const)
            store_gradient(dX, dSum, row, j, scale * (gradient * load_vector(W, j, const) - x * pull), const)
            store_part(Parts, j, gradient * (x * scale) + load_part(Parts, j, const), const)


def weight_of(W, weight, j, const):
    """The `j`-th tile of W: `weight`, where a row is one tile."""
    return load_vector(W, j, const) if weight is None else weight


def factors_of(squares, dots, eps, row, rows, const):
    """What gradients are scaled with, and how much of X is taken from them before, `[TILE_ROWS, 1]` each.

    `squares` and `dots` are X * X and dOut * W * X, which may be summed up in part. Rows beyond the last add nothing to dW, also
    where eps is 0.
    """
    scale = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / const.COLUMNS + eps)
    if const.TILE_ROWS > 1:
        places = row * const.TILE_ROWS + ct.arange(const.TILE_ROWS, dtype=ct.int32)[:, None]
        scale = ct.where(places < rows, scale, 0.0)
    return scale, ct.sum(dots, axis=1, keepdims=True) * (scale * scale / const.COLUMNS)


def store_gradient(dX, dSum, row, j, gradient, const):
    """Store a tile of dX; where X is a sum that is an output, its own gradient is added."""
    if dSum is not None:
        gradient = gradient + load_rows(dSum, row, j, const)
    store_rows(dX, row, j, gradient, const)


def load_part(Parts, j, const):
    """The `j`-th tile of the current block's part of dW, in the first row of a tile; zeros in the others."""
    part = ct.load(Parts, (ct.bid(0), j), (1, const.TILE_COLUMNS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    if const.TILE_ROWS > 1:
        first = ct.arange(const.TILE_ROWS, dtype=ct.int32)[:, None] == 0
        part = ct.where(first, part, 0.0)
    return part


def store_part(Parts, j, sums, const):
    """Store the `j`-th tile of the current block's part of dW, from the sums of each row of a tile."""
    ct.store(Parts, (ct.bid(0), j), ct.sum(sums, axis=0, keepdims=True), allow_tma=False)


def sum_parts(Parts, dW, SUM_ROWS: Int, SUM_COLUMNS: Int):
    """dW `[columns]`, the sum of the rows of Parts, always in the same order."""
    total = ct.zeros((SUM_ROWS, SUM_COLUMNS), ct.float32)
    for i in range(ct.cdiv(Parts.shape[0], SUM_ROWS)):
        total = total + ct.load(
            Parts, (i, ct.bid(0)), (SUM_ROWS, SUM_COLUMNS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False
        )
    ct.store(dW, (ct.bid(0),), ct.sum(total, axis=0).astype(dW.dtype), allow_tma=False)
