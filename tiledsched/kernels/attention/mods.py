"""An author's own attention: functions that change scores and hide keys, and lists of the blocks that are worth a visit.

`Mods` holds the two functions, which are tile code in cuTile's words and are inlined like all other code. They are given whole
tiles: scores `[rows, keys]`, the numbers of rows `[rows, 1]` and those of keys `[1, keys]`.

A list of blocks `[mask batches, mask heads, blocks of rows, 2 + blocks of keys]` says for BLOCK_ROWS rows which blocks of
BLOCK_KEYS keys they see: first how many blocks are seen in part, then how many are seen at all; then, from the front, the numbers
of the blocks seen in part, and, from the back, those that all rows see in full. Blocks that no row sees are in no list.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.attention.derivatives import score_of, slope_of, value_of
from tiledsched.kernels.attention.scheduler import rows_of_work

HEAD = 2
"""Numbers of a list before those of blocks."""
LISTS_AT_ONCE = 128
"""Lists that a block reads together where it looks for a block of keys in all of them."""


@dataclass(frozen=True)
class Mods:
    """The functions of an author."""

    score: Any
    """`score(score, b, h, q_idx, kv_idx, *arrays)`: the new scores; None for no change."""
    mask: Any
    """`mask(b, h, q_idx, kv_idx, *arrays)`: whether each row sees each key; None where each sees all."""
    slope: Any = None
    """`slope(score, b, h, q_idx, kv_idx, *arrays)`: the derivative of `score` in the score, as gradients need it; None where
    `score` is a copy that takes a `derivatives.Dual`."""
    weight: Any = None
    """`weight(b, h, q_idx, kv_idx, *arrays)`: what each probability is multiplied with after the softmax; None for no change."""


@dataclass(frozen=True)
class Variant:
    """What the functions of an author are given for one work tile."""

    mods: Any
    """The functions, as `Mods`."""
    arrays: Any
    """The arrays that they take."""
    batch: Any
    """Number of the sequence."""
    heads: Any
    """Number of the query head; `[TILE_M, 1]` where a tile holds rows of several heads."""
    offset: Any
    """What the numbers of rows are higher than those of queries."""
    scale: Any
    """The softmax scale."""
    Blocks: Any
    """All lists of blocks, or None."""
    place: Any
    """Index of the list of the work tile in them."""
    partial: Any
    """How many blocks of the list are seen in part."""
    total: Any
    """How many blocks the list has."""


def variant_of(place, head, batch, offset, features, const):
    """What the functions of an author are given for the work tile at `place` of a head or pack of heads."""
    heads = head
    if const.PACK > 1:
        row = ct.arange(const.TILE_M, dtype=ct.int32)[:, None] // (const.TILE_M // const.PACK)
        heads = head * const.GROUP + row
    shift = offset if const.CAUSAL and const.BOTTOM_RIGHT else 0
    at, partial, total = (0, 0, 0), 0, 0
    if const.BLOCK_ROWS:
        row = place * rows_of_work(const) // const.BLOCK_ROWS
        at = (*lists_of(head, batch, features.Blocks), row)
        partial = ct.gather(features.Blocks, (*at, 0), check_bounds=False)
        total = ct.gather(features.Blocks, (*at, 1), check_bounds=False)
    return Variant(
        features.mods, features.arrays, batch, heads, shift, features.cap_scale, features.Blocks, at, partial, total
    )


def lists_of(head, batch, Blocks):
    """The first two indices of the lists of a head or pack of heads."""
    return min(batch, Blocks.shape[0] - 1), min(head, Blocks.shape[1] - 1)


def listed_keys(head, batch, rows, Blocks):
    """(first, last) block of keys in the lists of blocks of rows, whose numbers are a tile or one number. The first is the higher
    one where a list is empty, or there is none of that number."""
    at, blocks = lists_of(head, batch, Blocks), Blocks.shape[3] - HEAD
    partial = ct.gather(Blocks, (*at, rows, 0))
    full = ct.gather(Blocks, (*at, rows, 1)) - partial
    first = ct.where(partial > 0, ct.gather(Blocks, (*at, rows, HEAD)), blocks)
    last = ct.where(partial > 0, ct.gather(Blocks, (*at, rows, HEAD - 1 + partial)), -1)
    first = ct.where(full > 0, ct.minimum(first, ct.gather(Blocks, (*at, rows, HEAD - 1 + blocks))), first)
    last = ct.where(full > 0, ct.maximum(last, ct.gather(Blocks, (*at, rows, HEAD + blocks - full))), last)
    return first, last


def rows_around(head, batch, block, Blocks):
    """(first, end): blocks of rows. Of all others no list has a block of keys that is `block`, or blocks on both sides of it."""
    count = Blocks.shape[2]
    first, end = count, 0
    for part in range(ct.cdiv(count, LISTS_AT_ONCE)):
        rows = part * LISTS_AT_ONCE + ct.arange(LISTS_AT_ONCE, dtype=ct.int32)
        least, most = listed_keys(head, batch, rows, Blocks)
        around = (least <= block) & (block <= most)
        first = min(first, ct.min(ct.where(around, rows, count)))
        end = max(end, ct.max(ct.where(around, rows + 1, 0)))
    return first, end


def listed_steps(variant, const):
    """(steps that need no mask, steps) of the work tile of a list."""
    each = steps_of_block(const)
    return (variant.total - variant.partial) * each, variant.total * each


def listed_step(variant, i, const):
    """Which step over all keys the `i`-th step of a list is."""
    each = steps_of_block(const)
    place = i // each
    if place >= variant.partial:
        place = variant.Blocks.shape[3] - HEAD - 1 - (place - variant.partial)
    return ct.gather(variant.Blocks, (*variant.place, HEAD + place), check_bounds=False) * each + i % each


def steps_of_block(const):
    """Steps over the keys of a block."""
    return const.BLOCK_KEYS // (const.TILE_N * const.KV_SUBTILES)


def modified(scores, rows, keys, j, const):
    """The scores of key tile `j` as the author's function changes them, before the mask."""
    variant = keys.variant
    columns = j * const.TILE_N + ct.arange(const.TILE_N, dtype=ct.int32)[None, :]
    changed = variant.mods.score(
        scores * variant.scale, variant.batch, variant.heads, rows - variant.offset, columns, *variant.arrays
    )
    return ct.broadcast_to(ct.astype(changed, ct.float32), scores.shape)


def changed_with_slope(scores, columns, rows, visible, keys):
    """(scores as the author's functions change and hide them, derivative of the change), of tiles of any orientation.

    The second is None where no function changes scores; of a hidden score it may be anything.

    Hidden are also the scores where `visible` is false: behind the last row a function may return NaN.
    """
    variant, slope = keys.variant, None
    others = (variant.batch, variant.heads, rows - variant.offset, columns, *variant.arrays)
    if variant.mods.score is not None:
        scores = scores * variant.scale
        if variant.mods.slope is None:
            changed = variant.mods.score(score_of(scores), *others)
            scores, slope = value_of(changed), slope_of(changed)
        else:
            scores, slope = variant.mods.score(scores, *others), variant.mods.slope(scores, *others)
    if variant.mods.mask is not None:
        visible = visible & variant.mods.mask(*others)
    return ct.where(visible, scores.astype(ct.float32), -math.inf), slope


def seen_by_mod(columns, rows, keys, const):
    """Whether each row sees each key of a tile, as the author's function says."""
    variant = keys.variant
    return variant.mods.mask(variant.batch, variant.heads, rows - variant.offset, columns, *variant.arrays)


def weights_by_mod(columns, rows, variant):
    """What the probabilities of a tile, of any orientation, are multiplied with after the softmax; None where no function
    says it."""
    return (
        None
        if variant.mods.weight is None
        else variant.mods.weight(variant.batch, variant.heads, rows - variant.offset, columns, *variant.arrays)
    )
