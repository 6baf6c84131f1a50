"""Optional attention features: a sliding window, capped scores, sinks, and keys that start or end early.

Only the kernels `attention_features*` and `attention_varlen*` know them, so that a feature that a problem does without leaves no
trace in its machine code. A window and a sequence's own first and last key bound the loop over the keys: key tiles that no row of
a work tile sees are not loaded. The keys of a padded batch are slices of the arrays: beyond their ends zeros are read, whatever
lies there.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.attention.scheduler import BACKWARD, rows_of_work, steps_of


@dataclass(frozen=True)
class Features:
    """The arguments of a launch that belong to optional features. A kernel reads those of its problem only."""

    Sinks: Any
    """`[heads]`: a logit that counts in each row's denominator, and has no value."""
    Starts: Any
    """`[batch]`: the first key of each sequence that counts."""
    Lengths: Any
    """`[batch]`: the number of keys of each sequence; later keys do not count."""
    window: Any
    """Keys that a row sees up to its own, its own included."""
    window_right: Any
    """Keys that a row sees after its own."""
    cap_scale: Any
    """The softmax scale, divided by the cap of the scores, times 2 log2(e); the softmax scale where a function changes scores."""
    CuQ: Any = None
    """`[sequences + 1]`: the first query row of each packed sequence, and the end of the last."""
    CuK: Any = None
    """`[sequences + 1]`: the first key of each packed sequence, and the end of the last."""
    Table: Any = None
    """`[sequences, pages]`: which page of K and V holds the keys of a sequence from PAGE * i on."""
    mods: Any = None
    """The author's functions of scores, as a `mods.Mods`; None where there are none."""
    arrays: Any = ()
    """The arrays that these functions take."""
    KScale: Any = None
    """`[1]`, `[kv_heads]` or `[pages]`: what keys in 8 bits are multiplied with."""
    VScale: Any = None
    """Likewise for values."""
    Blocks: Any = None
    """Which blocks of keys the rows of a block see, as :mod:`tiledsched.kernels.attention.mods` has it."""


@dataclass(frozen=True)
class Span:
    """The keys that count for one work tile. The loop over the keys counts its steps from `first`."""

    first: Any
    """The first step over all keys that the loop takes."""
    left: Any
    """Number of steps from `first` on in which some row does not see some early key."""
    first_key: Any
    """The first key that the first row may see."""
    end: Any
    """The first key of the sequence that does not count any more."""
    window: Any
    """The most keys that a row sees."""
    cap_scale: Any
    """What a score is multiplied with before its tanh, as in `Features`."""
    Table: Any
    """The pages of each sequence, as in `Features`."""


def rows_see_nothing(const):
    """Whether there may be rows that see no key at all."""
    return (
        const.BOTTOM_RIGHT
        or const.WINDOW
        or const.STARTS
        or const.LENGTHS
        or const.PACKED
        or const.SCORE_MOD
        or const.MASK_MOD
    )


def own_keys(K, V, batch, offset, features, const):
    """(keys, values, offset) of one sequence of a padded batch, as slices. `offset` counts from its first key."""
    start, end = 0, K.shape[2]
    if const.STARTS:
        start = min(max(ct.gather(features.Starts, (batch,), check_bounds=False), 0), end)
    if const.LENGTHS:
        end = max(last_key(batch, end, features), start)
    return K.slice(axis=2, start=start, stop=end), V.slice(axis=2, start=start, stop=end), offset - start


def narrowed(place, batch, offset, K, features, const):
    """(first masked step, steps, span) of a work tile: the steps over the keys it sees, counted from the span's first step."""
    seq_k = features.Table.shape[1] * const.PAGE if const.PAGE else K.shape[2]
    if not (const.WINDOW or const.WINDOW_RIGHT or const.SOFTCAP or const.STARTS or const.LENGTHS or const.PACKED):
        first_masked, steps = steps_of(place, offset, seq_k, const)
        return first_masked, steps, None
    end = last_key(batch, seq_k, features) if const.PAGE else seq_k
    first_masked, steps = steps_of(place, offset, end, const)
    first, left, first_key = 0, 0, 0
    window = features.window + features.window_right if const.WINDOW_RIGHT else features.window
    if const.WINDOW:
        block_rows, step_n = rows_of_work(const), const.TILE_N * const.KV_SUBTILES
        first_key = max(place * block_rows + offset + 1 - window, 0)  # of the first row, and of the last
        last_first_key = max((place + 1) * block_rows + offset - window, 0)
        most = max(seq_k - 1, 0) if may_be_empty(const) else seq_k - 1
        turn = max(const.UNROLL, const.FLAT_STEPS)  # whole turns, which end where the array does if they divide it
        first = min(first_key, most) // step_n // turn * turn
        left = ct.cdiv(last_first_key, step_n) - first
        first_masked = max(first_masked - first, 0)
    steps = max(steps - first, 1)  # one at least: QK_AHEAD makes its scores
    if may_be_empty(const):  # none where there are no keys, and so no tile to load
        steps = min(steps, ct.cdiv(end, const.TILE_N * const.KV_SUBTILES))
    return first_masked, steps, Span(first, left, first_key, end, window, features.cap_scale, features.Table)


def may_be_empty(const):
    """Whether a sequence may have no keys, in arrays of any size."""
    return const.PACKED or const.STARTS or const.LENGTHS


def last_key(batch, seq_k, features):
    """The first key of a sequence that does not count any more: its length, if that is valid."""
    return min(max(ct.gather(features.Lengths, (batch,), check_bounds=False), 0), seq_k)


def unmasked_turns(keys, first_masked, begin, end, const):
    """(boundary, second): the steps from `boundary` to `second` need no mask, neither for early keys nor for late ones."""
    left = ct.cdiv(keys.span.left, const.UNROLL) * const.UNROLL
    last = max(first_masked, left)
    boundary, second = left, last
    if const.KV_DIRECTION == BACKWARD:
        boundary, second = keys.steps - last, keys.steps - left
    return min(max(boundary, begin), end), min(max(second, begin), end)


def seen(columns, rows, keys, const):
    """Whether each row sees each key of a tile, in which not all rows see all keys."""
    if const.WINDOW or const.STARTS or const.LENGTHS:
        span = keys.span
        visible = columns < span.end
        if const.CAUSAL:
            visible = visible & (columns <= rows)
        if const.WINDOW:
            visible = visible & (columns > rows - span.window)
    elif const.CAUSAL and not const.EVEN:
        visible = (columns <= rows) & (columns < keys.K.shape[2])
    elif const.CAUSAL:
        visible = columns <= rows
    else:
        visible = columns < keys.K.shape[2]
    return visible


def used_values(values, keys, j, const):
    """The parts of value tile `j`, `[TILE_N, columns]` each, with zeros for slots behind the sequence or before all windows.

    The probability of such a key is 0, but its slot may hold anything, and 0 times NaN is NaN.
    """
    columns = j * const.TILE_N + ct.arange(const.TILE_N, dtype=ct.int32)[:, None]
    used = columns < keys.span.end
    if const.WINDOW:
        used = used & (columns >= keys.span.first_key)
    return tuple(ct.where(used, part, ct.full(part.shape, 0.0, dtype=part.dtype)) for part in ct.static_iter(values))


def capped(scores, keys, const):
    """With SOFTCAP, tanh(scale / cap * scores), which is to be multiplied by the cap; otherwise the scores.

    The tanh is computed with an exponential: the GPU's own has 11 bits, which at a cap of 50 is an error of 0.01 in the exponent.
    """
    if const.SOFTCAP:
        power = ct.exp2(scores.astype(ct.float32) * keys.span.cap_scale, flush_to_zero=True)
        scores = 1.0 - ct.truediv(2.0, power + 1.0, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    return scores
