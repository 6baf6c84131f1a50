"""The tile code of rotary position embedding, with its schedule left open.

Each pair (a, b) of a head's elements becomes (a cos - b sin, b cos + a sin), in float32 and rounded once. A pair is two elements
half a head apart, or two neighbours where pairs are interleaved. After Su et al., RoFormer (arXiv:2104.09864).
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct

Int = ct.Constant[int]


@dataclass(frozen=True)
class RopeConstants:
    """The compile-time constants of the kernel."""

    INTERLEAVED: bool
    """Whether pairs are neighbours."""
    TILE_SEQ: int
    """Positions of a tile."""
    TILE_HALF: int
    """Pairs of a head, rounded up to a power of two."""


def rope(
    Q,
    K,
    Cos,
    Sin,
    OutQ,
    OutK,
    tables,
    q_heads: Int,
    k_heads: Int,
    parts: Int,
    TILE_SEQ: Int,
    TILE_HEADS: Int,
    TILE_K: Int,
    TILE_HALF: Int,
):
    """OutQ and OutK = rotated Q and K. Q is `[batch, seq, q_heads, 2, half]`, or `[..., 1, 2 * half]` where pairs are neighbours;
    K has `k_heads`. Cos and Sin are `[tables, seq, half]`, where `tables` is 1 or the batch.
    """
    const = RopeConstants(parts == 1, TILE_SEQ, TILE_HALF)
    rotate_tile(Q, K, Cos, Sin, OutQ, OutK, tables, (q_heads, TILE_HEADS), (k_heads, TILE_K), const)


def rope_in_place(
    Q,
    K,
    Cos,
    Sin,
    tables,
    q_heads: Int,
    k_heads: Int,
    parts: Int,
    TILE_SEQ: Int,
    TILE_HEADS: Int,
    TILE_K: Int,
    TILE_HALF: Int,
):
    """Rotate Q and K where they lie."""
    const = RopeConstants(parts == 1, TILE_SEQ, TILE_HALF)
    rotate_tile(Q, K, Cos, Sin, Q, K, tables, (q_heads, TILE_HEADS), (k_heads, TILE_K), const)


def rotate_tile(Q, K, Cos, Sin, OutQ, OutK, tables, queries, keys, const):
    """The work of a block: a tile of heads of queries and one of keys, at some positions. `queries` and `keys` are numbers of
    heads in all and in a tile. There are as many tiles of keys, of which the last may be empty.
    """
    head_tiles = (queries[0] + queries[1] - 1) // queries[1]
    head, seq, batch = ct.bid(0) % head_tiles, ct.bid(0) // head_tiles, ct.bid(1)
    table = min(batch, tables - 1)
    cos, sin = angles(Cos, table, seq, const), angles(Sin, table, seq, const)
    place = (batch, seq, head)
    q = load_pairs(Q, place, queries[1], const)
    if (head_tiles - 1) * keys[1] < keys[0]:
        k = load_pairs(K, place, keys[1], const)
        store_rotated(OutQ, place, queries[1], q, cos, sin, const)
        store_rotated(OutK, place, keys[1], k, cos, sin, const)
    else:
        store_rotated(OutQ, place, queries[1], q, cos, sin, const)
        if head * keys[1] < keys[0]:
            store_rotated(OutK, place, keys[1], load_pairs(K, place, keys[1], const), cos, sin, const)


def load_pairs(array, place, heads, const):
    """The first and the second elements of the pairs of a tile of heads, each `[1, TILE_SEQ, heads, 1, TILE_HALF]`, or with the
    last two axes swapped where pairs are neighbours.
    """
    if const.INTERLEAVED:
        pairs = load_part(array, place, heads, 0, 2 * const.TILE_HALF, const)
        pairs = pairs.reshape((1, const.TILE_SEQ, heads, const.TILE_HALF, 2))
        shape = (1, const.TILE_SEQ, heads, const.TILE_HALF, 1)
        return ct.extract(pairs, (0, 0, 0, 0, 0), shape), ct.extract(pairs, (0, 0, 0, 0, 1), shape)
    first = load_part(array, place, heads, 0, const.TILE_HALF, const)
    return first, load_part(array, place, heads, 1, const.TILE_HALF, const)


def store_rotated(out, place, heads, pairs, cos, sin, const):
    """Store the rotated pairs of a tile of heads."""
    if const.INTERLEAVED:
        cos = cos.reshape((1, const.TILE_SEQ, 1, const.TILE_HALF, 1))
        sin = sin.reshape((1, const.TILE_SEQ, 1, const.TILE_HALF, 1))
    a = pairs[0] * cos - pairs[1] * sin
    b = pairs[1] * cos + pairs[0] * sin
    if const.INTERLEAVED:
        store_part(out, place, heads, 0, ct.cat((a, b), 4), 2 * const.TILE_HALF, const)
    else:
        store_part(out, place, heads, 0, a, const.TILE_HALF, const)
        store_part(out, place, heads, 1, b, const.TILE_HALF, const)


def angles(table, batch, seq, const):
    """Cosines or sines of a tile's positions in float32, `[1, TILE_SEQ, 1, 1, TILE_HALF]`."""
    tile = ct.load(
        table, (batch, seq, 0), (1, const.TILE_SEQ, const.TILE_HALF), padding_mode=ct.PaddingMode.ZERO, allow_tma=False
    )
    return tile.astype(ct.float32).reshape((1, const.TILE_SEQ, 1, 1, const.TILE_HALF))


def load_part(array, place, heads, part, width, const):
    """Elements of one half of the heads, or of all of them, in float32."""
    batch, seq, head = place
    shape = (1, const.TILE_SEQ, heads, 1, width)
    tile = ct.load(array, (batch, seq, head, part, 0), shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return tile.astype(ct.float32)


def store_part(array, place, heads, part, tile, width, const):
    """Store what `load_part` loads, rounded to the type of `array`."""
    batch, seq, head = place
    tile = tile.astype(array.dtype).reshape((1, const.TILE_SEQ, heads, 1, width))
    ct.store(array, (batch, seq, head, part, 0), tile, allow_tma=False)
