"""One flat loop over the steps of all work tiles of a block, instead of a main loop for each.

Nested loops drain the pipeline between two work tiles and fill it again: the loads of the next one begin when the output of
this one is done. In a flat loop the change of work tile is a branch at the end of a turn, and loads run ahead across it:
those of keys and values by themselves; those of queries with Q_AHEAD, or with RELOAD_Q, which makes them loads of the loop.
Each step pays a little for that, which many short sequences win back (docs/results/search.md).
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.attention.features import narrowed, rows_see_nothing
from tiledsched.kernels.attention.scheduler import SNAKE, coordinates, pack_count, rows_of, snake, work_tiles_per_head
from tiledsched.kernels.attention.tiles import (
    LOWEST,
    Chain,
    Keys,
    WorkTile,
    epilogue,
    fold,
    fresh_chain,
    key_tile,
    load_queries,
    mask,
    products,
)


def run_flat_loop(Q, K, V, Out, Lse, scale_log2, features, const):
    """Compute all of the current block's work in turns of FLAT_STEPS steps. A work tile takes whole turns.

    `Lse` and `features` may be None.
    """
    blocks = ct.num_blocks(0)
    offset = K.shape[2] - Q.shape[2] if const.BOTTOM_RIGHT else 0
    if const.WINDOW_RIGHT:
        offset = offset + features.window_right
    turns = 0
    for each in range(laps_of(Q, blocks, const)):
        coming = work_tile_of(Q, each, blocks, const)
        turns = turns + turns_of(coming[0], coming[2], offset, K, features, const)

    lap, i = 0, 0
    place, head, batch = work_tile_of(Q, 0, blocks, const)
    left = turns_of(place, batch, offset, K, features, const)
    queries = queries_of(Q, 0, blocks, const)
    ahead = queries_of(Q, 1, blocks, const) if const.Q_AHEAD else ()
    chain = forgetful(fresh_chain(const), const)
    for _ in range(turns):
        if const.RELOAD_Q:
            queries = load_queries(Q, (batch, head, place), const)
        first_masked, steps, span = narrowed(place, batch, offset, K, features, const)
        keys = Keys(K, V, batch, head // const.GROUP if const.PACK == 1 else head, steps, 0, steps, 0, span)
        rows = rows_of(place, offset, const)
        for u in ct.static_iter(range(const.FLAT_STEPS)):
            chain = one_step(queries, rows, keys, i + u, first_masked, chain, scale_log2, const)
        i = i + const.FLAT_STEPS
        left = left - 1
        if left == 0:
            epilogue(Out, Lse, WorkTile(batch, head, (place,)), place, chain, features, const)
            lap = lap + 1
            i = 0
            place, head, batch = work_tile_of(Q, lap, blocks, const)
            left = turns_of(place, batch, offset, K, features, const)
            chain = forgetful(chain, const)
            if const.Q_AHEAD:
                queries = ahead
                ahead = queries_of(Q, lap + 1, blocks, const)
            elif not const.RELOAD_Q:
                queries = load_queries(Q, (batch, head, place), const)


def laps_of(Q, blocks, const):
    """Work tiles that the current block takes."""
    total = work_tiles_per_head(Q, None, const) * pack_count(Q, const) * Q.shape[0]
    first = snake(ct.bid(0), blocks, total // blocks) if const.PERSISTENT == SNAKE else ct.bid(0)
    return ct.cdiv(total - first, blocks)


def work_tile_of(Q, lap, blocks, const):
    """`coordinates` of the work tile that the current block takes in a lap; after its last lap, of any work tile that exists."""
    work_tiles, heads, batches = work_tiles_per_head(Q, None, const), pack_count(Q, const), Q.shape[0]
    place = snake(ct.bid(0), blocks, lap) if const.PERSISTENT == SNAKE else ct.bid(0)
    return coordinates(min(lap * blocks + place, work_tiles * heads * batches - 1), work_tiles, heads, batches, const)


def queries_of(Q, lap, blocks, const):
    """The queries of the work tile that the current block takes in a lap; after its last lap, any queries that exist."""
    place, head, batch = work_tile_of(Q, lap, blocks, const)
    return load_queries(Q, (batch, head, place), const)


def turns_of(place, batch, offset, K, features, const):
    """Turns of the loop that a work tile takes."""
    return ct.cdiv(narrowed(place, batch, offset, K, features, const)[1], const.FLAT_STEPS)


def forgetful(chain, const):
    """The chain for a new work tile: its contents will be multiplied by 2**(LOWEST - first score), which is zero."""
    if rows_see_nothing(const):  # a row may see no score at all
        return fresh_chain(const)
    return Chain(chain.acc, ct.full((const.TILE_M, 1), LOWEST, dtype=ct.float32), chain.row_sum)


def one_step(queries, rows, keys, i, first_masked, chain, scale_log2, const):
    """The chain after the `i`-th step. With LOOP_SPLIT, steps that lie wholly inside the mask go without it."""
    scores = products((queries,), keys, i, const)
    if const.LOOP_SPLIT:
        masked = i >= first_masked
        if const.WINDOW:
            masked = masked | (i < keys.span.left)
        if masked:
            scores = (
                tuple(
                    mask(scores[0][t], rows, keys, key_tile(keys, i, t, const), True, const)
                    for t in ct.static_iter(range(const.KV_SUBTILES))
                ),
            )
        return fold((rows,), keys, i, (chain,), scores, False, scale_log2, const)[0]
    return fold((rows,), keys, i, (chain,), scores, True, scale_log2, const)[0]
