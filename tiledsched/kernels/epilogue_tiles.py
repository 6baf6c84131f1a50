"""The tile code of epilogues: float32 sums of a product become what is rounded and stored. See `kernels.epilogues`.

An activation is a function `f(acc, row, column, *arrays)` of a tile of sums `[rows, columns]` in float32, the numbers of its rows
`[rows, 1]`, those of its columns `[1, columns]`, and arrays, which the activations of this file do without. An author's own
epilogue is such a function, too. They are injected into the kernels, and inlined like all other code.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.epilogues import LARGEST_E4M3
from tiledsched.kernels.glu.tiles import gelu as exact_gelu, logistic


@dataclass(frozen=True)
class Extras:
    """What an epilogue is made of; None for what a problem does not have."""

    function: Any
    """The activation, or the function of an author."""
    arrays: Any
    """The arrays that it takes."""
    bias: Any
    """`[n]`, or `[groups, n]`."""
    residual: Any
    """An array of the shape of C."""
    scale: Any
    """`[1]`, float32, by which results are divided before they are rounded to e4m3."""
    TMA_STORE: bool
    """Whether the TMA unit stores C: the compiler chooses it where it knows that rows are whole groups of 16 elements."""


def finished(acc, gate, bias, residual, row, column, extras):
    """The results of a tile of sums, in float32.

    `gate` are the sums of the second product, `bias` and `residual` tiles that broadcast to the sums; each may be None.
    """
    if bias is not None:
        acc = acc + bias.astype(ct.float32)
    acc = activated(acc, row, column, extras) if gate is None else activated(gate, row, column, extras) * acc
    if residual is not None:
        acc = acc + residual.astype(ct.float32)
    if extras.scale is not None:
        acc = acc * (1.0 / ct.load(extras.scale, (0,), (1,)).item())
        acc = ct.minimum(ct.maximum(acc, -LARGEST_E4M3, propagate_nan=True), LARGEST_E4M3, propagate_nan=True)
    return acc


def activated(acc, row, column, extras):
    """What the injected function returns for a tile of sums, in float32."""
    return ct.broadcast_to(ct.astype(extras.function(acc, row, column, *extras.arrays), ct.float32), acc.shape)


def none(acc, row, column):
    """The sums themselves."""
    return acc


def relu(acc, row, column):
    """The larger of each sum and 0; NaN stays."""
    return ct.where(acc < 0.0, 0.0, acc)


def squared_relu(acc, row, column):
    """The square of relu."""
    acc = relu(acc, row, column)
    return acc * acc


def silu(acc, row, column):
    """Each sum times its logistic function."""
    return acc * logistic(acc)


def gelu(acc, row, column):
    """Each sum times the share of normal numbers below it."""
    return exact_gelu(acc)


def gelu_tanh(acc, row, column):
    """The approximation of gelu by tanh."""
    return acc * logistic(
        acc * (1.5957691216 + 0.0713548163 * acc * acc)
    )  # twice sqrt(2 / pi), and 0.044715 times that
