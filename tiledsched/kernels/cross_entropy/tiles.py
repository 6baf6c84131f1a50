"""The tile code of cross entropy, with its schedule left open.

A row's logits are read once, in groups of tiles. Each column of a tile is a lane with a running maximum and a running sum of
exponentials (Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867); the maximum of a lane is
taken over a whole group, so that a sum is rescaled once in a group, and lanes are combined at the end of the row. Several blocks
may share a row; a second launch then combines what they found.

Every number that a loss is made of is a difference of logits: what all logits of a row have in common costs no digits. Logits
are subtracted before they are multiplied by log2(e). The other way round, `x * log2(e) - y * log2(e)` becomes a fused
multiply-add, in which what is left where x equals y is the rounding of a product: 1e31 where the logits are 1e38.
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
LOWEST = -3.4028234663852886e38
"""The least float32: the running maximum of a lane without a logit above minus infinity. Such a lane stays at a sum of 0: minus
infinity less LOWEST is minus infinity, whose exponential is 0, and LOWEST less any maximum is 0 or less, with an exponential of at
most 1. Neither holds a product that could be contracted, and NaN comes only from a logit that is NaN or infinite."""


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
    """Whether labels are smoothed, for which it is summed up how far logits are below the largest of their row."""


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
    highest, total, below = read_rest(Logits, row, 0, lanes, const)
    store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, below, const)


def cross_entropy_part(
    Logits,
    Highest,
    Total,
    Below,
    columns: Int,
    smoothed: Bool,
    TILE_ROWS: Int,
    TILE_COLUMNS: Int,
    GROUP: Int,
    SPLITS: Int,
    LOADS: Int,
):
    """The maximum of one part of each row, its sum of exponentials and how far its logits are below the maximum in all, each
    `[SPLITS, rows]`.
    """
    const = EntropyConstants(columns, TILE_ROWS, TILE_COLUMNS, LOADS, GROUP, SPLITS, smoothed)
    row, split = ct.bid(0) // SPLITS, ct.bid(0) % SPLITS
    highest, total, below = read_rest(Logits, row, split, read_groups(Logits, row, split, const), const)
    ct.store(Highest, (split, row), highest.reshape((1, TILE_ROWS)))
    ct.store(Total, (split, row), total.reshape((1, TILE_ROWS)))
    if smoothed:
        ct.store(Below, (split, row), below.reshape((1, TILE_ROWS)))


def cross_entropy_combine(
    Logits,
    Labels,
    Highest,
    Total,
    Below,
    Loss,
    Lse,
    ignore_index,
    smoothing,
    columns: Int,
    smoothed: Bool,
    TILE_COLUMNS: Int,
    GROUP: Int,
    SPLITS: Int,
    COMBINE_ROWS: Int,
):
    """Loss and Lse from what the parts of each row found."""
    const = EntropyConstants(columns, COMBINE_ROWS, TILE_COLUMNS, 0, GROUP, SPLITS, smoothed)
    row = ct.bid(0)
    label = load_labels(Labels, row, const)
    target = targets(Logits, label, row, const)
    parts = load_parts(Highest, row, const)
    highest = ct.max(parts, axis=0)
    total = ct.sum(load_parts(Total, row, const) * power(parts - highest), axis=0)
    below = total
    if smoothed:
        of_part = columns_of(ct.arange(SPLITS, dtype=ct.int32)[:, None], const)
        below = ct.sum(lowered(load_parts(Below, row, const), of_part, parts - highest), axis=0)
    store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, below, const)


def load_parts(array, row, const):
    """What all parts found of a tile of rows, `[SPLITS, TILE_ROWS]`."""
    return ct.load(array, (0, row), (const.SPLITS, const.TILE_ROWS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)


def columns_of(split, const):
    """Columns of a part of a row: of every part the same number of groups of tiles while there are such groups, and of the last
    part also what is left of the row.
    """
    if const.SPLITS == 1:
        return const.COLUMNS
    share = (whole_groups(const) + const.SPLITS - 1) // const.SPLITS
    begin, end = ct.minimum(split * share, whole_groups(const)), ct.minimum((split + 1) * share, whole_groups(const))
    group = const.GROUP * const.TILE_COLUMNS
    return (end - begin) * group + ct.where(split == const.SPLITS - 1, const.COLUMNS % group, 0)


def whole_groups(const):
    """Groups of tiles that lie within a row."""
    return const.COLUMNS // (const.GROUP * const.TILE_COLUMNS)


def read_groups(Logits, row, split, const):
    """The lanes (maximum, sum of exponentials, how far logits are below the maximum in all) of the whole groups of one part of a
    tile of rows.
    """
    share = (whole_groups(const) + const.SPLITS - 1) // const.SPLITS
    highest = ct.full((const.TILE_ROWS, const.TILE_COLUMNS), LOWEST, ct.float32)
    total = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
    below = ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32)
    for group in range(split * share, min(split * share + share, whole_groups(const))):
        taken = (group - split * share) * const.GROUP
        highest, total, below = add_group(
            Logits, row, group * const.GROUP, const.GROUP, False, (highest, total, below), taken, const
        )
    return highest, total, below


def read_rest(Logits, row, split, lanes, const):
    """(maximum, sum of exponentials, how far logits are below the maximum in all) of a part of a tile of rows, each `[TILE_ROWS]`:
    from its lanes, and for the last part also from the tiles behind whole groups.
    """
    highest, total, below = lanes
    first = whole_groups(const) * const.GROUP
    rest = column_tiles(const) - first
    columns = columns_of(split, const)
    if rest > 0 and (const.SPLITS == 1 or split == const.SPLITS - 1):
        taken = columns // (const.GROUP * const.TILE_COLUMNS) * const.GROUP
        highest, total, below = add_group(Logits, row, first, rest, True, (highest, total, below), taken, const)
    row_max = ct.max(highest, axis=1, keepdims=True)
    rise = highest - row_max
    total = ct.sum(total * power(rise), axis=1)
    if const.SMOOTHED:
        of_lane = (columns - column_indices(0, const) + (const.TILE_COLUMNS - 1)) // const.TILE_COLUMNS
        below = lowered(below, of_lane, rise)
    return row_max.reshape((const.TILE_ROWS,)), total, ct.sum(below, axis=1)


def add_group(Logits, row, first, count, last, lanes, taken, const):
    """The lanes, which have `taken` columns each, with `count` more tiles from the tile `first` on; the `last` ones may reach
    beyond the row.
    """
    highest, total, below = lanes
    tiles = tuple(load_rows(Logits, row, first + i, const) for i in ct.static_iter(range(count)))
    if last:
        tiles = tuple(within(tiles[i], -math.inf, first + i, const) for i in ct.static_iter(range(count)))
    higher = highest
    for i in ct.static_iter(range(count)):
        higher = ct.maximum(higher, tiles[i])
    rise = highest - higher
    total = total * power(rise)
    if const.SMOOTHED:
        below = lowered(below, taken, rise)
    for i in ct.static_iter(range(count)):
        above = tiles[i] - higher
        total = total + power(above)
        if const.SMOOTHED:
            below = below - (within(above, 0.0, first + i, const) if last else above)
    return higher, total, below


def power(x):
    """e to each element."""
    return ct.exp2(x * LOG2_E, flush_to_zero=True)


def lowered(below, columns, rise):
    """How far some columns are below a higher maximum in all, where `rise` is the old maximum less the new one. It is held finite,
    because where there are no columns it is multiplied by 0.
    """
    return below - columns * ct.maximum(rise, LOWEST)


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


def store_losses(Loss, Lse, ignore_index, smoothing, row, label, target, highest, total, below, const):
    """Store the loss and the logarithm of the sum of exponentials of a tile of rows. An ignored row has the loss 0, and one whose
    label is no column NaN.
    """
    log_total = ct.log2(total) * LN_2
    loss = log_total + (1.0 - smoothing) * (highest - target)
    if const.SMOOTHED:
        loss = loss + smoothing * (below / const.COLUMNS)
    ct.store(Loss, (row,), ct.where(label == ignore_index, 0.0, loss), allow_tma=False)
    lse = ct.where(highest < math.inf, highest + log_total, highest)  # in a row with infinity log_total is NaN
    ct.store(Lse, (row,), lse, allow_tma=False)
