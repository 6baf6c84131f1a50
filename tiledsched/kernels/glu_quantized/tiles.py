"""The tile code of gated linear units to 8-bit floats, with its schedule left open.

The arithmetic is that of `glu` in float32, before its result is rounded; `quantized_rows` says how rows are rounded.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.glu.tiles import activated
from tiledsched.kernels.quantized_rows import store_quantized
from tiledsched.kernels.rows import Bool, Int, RowConstants, load_rows, over_tiles


def glu_quantized(
    Gate,
    Up,
    Given,
    Out,
    Scale,
    columns: Int,
    static: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    HOLD: Bool,
    PERSISTENT: Bool,
    LOADS: Int,
    ACTIVATION: Int,
):
    """Out = activation(Gate) * Up over Scale `[rows]`; Out `[rows, columns]` is of 8-bit floats."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, HOLD, PERSISTENT, LOADS)
    arguments = (Gate, Up, Given if static else None, Out, Scale, ACTIVATION, const)
    over_tiles(quantize_tile, ct.cdiv(Gate.shape[0], TILE_ROWS), PERSISTENT, *arguments)


def quantize_tile(row, Gate, Up, Given, Out, Scale, activation, const):
    """One tile of rows; `Given` is None where each row has a scale of its own."""
    store_quantized(Out, Scale, Given, row, gated, (Gate, Up, activation), const)


def gated(j, row, const, Gate, Up, activation):
    """The `j`-th tile of gated rows."""
    return activated(load_rows(Gate, row, j, const), activation) * load_rows(Up, row, j, const)
