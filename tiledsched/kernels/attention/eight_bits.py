"""Keys and values in 8 bits (float8_e4m3fn), converted to float16 on their way to the products.

A number stands for itself times a scale: one for all keys, one for each key head, or one for each page. float16 holds all numbers
of 8 bits; queries are divided by a power of two for each row, which leaves them as they are where that makes none smaller than
2**-24 of the row's largest. So the products lose nothing that those of the queries' own type would not.

Elements of K and V are words of NUMBERS numbers, four where rows are wide, because the compiler (13.5 on sm_90) reads words from
shared memory whole, and tiles of 8-bit numbers one by one or two at a time. So a tile is divided into *planes*. Those of keys
hold the halves of the words, and so do planes of the queries. Those of values hold a number of each word, and so do as many
accumulators.

Where queries have 8 bits, too (Q8), none of this is needed: products take numbers of 8 bits as they are, and probabilities are
rounded to them. The scales of queries and keys are one factor of the softmax scale. Tensor cores take 8-bit operands whose summed
axis is contiguous: that of V is the keys, so that V is stored by columns. Sums stay in the tensor cores (`use_fast_acc`), which
on sm_90 keep about 14 bits of them.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.attention.packed import pages_of, spans_pages

PER_HEAD, PER_PAGE = 2, 3
"""Indices into KV8_SCALES."""
EIGHT_BIT_POWER = 8.0
"""Power of two that probabilities in 8 bits are multiplied with: the largest becomes 256, of at most 448, and the smallest number
above 0 is 2**-17 of it. It is taken off the row's maximum, and so is in the sums, too: the division and the log-sum-exp take it
out."""
LEAST_POWER, LARGEST_POWER = -100.0, 126.0
"""Of two, that queries are divided by: so that it and its inverse are normal numbers of float32."""


@dataclass(frozen=True)
class Scales:
    """What keys and values in 8 bits are multiplied with."""

    keys: Any
    """The scale of the work tile's key head; `[pages]` where each page has its own."""
    values: Any
    """Likewise for values."""


def own_scale(scales, kv_head, const):
    """The scale of a key head, or the whole array where each page has its own."""
    return (
        scales
        if const.KV8 == PER_PAGE
        else ct.gather(scales, (kv_head if const.KV8 == PER_HEAD or const.Q8 == PER_HEAD else 0,), check_bounds=False)
    )


def key_planes(const):
    """Planes of a tile of keys: its words' halves of two numbers, which are neighbours in a product's operand, too."""
    return max(1, const.NUMBERS // 2)


def planes_of_keys(words, const):
    """The halves of the words of a tile `[TILE_N, words]` as tiles of float16, `[columns, TILE_N]` each."""
    shape = (const.TILE_N, const.TILE_D // key_planes(const))
    halves = tuple(
        ct.pack_to_bytes((words >> (16 * place)).astype(ct.int16 if const.NUMBERS > 1 else ct.int8))
        for place in ct.static_iter(range(key_planes(const)))
    )
    return tuple(
        ct.permute(ct.unpack_from_bytes(each, ct.float8_e4m3fn).reshape(shape).astype(ct.float16), (1, 0))
        for each in ct.static_iter(halves)
    )


def planes_of_values(words, const):
    """The numbers of the words of a tile, as NUMBERS tiles of float16."""
    return tuple(
        ct.bitcast((words >> (8 * place)).astype(ct.uint8), ct.float8_e4m3fn).astype(ct.float16)
        for place in ct.static_iter(range(const.NUMBERS))
    )


def in_float16(q, scales, const):
    """The planes of a query tile `[TILE_M, TILE_D]`, and `[TILE_M, 1]`, what their products with keys are multiplied with."""
    q = q.astype(ct.float32)
    power = ct.floor(ct.log2(ct.max(ct.abs(q), axis=-1, keepdims=True)))
    power = ct.minimum(ct.maximum(power, LEAST_POWER), LARGEST_POWER)
    count, words = key_planes(const), const.TILE_D // const.NUMBERS
    q = (q * ct.exp2(-power)).astype(ct.float16).reshape((const.TILE_M, words, count, const.NUMBERS // count))
    found = tuple(
        ct.extract(q, (0, 0, place, 0), (const.TILE_M, words, 1, const.NUMBERS // count)).reshape(
            (const.TILE_M, const.TILE_D // count)
        )
        for place in ct.static_iter(range(count))
    )
    factor = ct.exp2(power)
    return (*found, factor if const.KV8 == PER_PAGE else factor * scales.keys)


def with_key_scales(scores, q, keys, j, const):
    """The scores of key tile `j`, multiplied with the scales of its keys and the power of two of each row of queries."""
    scores = scores * q[key_planes(const)]
    return scores * scales_of_pages(keys.eight.keys, keys, j, const) if const.KV8 == PER_PAGE else scores


def scales_of_values(keys, places, const):
    """(the scales of the values of each key tile `[1, TILE_N]`, divided by the largest of them; and that one)."""
    found = tuple(scales_of_pages(keys.eight.values, keys, j, const) for j in ct.static_iter(places))
    largest = ct.full((1, 1), 1e-30, dtype=ct.float32)  # at least, so that none is divided by zero
    for each in ct.static_iter(found):
        largest = ct.maximum(largest, ct.max(each, axis=-1, keepdims=True))
    return tuple(each / largest for each in ct.static_iter(found)), largest


def scales_of_pages(scales, keys, j, const):
    """The scale of each key of tile `j`, `[1, TILE_N]`. Pages before all windows, whose scales may be anything, count as 0."""
    pages, _ = pages_of(keys, j, const)
    found = ct.gather(scales, (pages,), check_bounds=False)
    if spans_pages(const):
        shape = (const.TILE_N // const.PAGE, const.PAGE)
        found = ct.broadcast_to(found.reshape((shape[0], 1)), shape).reshape((1, const.TILE_N))
    else:
        found = ct.full((1, const.TILE_N), 0.0, dtype=ct.float32) + found
    if const.WINDOW:
        columns = j * const.TILE_N + ct.arange(const.TILE_N, dtype=ct.int32)[None, :]
        found = ct.where(columns >= keys.span.first_key, found, 0.0)
    return found


def joined(acc, scales, const):
    """The accumulator `[TILE_M, TILE_V]` of those of its planes, multiplied with the scale that all values share."""
    columns = tuple(part.reshape((const.TILE_M, const.TILE_V // const.NUMBERS, 1)) for part in ct.static_iter(acc))
    if const.NUMBERS == 4:
        columns = ct.cat((columns[0], columns[1]), 2), ct.cat((columns[2], columns[3]), 2)
    found = ct.cat(columns, 2) if const.NUMBERS > 1 else columns[0]
    found = found.reshape((const.TILE_M, const.TILE_V))
    return found if const.KV8 == PER_PAGE else found * scales.values
