"""How rows are rounded to 8-bit floats with scales: tile code that kernels share. `quantization` says what it computes."""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.quantization import LARGEST, LEAST_HIGHEST
from tiledsched.kernels.rows import column_tiles, store_rows


def store_quantized(Out, Scale, Given, row, value, arguments, const):
    """Store a tile of rows as 8-bit floats, and its scales.

    `value(j, row, const, *arguments)` makes the `j`-th tile of the rows, in float32 and with zeros beyond the edge; it is called
    twice where tiles are not held. `Given` is the scale of all rows, `[1]`, or None.
    """
    held = None
    if const.HOLD or column_tiles(const) == 1:
        held = tuple(value(j, row, const, *arguments) for j in ct.static_iter(range(column_tiles(const))))
    if Given is not None:
        scale = ct.full((const.TILE_ROWS, 1), 0.0, ct.float32) + ct.load(Given, (0,), (1,)).item()
    else:
        highest = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
        if held is not None:
            for j in ct.static_iter(range(column_tiles(const))):
                highest = ct.maximum(highest, ct.abs(held[j]))
        else:
            for j in range(column_tiles(const)):
                highest = ct.maximum(highest, ct.abs(value(j, row, const, *arguments)))
        scale = ct.maximum(ct.max(highest, axis=1, keepdims=True), LEAST_HIGHEST) / LARGEST
    ct.store(Scale, (row,), scale.reshape((const.TILE_ROWS,)), allow_tma=False)
    inverse = 1.0 / scale
    if held is not None:
        for j in ct.static_iter(range(column_tiles(const))):
            store_rows(Out, row, j, saturated(held[j] * inverse, Given), const)
    else:
        for j in range(column_tiles(const)):
            store_rows(Out, row, j, saturated(value(j, row, const, *arguments) * inverse, Given), const)


def saturated(x, Given):
    """What is stored of rows over their scale: by a scale of their own they stay in range. NaN stays NaN."""
    if Given is None:
        return x
    return ct.where(x > LARGEST, LARGEST, ct.where(x < -LARGEST, -LARGEST, x))
