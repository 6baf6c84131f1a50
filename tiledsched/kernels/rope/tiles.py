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
Bool = ct.Constant[bool]


@dataclass(frozen=True)
class RopeConstants:
    """The compile-time constants of the kernel."""

    INTERLEAVED: bool
    """Whether pairs are neighbours."""
    TILE_SEQ: int
    """Positions of a tile."""
    TILE_HEADS: int
    """Heads of a tile."""
    TILE_HALF: int
    """Pairs of a head, rounded up to a power of two."""


def rope(Q, K, Cos, Sin, OutQ, OutK, tables, parts: Int, TILE_SEQ: Int, TILE_HEADS: Int, TILE_HALF: Int):
    """OutQ and OutK = rotated Q and K. Q is `[batch, seq, q_heads, 2, half]`, or `[..., 1, 2 * half]` where pairs are neighbours;
    K has other heads. Cos and Sin are `[tables, seq, half]`, where `tables` is 1 or the batch.
    """
    rotate_tile(Q, K, Cos, Sin, OutQ, OutK, tables, RopeConstants(parts == 1, TILE_SEQ, TILE_HEADS, TILE_HALF))


def rope_in_place(Q, K, Cos, Sin, tables, parts: Int, TILE_SEQ: Int, TILE_HEADS: Int, TILE_HALF: Int):
    """Rotate Q and K where they lie."""
    rotate_tile(Q, K, Cos, Sin, Q, K, tables, RopeConstants(parts == 1, TILE_SEQ, TILE_HEADS, TILE_HALF))


def rotate_tile(Q, K, Cos, Sin, OutQ, OutK, tables, const):
    """The work of a block: some heads of some positions. Those of K follow those of Q, and then come other positions."""
    q_tiles = ct.cdiv(Q.shape[2], const.TILE_HEADS)
    head_tiles = q_tiles + ct.cdiv(K.shape[2], const.TILE_HEADS)
    head, seq, batch = ct.bid(0) % head_tiles, ct.bid(0) // head_tiles, ct.bid(1)
    table = min(batch, tables - 1)
    cos, sin = angles(Cos, table, seq, const), angles(Sin, table, seq, const)
    if head < q_tiles:
        rotate(Q, OutQ, (batch, seq, head), cos, sin, const)
    else:
        rotate(K, OutK, (batch, seq, head - q_tiles), cos, sin, const)


def rotate(array, out, place, cos, sin, const):
    """Rotate the heads of one tile."""
    if const.INTERLEAVED:
        pairs = load_part(array, place, 0, 2 * const.TILE_HALF, const)
        pairs = pairs.reshape((const.TILE_SEQ, const.TILE_HEADS, const.TILE_HALF, 2))
        shape = (const.TILE_SEQ, const.TILE_HEADS, const.TILE_HALF, 1)
        a, b = ct.extract(pairs, (0, 0, 0, 0), shape), ct.extract(pairs, (0, 0, 0, 1), shape)
        cos, sin = (
            cos.reshape((const.TILE_SEQ, 1, const.TILE_HALF, 1)),
            sin.reshape((const.TILE_SEQ, 1, const.TILE_HALF, 1)),
        )
        store_part(out, place, 0, ct.cat((a * cos - b * sin, b * cos + a * sin), 3), 2 * const.TILE_HALF, const)
    else:
        a = load_part(array, place, 0, const.TILE_HALF, const)
        b = load_part(array, place, 1, const.TILE_HALF, const)
        store_part(out, place, 0, a * cos - b * sin, const.TILE_HALF, const)
        store_part(out, place, 1, b * cos + a * sin, const.TILE_HALF, const)


def angles(table, batch, seq, const):
    """Cosines or sines of a tile's positions in float32, `[1, TILE_SEQ, 1, 1, TILE_HALF]`."""
    tile = ct.load(
        table, (batch, seq, 0), (1, const.TILE_SEQ, const.TILE_HALF), padding_mode=ct.PaddingMode.ZERO, allow_tma=False
    )
    return tile.astype(ct.float32).reshape((1, const.TILE_SEQ, 1, 1, const.TILE_HALF))


def load_part(array, place, part, width, const):
    """Elements of one half of the heads, or of all of them, in float32."""
    batch, seq, head = place
    tile = ct.load(
        array,
        (batch, seq, head, part, 0),
        (1, const.TILE_SEQ, const.TILE_HEADS, 1, width),
        padding_mode=ct.PaddingMode.ZERO,
    )
    return tile.astype(ct.float32)


def store_part(array, place, part, tile, width, const):
    """Store what `load_part` loads, rounded to the type of `array`."""
    batch, seq, head = place
    tile = tile.astype(array.dtype).reshape((1, const.TILE_SEQ, const.TILE_HEADS, 1, width))
    ct.store(array, (batch, seq, head, part, 0), tile)
