"""The tile code of epilogues: float32 sums of a product become what is rounded and stored. See `kernels.epilogues`.

An activation is a function `f(acc, row, column, *arrays)` of a tile of sums `[rows, columns]` in float32, the numbers of its rows
`[rows, 1]`, those of its columns `[1, columns]`, and arrays, which the activations of this file do without. An author's own
epilogue is such a function, too. They are injected into the kernels, and inlined like all other code.

A kernel takes the arrays that its problem has, and no others: :func:`entry_of` makes its text.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.tile as ct

from tiledsched.core.sources import compiled
from tiledsched.kernels.epilogues import ARRAYS, LARGEST_E4M3
from tiledsched.kernels.glu.tiles import gelu as exact_gelu, logistic
from tiledsched.kernels.products import column_of, elements_of, part_view

ROW_ELEMENTS = 16
"""Elements of which rows of C are multiples where the TMA unit stores them."""


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
    """`[1]` or `[m, 1]`, float32, by which results are divided before they are rounded to e4m3."""
    TMA_STORE: bool
    """Whether the TMA unit stores C: the compiler chooses it where it knows that rows are whole groups of 16 elements."""


class KernelText(NamedTuple):
    """What the text of a kernel is made of."""

    operands: str
    """The arrays that it reads, but for those of the epilogue; of gates where there is one."""
    constants: tuple[str, ...]
    """Its compile-time constants, by their names."""
    call: str
    """What it does with them, C and `extras`."""


@functools.lru_cache(maxsize=256)
def entry_of(tiles, name, kernel, activation, present):
    """A kernel with an epilogue.

    Args:
        tiles: the module of the product's tile code, whose table `ENTRIES` has an `KernelText` of that name.
        name: what the kernel is called.
        kernel: the declaration, which may have a function of an author.
        activation: the name of the activation.
        present: the arrays of the epilogue that the problem has, and those of the author's function.
    """
    entry = tiles.ENTRIES[name]
    missing = [each for each in ARRAYS if each not in present]
    operands = entry.operands.split()
    taken = [each for each in operands if each.removeprefix("Padded") not in missing]
    taken += [each for each in present if each not in ("Gate", "ScaleGate")]
    own = "".join(f"{each}, " for each in kernel.own_arrays)
    kinds = (f"{each}: {'Bool' if each in BOOLEANS else 'Int'}" for each in entry.constants)
    lines = [f"def {name}({', '.join([*taken, 'C', *kinds])}):"]
    lines += [f"    {each} = None" for each in {*missing, *operands} - {*taken}]
    tma = "TMA_STORE" if "TMA_STORE" in entry.constants else "False"
    lines += [f"    extras = Extras(FUNCTION, ({own}), Bias, Residual, Scale, {tma})", f"    {entry.call}", ""]
    names = {**vars(tiles), "Extras": Extras, "FUNCTION": kernel.epilogue or globals()[activation]}
    return compiled(f"<{name} of {kernel.name} {activation} {' '.join(present)}>", "\n".join(lines), names, name)


BOOLEANS = {"PERSISTENT", "TMA_STORE", "COMBINE_EVEN", "SWAP", "STORE_VIEW", "ALIGNED", "fast_accum"}
BOOLEANS |= {"ROW_SCALES", "BLOCK_SCALES", "WHOLE"}
"""The constants that are true or false."""


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
        acc = acc * (1.0 / scale_of(extras.scale, row))
        acc = ct.minimum(ct.maximum(acc, -LARGEST_E4M3, propagate_nan=True), LARGEST_E4M3, propagate_nan=True)
    return acc


def scale_of(scale, row):
    """The scale of all rows, or those of these rows, `[rows, 1]`."""
    if scale.ndim == 1:
        return ct.load(scale, (0,), (1,)).item()
    return ct.gather(scale, (row, 0), padding_value=1.0)


def store(C, work, PART, acc, gate, extras, const):
    """Finish and store one part of a work tile."""
    place = (work.row, column_of(work, PART, const))
    width = const.REST_N if PART else const.TILE_N
    row, column = elements_of(work.row, place[1], const.TILE_M, width)
    if const.REST_N and PART == 0:  # the first parts of work tiles stand apart
        column = column + work.column * const.REST_N
    bias = None if extras.bias is None else ct.gather(extras.bias, column)
    residual = None if extras.residual is None else part_view(extras.residual, const.TILE_M, PART, const).load(place)
    tile = finished(acc, gate, bias, residual, row, column, extras).astype(C.dtype)
    if extras.TMA_STORE:
        C = C.slice(1, 0, ct.assume_divisible_by(C.shape[1], ROW_ELEMENTS))
    part_view(C, const.TILE_M, PART, const).store(place, tile)


def store_combined(C, row, column, total, extras, EVEN):
    """Finish and store the sums of shares at these elements. EVEN: none of them lies beyond the edge."""
    bias = None if extras.bias is None else ct.gather(extras.bias, column, check_bounds=not EVEN)
    residual = None if extras.residual is None else ct.gather(extras.residual, (row, column), check_bounds=not EVEN)
    tile = finished(total, None, bias, residual, row, column, extras)
    ct.scatter(C, (row, column), tile.astype(C.dtype), check_bounds=not EVEN)


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
