"""The tile code of gated linear units, with its schedule left open.

Out = activation(Gate) * Up, element by element, in float32 and rounded once, to the type of Gate or to 8-bit floats with scales.
After Shazeer, GLU Variants Improve Transformer (arXiv:2002.05202).
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
    column_tiles,
    load_rows,
    over_tiles,
    store_quantized,
    store_rows,
)

SILU, GELU, GELU_TANH = range(3)
"""Activations, by the index into `declaration.ACTIVATIONS`."""
SQRT_HALF = math.sqrt(0.5)
ERFC = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)
"""Coefficients of erfc(z) = t * exp(-z * z + polynomial(t)) with t = 1 / (1 + z / 2), for z of at least 0; the relative error is
at most 1.2e-7. From Press et al., Numerical Recipes, section on the error function."""


def glu(Gate, Up, Out, columns: Int, TILE_ROWS: Int, TILE_COLUMNS: Int, PERSISTENT: Bool, LOADS: Int, ACTIVATION: Int):
    """Out = activation(Gate) * Up, all `[rows, columns]`. Blocks walk along a row of tiles before they take the next."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, True, PERSISTENT, LOADS)
    tiles = ct.cdiv(Gate.shape[0], TILE_ROWS) * column_tiles(const)
    over_tiles(gate_tile, tiles, PERSISTENT, Gate, Up, Out, ACTIVATION, const)


def gate_tile(tile, Gate, Up, Out, activation, const):
    """One tile, counted row of tiles by row of tiles."""
    row, column = tile // column_tiles(const), tile % column_tiles(const)
    gate = load_rows(Gate, row, column, const)
    up = load_rows(Up, row, column, const)
    store_rows(Out, row, column, activated(gate, activation) * up, const)


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
    PERSISTENT: Bool,
    LOADS: Int,
    ACTIVATION: Int,
):
    """Out = activation(Gate) * Up over Scale `[rows]`, in 8-bit floats. A block takes whole rows."""
    const = RowConstants(columns, TILE_ROWS, TILE_COLUMNS, True, PERSISTENT, LOADS)
    arguments = (Gate, Up, Given if static else None, Out, Scale, ACTIVATION, const)
    over_tiles(quantize_rows, ct.cdiv(Gate.shape[0], TILE_ROWS), PERSISTENT, *arguments)


def quantize_rows(row, Gate, Up, Given, Out, Scale, activation, const):
    """One tile of rows; `Given` is None where each row has a scale of its own."""
    tiles = tuple(
        activated(load_rows(Gate, row, j, const), activation) * load_rows(Up, row, j, const)
        for j in ct.static_iter(range(column_tiles(const)))
    )
    store_quantized(Out, Scale, Given, row, tiles, const)


def activated(x, activation):
    """The activation of each element."""
    if activation == GELU:
        return gelu(x)
    if activation == GELU_TANH:
        return x * logistic(x * (1.5957691216 + 0.0713548163 * x * x))  # twice sqrt(2 / pi), and 0.044715 times that
    return x * logistic(x)


def logistic(x):
    """1 / (1 + exp(-x))."""
    return inverse(1.0 + ct.exp2(x * -LOG2_E, flush_to_zero=True))


def gelu(x):
    """x times the share of normal numbers below x, which is erfc(-x / sqrt(2)) / 2."""
    z = ct.abs(x) * SQRT_HALF
    t = inverse(1.0 + 0.5 * z)
    polynomial = t * ERFC[9] + ERFC[8]
    for i in ct.static_iter(range(7, -1, -1)):
        polynomial = polynomial * t + ERFC[i]
    beyond = 0.5 * t * ct.exp2((polynomial - z * z) * LOG2_E, flush_to_zero=True)
    return x * ct.where(x < 0.0, beyond, 1.0 - beyond)


def inverse(x):
    """One over each element."""
    return ct.truediv(1.0, x, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
