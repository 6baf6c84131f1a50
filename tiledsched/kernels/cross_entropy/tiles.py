"""The tile code of cross entropy, with its schedule left open.

A row's logits are read once, in groups of tiles. Each column of a tile is a lane with a running maximum and a running sum of
exponentials (Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867); the maximum of a lane is
taken over a whole group, so that a sum is rescaled once in a group, and lanes are combined at the end of the row. Several blocks
may share a row; a second launch then combines what they found. No result depends on the order of a row's logits: rows that do not
begin at multiples of 16 bytes are read from the first such multiple on, and what is before it last.

A loss is made of differences of logits alone, so that it loses no digits where all logits of a row are far from zero. They are
subtracted before they are multiplied by log2(e): the other way round the compiler contracts the second product into a fused
multiply-add, and where both logits are the same, it leaves the rounding of the first product, which is 1e31 where they are 1e38.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.tile as ct

from tiledsched.kernels.rows import (
    LOG2_E,
    Bool,
    Int,
    column_indices,
    column_tiles,
    is_rotated,
    load_rotated,
    load_tile,
    rotated_tiles,
)

LN_2 = math.log(2.0)
LOWEST = -3.4028234663852886e38
"""The least float32: the running maximum of a lane that has seen no column, or nothing above minus infinity.

Such a lane's sum stays 0 in any arithmetic: what is added is the exponential of minus infinity less LOWEST, and what 0 is
multiplied with is that of LOWEST less a maximum, which is 0 or below. No product comes before a difference.
"""


@dataclass(frozen=True)
class EntropyConstants:
    """The compile-time constants of the kernel; the first four and LOADS as in `rows.RowConstants`."""

    COLUMNS: int
    TILE_ROWS: int
    TILE_COLUMNS: int
    LOADS: int
    GROUP: int
    """Tiles that are read before any of them is used."""
    SPLITS: int
    """Blocks that share a row."""
    SMOOTHED: bool
    """Whether labels are smoothed, for which the sum of a row's logits is needed."""


def cross_entropy(
    Logits,
    Labels,
    Loss,
    Lse,
    ignore_index,
    smoothing,
    columns: Int,
    smoothed: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    GROUP: Int,
    LOADS: Int,
):
    """Loss and Lse `[rows]` of Logits `[rows, columns]` and Labels `[rows]`."""
    const = EntropyConstants(columns, TILE_ROWS, TILE_COLUMNS, LOADS, GROUP, 1, smoothed)
    row = ct.bid(0)
    label = load_labels(
        Labels, row, const
    )  # first, and targets before the last tiles: so nobody waits for them at the end
    near = near_logits(Logits, row, const)
    lanes = read_groups(Logits, row, 0, near, const)
    target = targets(Logits, label, row, const)
    highest, total, logits = read_rest(Logits, row, 0, near, lanes, const)
    near = near.reshape((TILE_ROWS,))
    store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, near, logits, const)


def cross_entropy_part(
    Logits,
    Highest,
    Total,
    Near,
    Sum,
    columns: Int,
    smoothed: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    GROUP: Int,
    SPLITS: Int,
    LOADS: Int,
):
    """What `read_rest` finds of one part of each row, each `[SPLITS, rows]`; and Near `[rows]`."""
    const = EntropyConstants(columns, TILE_ROWS, TILE_COLUMNS, LOADS, GROUP, SPLITS, smoothed)
    row, split = ct.bid(0) // SPLITS, ct.bid(0) % SPLITS
    near = near_logits(Logits, row, const)
    lanes = read_groups(Logits, row, split, near, const)
    highest, total, logits = read_rest(Logits, row, split, near, lanes, const)
    ct.store(Highest, (split, row), highest.reshape((1, TILE_ROWS)))
    ct.store(Total, (split, row), total.reshape((1, TILE_ROWS)))
    if smoothed:
        ct.store(Sum, (split, row), logits.reshape((1, TILE_ROWS)))
        ct.store(Near, (split, row), near.reshape((1, TILE_ROWS)))


def cross_entropy_combine(
    Logits,
    Labels,
    Highest,
    Total,
    Near,
    Sum,
    Loss,
    Lse,
    ignore_index,
    smoothing,
    columns: Int,
    smoothed: Bool,
    SPLITS: Int,
    COMBINE_ROWS: Int,
):
    """Loss and Lse from what the parts of each row found."""
    const = EntropyConstants(columns, COMBINE_ROWS, 1, 0, 1, SPLITS, smoothed)
    row = ct.bid(0)
    label = load_labels(Labels, row, const)
    target = targets(Logits, label, row, const)
    parts = load_parts(Highest, row, const)
    highest = ct.max(parts, axis=0)
    total = ct.sum(load_parts(Total, row, const) * power(parts - highest), axis=0)
    near = ct.max(load_parts(Near, row, const), axis=0) if smoothed else total  # which is the same in all parts
    logits = ct.sum(load_parts(Sum, row, const), axis=0) if smoothed else total
    store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, near, logits, const)


def load_parts(array, row, const):
    """What all parts found of a tile of rows, `[SPLITS, TILE_ROWS]`."""
    return ct.load(array, (0, row), (const.SPLITS, const.TILE_ROWS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)


def near_logits(Logits, row, const):
    """What is taken off each row's logits before they are summed up, `[TILE_ROWS, 1]`: with smoothed labels the largest logit of
    the first tile, unless that is minus infinity.

    The sum serves the mean of how far logits are below the row's maximum. If `near` is far below it, so is the whole first tile:
    digits are lost as a share of that mean, at most as many as a sum over all tiles of the row loses.
    """
    if not const.SMOOTHED:
        return ct.zeros((const.TILE_ROWS, 1), ct.float32)
    first = load_logits(Logits, row, 0, whole_tiles(Logits, const) > 0, const)
    near = ct.max(within(first.astype(ct.float32), -math.inf, 0, const), axis=1, keepdims=True)
    return ct.where(near > -math.inf, near, 0.0)


def whole_tiles(Logits, const):
    """Tiles of rows that surely lie within a row."""
    return rotated_tiles(Logits, const) if is_rotated(Logits, const) else const.COLUMNS // const.TILE_COLUMNS


def load_logits(Logits, row, j, whole, const):
    """The `j`-th tile of rows; `whole` says whether it is one of :func:`whole_tiles`."""
    if is_rotated(Logits, const):
        return load_rotated(Logits, row, j, whole, const)
    return load_tile(Logits, row, j, const)


def read_groups(Logits, row, split, near, const):
    """The lanes (maximum, sum of exponentials above it, sum of logits less `near`) of the whole groups of one part of a tile of
    rows.
    """
    groups = whole_tiles(Logits, const) // const.GROUP
    share = (groups + const.SPLITS - 1) // const.SPLITS
    highest = ct.full((const.TILE_ROWS, const.TILE_COLUMNS), LOWEST, ct.float32)
    total = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
    logits = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
    for group in range(split * share, min(split * share + share, groups)):
        highest, total, logits = add_group(
            Logits, row, group * const.GROUP, const.GROUP, False, near, (highest, total, logits), const
        )
    return highest, total, logits


def read_rest(Logits, row, split, near, lanes, const):
    """What `read_groups` finds, for a part of each row of a tile as a whole, `[TILE_ROWS]` each: from its lanes, and for the last
    part also from the tiles behind whole groups.
    """
    first = whole_tiles(Logits, const) // const.GROUP * const.GROUP
    rest = column_tiles(const) - first
    highest, total, logits = lanes
    if rest > 0 and (const.SPLITS == 1 or split == const.SPLITS - 1):
        highest, total, logits = add_group(Logits, row, first, rest, True, near, (highest, total, logits), const)
    row_max = ct.max(highest, axis=1, keepdims=True)
    total = ct.sum(total * power(highest - row_max), axis=1)
    return row_max.reshape((const.TILE_ROWS,)), total, ct.sum(logits, axis=1)


def add_group(Logits, row, first, count, last, near, lanes, const):
    """The lanes with `count` more tiles from the tile `first` on; the `last` ones may reach beyond the row."""
    highest, total, logits = lanes
    whole = whole_tiles(Logits, const)
    tiles = tuple(
        load_logits(Logits, row, first + i, not last or first + i < whole, const) for i in ct.static_iter(range(count))
    )
    if const.SMOOTHED:
        for i in ct.static_iter(range(count)):
            far = tiles[i].astype(ct.float32) - near
            logits = logits + (within(far, 0.0, first + i, const) if last else far)
    if last:
        tiles = tuple(within(tiles[i], -math.inf, first + i, const) for i in ct.static_iter(range(count)))
    largest = tiles[0]  # in the type of the logits: of 16 bits, one instruction compares two pairs
    for i in ct.static_iter(range(1, count)):
        largest = ct.maximum(largest, tiles[i])
    higher = ct.maximum(highest, largest.astype(ct.float32))
    total = total * power(highest - higher)
    for i in ct.static_iter(range(count)):
        total = total + power(tiles[i].astype(ct.float32) - higher)
    return higher, total, logits


def power(x):
    """e to each element."""
    return ct.exp2(x * LOG2_E, flush_to_zero=True)


def within(x, beyond, j, const):
    """The `j`-th tile of a row, with `beyond` in the place of what is beyond the last column."""
    if const.COLUMNS % const.TILE_COLUMNS != 0:
        return ct.where(column_indices(j, const) < const.COLUMNS, x, beyond)
    return x


def load_labels(Labels, row, const):
    """The labels of a tile of rows, `[TILE_ROWS]`."""
    return ct.load(Labels, (row,), (const.TILE_ROWS,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)


def targets(Logits, label, row, const):
    """The logits at the labels of a tile of rows, `[TILE_ROWS]`, and NaN where a label is no column."""
    rows = row * const.TILE_ROWS + ct.arange(const.TILE_ROWS, dtype=ct.int32)
    known = (label >= 0) & (label < const.COLUMNS)
    column = ct.where(known, label, 0).astype(ct.int32)
    return ct.where(known, ct.gather(Logits, (rows, column)).astype(ct.float32), math.nan)


def store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, near, logits, const):
    """Store the loss and the logarithm of the sum of exponentials of a tile of rows. An ignored row has the loss 0, and one whose
    label is no column NaN.
    """
    log_total = ct.log2(total) * LN_2
    loss = log_total + (1.0 - smoothing) * (highest - target)
    if const.SMOOTHED:
        loss = loss + smoothing * (highest - near - logits / const.COLUMNS)
    ct.store(Loss, (row,), ct.where(label == ignore_index, 0.0, loss), allow_tma=False)
    lse = ct.where(highest < math.inf, highest + log_total, highest)  # in a row with infinity log_total is NaN
    ct.store(Lse, (row,), lse, allow_tma=False)
