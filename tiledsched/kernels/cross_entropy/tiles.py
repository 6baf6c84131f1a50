"""The tile code of cross entropy, with its schedule left open.

A row's logits are read once, in groups of tiles. Each column of a tile is a lane with a running maximum and a running sum of
exponentials (Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867); the maximum of a lane is
taken over a whole group, so that a sum is rescaled once in a group, and lanes are combined at the end of the row. Several blocks
may share a row; a second launch then combines what they found.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math
from dataclasses import dataclass

import cuda.tile as ct

from tiledsched.kernels.rows import column_indices, column_tiles, load_rows

Int = ct.Constant[int]
Bool = ct.Constant[bool]
LOG2_E = 1.0 / math.log(2.0)
LN_2 = math.log(2.0)
LOWEST = -1e38
"""A running maximum below every logit, which is finite also when it is scaled, so that lanes without one do not make NaN."""


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
    lanes = read_groups(Logits, row, 0, const)
    target = targets(Logits, label, row, const)
    highest, total, logits = read_rest(Logits, row, 0, lanes, const)
    store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, logits, const)


def cross_entropy_part(
    Logits,
    Highest,
    Total,
    Sum,
    columns: Int,
    smoothed: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    GROUP: Int,
    SPLITS: Int,
    LOADS: Int,
):
    """The maximum of one part of each row, its sum of exponentials and its sum of logits, each `[SPLITS, rows]`."""
    const = EntropyConstants(columns, TILE_ROWS, TILE_COLUMNS, LOADS, GROUP, SPLITS, smoothed)
    row, split = ct.bid(0) // SPLITS, ct.bid(0) % SPLITS
    highest, total, logits = read_rest(Logits, row, split, read_groups(Logits, row, split, const), const)
    ct.store(Highest, (split, row), highest.reshape((1, TILE_ROWS)))
    ct.store(Total, (split, row), total.reshape((1, TILE_ROWS)))
    if smoothed:
        ct.store(Sum, (split, row), logits.reshape((1, TILE_ROWS)))


def cross_entropy_combine(
    Logits,
    Labels,
    Highest,
    Total,
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
    total = ct.sum(load_parts(Total, row, const) * ct.exp2((parts - highest) * LOG2_E, flush_to_zero=True), axis=0)
    logits = ct.sum(load_parts(Sum, row, const), axis=0) if smoothed else total
    store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, logits, const)


def load_parts(array, row, const):
    """What all parts found of a tile of rows, `[SPLITS, TILE_ROWS]`."""
    return ct.load(array, (0, row), (const.SPLITS, const.TILE_ROWS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)


def whole_groups(const):
    """Groups of tiles that lie within a row."""
    return const.COLUMNS // (const.GROUP * const.TILE_COLUMNS)


def read_groups(Logits, row, split, const):
    """The lanes (maximum, sum of exponentials above it, sum of logits) of the whole groups of one part of a tile of rows."""
    share = (whole_groups(const) + const.SPLITS - 1) // const.SPLITS
    highest = ct.full((const.TILE_ROWS, const.TILE_COLUMNS), LOWEST, ct.float32)
    total = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
    logits = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
    for group in range(split * share, min(split * share + share, whole_groups(const))):
        highest, total, logits = add_group(
            Logits, row, group * const.GROUP, const.GROUP, False, highest, total, logits, const
        )
    return highest, total, logits


def read_rest(Logits, row, split, lanes, const):
    """(maximum, sum of exponentials above it, sum of logits) of a part of a tile of rows, each `[TILE_ROWS]`: from its lanes, and
    for the last part also from the tiles behind whole groups.
    """
    highest, total, logits = lanes
    first = whole_groups(const) * const.GROUP
    rest = column_tiles(const) - first
    if rest > 0 and (const.SPLITS == 1 or split == const.SPLITS - 1):
        highest, total, logits = add_group(Logits, row, first, rest, True, highest, total, logits, const)
    row_max = ct.max(highest, axis=1, keepdims=True)
    total = ct.sum(total * ct.exp2((highest - row_max) * LOG2_E, flush_to_zero=True), axis=1)
    return row_max.reshape((const.TILE_ROWS,)), total, ct.sum(logits, axis=1)


def add_group(Logits, row, first, count, last, highest, total, logits, const):
    """The lanes with `count` more tiles from the tile `first` on; the `last` ones may reach beyond the row."""
    tiles = tuple(load_rows(Logits, row, first + i, const) for i in ct.static_iter(range(count)))
    if const.SMOOTHED:
        for i in ct.static_iter(range(count)):
            logits = logits + tiles[i]
    if last:
        tiles = tuple(within(tiles[i], first + i, const) for i in ct.static_iter(range(count)))
    higher = highest
    for i in ct.static_iter(range(count)):
        higher = ct.maximum(higher, tiles[i])
    scaled = higher * LOG2_E
    total = total * ct.exp2(highest * LOG2_E - scaled, flush_to_zero=True)
    for i in ct.static_iter(range(count)):
        total = total + ct.exp2(tiles[i] * LOG2_E - scaled, flush_to_zero=True)
    return higher, total, logits


def within(x, j, const):
    """The `j`-th tile of logits, with minus infinity beyond the last column."""
    if const.COLUMNS % const.TILE_COLUMNS != 0:
        return ct.where(column_indices(j, const) < const.COLUMNS, x, -math.inf)
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


def store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, logits, const):
    """Store the loss and the logarithm of the sum of exponentials of a tile of rows. An ignored row has the loss 0, and one whose
    label is no column NaN.
    """
    lse = highest + ct.log2(total) * LN_2
    loss = lse - (1.0 - smoothing) * target
    if const.SMOOTHED:
        loss = loss - smoothing * (logits / const.COLUMNS)
    ct.store(Loss, (row,), ct.where(label == ignore_index, 0.0, loss), allow_tma=False)
    ct.store(Lse, (row,), lse, allow_tma=False)
