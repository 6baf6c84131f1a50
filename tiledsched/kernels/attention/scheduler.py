"""The order of the work tiles, the query rows that a work tile holds, and the keys that these rows see.

These functions compute with indices alone, on the GPU as on the CPU.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

# Indices into BLOCK_ORDERS, PERSISTENT_MODES and KV_DIRECTIONS of the declaration.
NATURAL, REVERSED, HEADS_FASTEST, SWIZZLED = range(4)
ONE_EACH, STRIDED, SNAKE = range(3)
FORWARD, BACKWARD, SAWTOOTH, WIDE_SAWTOOTH = range(4)
SWIZZLE_PAIRS = 8
"""(batch, head) pairs that a swizzled order takes together: as many as have their keys and values in the L2 cache."""


def work_tiles_per_head(Q, features, const):
    """Work tiles of a head or of a pack of heads; for packed sequences, places for work tiles."""
    if const.PACKED:
        count = Q.shape[2] // rows_of_work(const) + features.CuQ.shape[0] - 1
    else:  # no early return above: in a flat loop that would be other machine code
        count = ct.cdiv(Q.shape[2], rows_of_work(const))
    return count


def rows_of_work(const):
    """Query rows per head that a work tile holds."""
    return const.TILE_M // const.PACK * const.Q_SUBTILES


def pack_count(Q, const):
    """Query heads, or packs of query heads: one pack for each key/value head."""
    return Q.shape[1] if const.PACK == 1 else Q.shape[1] // const.GROUP


def snake(block, blocks, lap):
    """Place of `block` in a lap over all blocks: even laps go up, odd laps go down."""
    return block + lap % 2 * (blocks - 1 - 2 * block)


def coordinates(work, work_tiles, heads, batches, const):
    """(place among the head's work tiles, head, batch) of the `work`-th work tile."""
    pairs = heads * batches
    if const.BLOCK_ORDER == HEADS_FASTEST:  # one work tile of every head, then the next; the longest rows first
        batch_head = work % pairs
        place = work // pairs
    elif const.BLOCK_ORDER == SWIZZLED:  # the same among a few heads, whose keys stay in the L2 cache
        first = work // (SWIZZLE_PAIRS * work_tiles) * SWIZZLE_PAIRS
        width = min(SWIZZLE_PAIRS, pairs - first)
        batch_head = first + work % (SWIZZLE_PAIRS * work_tiles) % width
        place = work % (SWIZZLE_PAIRS * work_tiles) // width
    else:
        batch_head = work // work_tiles
        place = work % work_tiles
    # Most masks of lists show the last rows the most keys.
    lists_swizzled = const.BLOCK_ROWS > 0 and const.BLOCK_ORDER == SWIZZLED
    if const.BLOCK_ORDER == REVERSED or (const.BLOCK_ORDER >= HEADS_FASTEST and const.CAUSAL) or lists_swizzled:
        place = work_tiles - 1 - place
    return place, batch_head % heads, batch_head // heads


def query_tile(place, s, seq_q, const):
    """Index of the `s`-th query tile of a work tile. A tile beyond the end becomes the last tile, which is computed twice."""
    tile = place
    if const.Q_SUBTILES > 1:
        tile = place * const.Q_SUBTILES + s
        if const.CHECK_BOUNDS:
            tile = min(tile, ct.cdiv(seq_q, const.TILE_M // const.PACK) - 1)
    return tile


def rows_of(tile, offset, const):
    """The last key that each row of a tile sees when causal, `[TILE_M, 1]`."""
    if const.PACK == 1:
        last = tile * const.TILE_M + ct.arange(const.TILE_M, dtype=ct.int32)[:, None]
    else:
        rows = const.TILE_M // const.PACK
        last = tile * rows + ct.arange(const.TILE_M, dtype=ct.int32)[:, None] % rows
    return last + offset if const.BOTTOM_RIGHT or const.WINDOW_RIGHT or const.STARTS else last


def steps_of(place, offset, seq_k, const):
    """(first masked step, steps) of a work tile: rows see all keys of the steps before the first, and no keys after the last."""
    block_rows, step_n = rows_of_work(const), const.TILE_N * const.KV_SUBTILES
    if const.CAUSAL and (const.BOTTOM_RIGHT or const.WINDOW_RIGHT or const.STARTS):
        first_masked = min(max(place * block_rows + offset, 0), seq_k) // step_n
        steps = ct.cdiv(min(max((place + 1) * block_rows + offset, 0), seq_k), step_n)
        steps = max(steps, 1)  # one at least: QK_AHEAD makes its scores
    elif const.CAUSAL:
        first_masked = min(place * block_rows, seq_k) // step_n
        steps = ct.cdiv(min((place + 1) * block_rows, seq_k), step_n)
    else:
        first_masked = seq_k // step_n
        steps = ct.cdiv(seq_k, step_n)
    return first_masked, steps
