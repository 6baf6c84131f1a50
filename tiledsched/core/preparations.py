"""Tile code of the preparations that a declaration may name: an output set to zero, and a copy of an input.

They are launches like any other, so that they are built, timed, bundled and captured with the kernel that they prepare.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cuda.tile as ct

from tiledsched.core.arrays import ArraySpec
from tiledsched.core.fields import Preparation

Int = ct.Constant[int]
LONGEST = 1024
"""Elements of a tile."""
SQUARE = 32
"""Rows and columns of a tile that is transposed, or copied to another layout."""


def zero_1(target, COLUMNS: Int):
    """Set an array of one axis to zero."""
    ct.store(target, (ct.bid(0),), ct.zeros((COLUMNS,), ct.float32).astype(target.dtype))


def zero_2(target, ROWS: Int, COLUMNS: Int):
    """Set an array of two axes to zero."""
    across = ct.cdiv(target.shape[1], COLUMNS)
    place = (ct.bid(0) // across, ct.bid(0) % across)
    ct.store(target, place, ct.zeros((ROWS, COLUMNS), ct.float32).astype(target.dtype))


def zero_3(target, ROWS: Int, COLUMNS: Int):
    """Set an array of three axes to zero."""
    across, down = ct.cdiv(target.shape[2], COLUMNS), ct.cdiv(target.shape[1], ROWS)
    place = (ct.bid(0) // (across * down), ct.bid(0) // across % down, ct.bid(0) % across)
    ct.store(target, place, ct.zeros((1, ROWS, COLUMNS), ct.float32).astype(target.dtype))


def copy_1(source, target, COLUMNS: Int):
    """Copy an array to another, of one axis."""
    ct.store(target, (ct.bid(0),), ct.load(source, (ct.bid(0),), (COLUMNS,)).astype(target.dtype))


def copy_2(source, target, ROWS: Int, COLUMNS: Int, SWAPPED: ct.Constant[bool]):
    """Copy an array to another, of two axes."""
    across = ct.cdiv(target.shape[1], COLUMNS)
    row, column = ct.bid(0) // across, ct.bid(0) % across
    if SWAPPED:
        tile = ct.transpose(ct.load(source, (column, row), (COLUMNS, ROWS)))
    else:
        tile = ct.load(source, (row, column), (ROWS, COLUMNS))
    ct.store(target, (row, column), tile.astype(target.dtype))


def copy_3(source, target, ROWS: Int, COLUMNS: Int, SWAPPED: ct.Constant[bool]):
    """Copy an array to another, of three axes."""
    across, down = ct.cdiv(target.shape[2], COLUMNS), ct.cdiv(target.shape[1], ROWS)
    outer, row, column = ct.bid(0) // (across * down), ct.bid(0) // across % down, ct.bid(0) % across
    if SWAPPED:
        tile = ct.transpose(ct.load(source, (outer, column, row), (1, COLUMNS, ROWS)), 1, 2)
    else:
        tile = ct.load(source, (outer, row, column), (1, ROWS, COLUMNS))
    ct.store(target, (outer, row, column), tile.astype(target.dtype))


FUNCTIONS = {("zero", 1): zero_1, ("zero", 2): zero_2, ("zero", 3): zero_3}
FUNCTIONS |= {("copy", 1): copy_1, ("copy", 2): copy_2, ("copy", 3): copy_3}
MOST_AXES = 3


def launch_of(each: Preparation, target: ArraySpec, source: ArraySpec | None) -> tuple[Any, int, Mapping[str, Any]]:
    """The function of a preparation, its blocks, and its constants in the order of its parameters."""
    shape = target.shape
    columns, rows = shape[-1], shape[-2] if len(shape) > 1 else 1
    straight = source is None or (not each.swapped and source.column == target.column)
    if not straight:
        tile = min(SQUARE, _power_of_two(rows)), min(SQUARE, _power_of_two(columns))
    elif target.column:
        long = min(LONGEST, _power_of_two(rows))
        tile = long, min(LONGEST // long, _power_of_two(columns))
    else:
        long = min(LONGEST, _power_of_two(columns))
        tile = min(LONGEST // long, _power_of_two(rows)), long
    blocks = math.prod(shape[:-2]) * -(-rows // tile[0]) * -(-columns // tile[1])
    constants: dict[str, Any] = {"ROWS": tile[0], "COLUMNS": tile[1]} if len(shape) > 1 else {"COLUMNS": tile[1]}
    if source is not None and len(shape) > 1:
        constants["SWAPPED"] = each.swapped
    return FUNCTIONS[each.kind, len(shape)], max(1, blocks), constants


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
