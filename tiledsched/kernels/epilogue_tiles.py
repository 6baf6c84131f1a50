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
from tiledsched.kernels.products import ROW_ELEMENTS, column_of, elements_of, part_view, place_of, sum_of_shares
from tiledsched.kernels.rows import over_tiles
from tiledsched.kernels.scaled_matmul.tiles import only_scale


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
    scales: Any
    """The scales of A, B and Gate where they are of 8-bit floats; else None three times."""
    BY_ROW: Any
    """Whether every row of A and every column of B has such a scale of its own; else each of them has one, or blocks have."""
    scale: Any
    """`[1]` or `[m, 1]`, float32, by which results are divided before they are rounded to e4m3."""


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
    absent = {*missing, *operands, "ScaleA", "ScaleB", "ROW_SCALES"} - {*taken, *entry.constants}
    lines = [
        f"def {name}({', '.join([*taken, 'C', *kinds])}):",
        *(f"    {each} = None" for each in absent),
        f"    extras = Extras(FUNCTION, ({own}), Bias, Residual, (ScaleA, ScaleB, ScaleGate), ROW_SCALES, Scale)",
        f"    {entry.call}",
        "",
    ]
    names = {**vars(tiles), "Extras": Extras, "FUNCTION": kernel.epilogue or globals()[activation]}
    return compiled(f"<{name} of {kernel.name} {activation} {' '.join(present)}>", "\n".join(lines), names, name)


SUM = ("SPLIT_K", "COMBINE_M", "COMBINE_N", "COMBINE_EVEN")
"""The constants of a sum of shares."""
BOOLEANS = {
    *("PERSISTENT", "TMA_STORE", "COMBINE_EVEN", "SWAP", "STORE_VIEW", "ALIGNED"),
    *("fast_accum", "ROW_SCALES", "BLOCK_SCALES", "WHOLE"),
}
"""The constants that are true or false."""


def schedule_tiles(sums, arrays, C, extras, const, PERSISTENT, TMA_STORE):
    """All of the current block's work tiles. `sums(arrays, work, const)` are tuples of the parts of the product of a work tile,
    and of those of the gate, or None; TMA_STORE: the compiler is told that rows of C are whole groups of elements."""
    tiles_m, tiles_n = ct.cdiv(C.shape[0], const.TILE_M), ct.cdiv(C.shape[1], const.TILE_N + const.REST_N)
    over_tiles(finish_tile, tiles_m * tiles_n, PERSISTENT, tiles_m, tiles_n, sums, arrays, C, extras, const, TMA_STORE)


def finish_tile(index, tiles_m, tiles_n, sums, arrays, C, extras, const, TMA_STORE):
    """One work tile, start to finish."""
    work = place_of(index, tiles_m, tiles_n, const)
    parts, gates = sums(arrays, work, const)
    for part in ct.static_iter(range(2 if const.REST_N else 1)):
        if part == 0 or column_of(work, part, const) * const.REST_N < C.shape[1]:
            store(C, work, part, parts[part], None if gates is None else gates[part], extras, const, TMA_STORE)


def accumulate_gated(A, B, Gate, work, zeros, added, const):
    """The sums of the products of A with B and with Gate over a work tile.

    `added(acc, a, b, const)` are sums with the product of a step added to them; they begin as `zeros`.
    """
    latency = None if const.LATENCY == 0 else const.LATENCY
    rows = A.tiled_view((const.TILE_M, const.TILE_K), padding_mode=ct.PaddingMode.ZERO)
    columns, gates = part_view(B, const.TILE_K, 0, const), part_view(Gate, const.TILE_K, 0, const)
    acc, gate = zeros, zeros
    for step in range(ct.cdiv(A.shape[1], const.TILE_K)):
        a = rows.load((work.row, step), latency=latency)
        acc = added(acc, a, columns.load((step, work.column), latency=latency), const)
        gate = added(gate, a, gates.load((step, work.column), latency=latency), const)
    return acc, gate


def finished(acc, gate, bias, residual, row, column, extras):
    """The results of a tile of sums, in float32.

    `gate` are the sums of the second product, `bias` and `residual` tiles that broadcast to the sums; each may be None.
    """
    acc = scaled(acc, extras.scales[1], row, column, extras)
    if bias is not None:
        acc = acc + bias.astype(ct.float32)
    gate = None if gate is None else scaled(gate, extras.scales[2], row, column, extras)
    acc = activated(acc, row, column, extras) if gate is None else activated(gate, row, column, extras) * acc
    if residual is not None:
        acc = acc + residual.astype(ct.float32)
    if extras.scale is not None:
        acc = acc * (1.0 / scale_of(extras.scale, row))
        acc = ct.minimum(ct.maximum(acc, -LARGEST_E4M3, propagate_nan=True), LARGEST_E4M3, propagate_nan=True)
    return acc


def scaled(acc, scale, row, column, extras):
    """Sums with the scales of A and the other operand. Sums with scales of blocks have them already."""
    if scale is None or scale.ndim == 2:
        return acc
    if extras.BY_ROW:
        return acc * ct.gather(extras.scales[0], row) * ct.gather(scale, column)
    return acc * only_scale(extras.scales[0], scale)


def scale_of(scale, row):
    """The scale of all results, or those of these rows, `[rows, 1]`."""
    return ct.gather(scale, (row, 0), padding_value=1.0) if scale.ndim == 2 else ct.load(scale, (0,), (1,)).item()


def store(C, work, PART, acc, gate, extras, const, TMA_STORE):
    """Finish and store one part of a work tile."""
    place = (work.row, column_of(work, PART, const))
    width = const.REST_N if PART else const.TILE_N
    row, column = elements_of(work.row, place[1], const.TILE_M, width)
    if const.REST_N and PART == 0:  # the first parts of work tiles stand apart
        column = column + work.column * const.REST_N
    bias = None if extras.bias is None else ct.gather(extras.bias, column)
    residual = None if extras.residual is None else part_view(extras.residual, const.TILE_M, PART, const).load(place)
    tile = finished(acc, gate, bias, residual, row, column, extras).astype(C.dtype)
    if TMA_STORE:
        C = C.slice(1, 0, ct.assume_divisible_by(C.shape[1], ROW_ELEMENTS))
    part_view(C, const.TILE_M, PART, const).store(place, tile)


def combine(Partial, C, extras, SPLIT_K, COMBINE_M, COMBINE_N, EVEN):
    """C = the finished sum of Partial `[SPLIT_K, m, n]` over its first axis, always in the same order. EVEN: tiles divide C."""
    row, column = elements_of(ct.bid(0), ct.bid(1), COMBINE_M, COMBINE_N)
    total = sum_of_shares(Partial, row, column, SPLIT_K, EVEN)
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
