"""Several blocks for one work tile: each block loops over a share of the keys, and then the shares are combined.

This is for few query rows and many keys, as in decoding, where one block per query tile would leave most of the GPU idle.
Split keys after Dao et al., Flash-Decoding (https://pytorch.org/blog/flash-decoding/). The shares are combined
by a second launch, with a block for every few rows of the output, or by the block that finds by an atomic counter that all other
blocks are done.

The atomic counter is sound by cuTile's memory model: `ct.atomic_add` acquires and releases on the device by default. cuTile
orders every earlier access of the block before a release and every later one behind an acquire, across arrays and branches
(the token order pass of cuda-tile 1.7). So the shares that others stored before they counted are seen by the block that
counts last. Shares are combined in the order of their keys: the sum does not depend on which block came last.

Shares of KV_SPAN steps end at the same keys whatever the number of keys, and are added one by one. A share without keys adds
exactly nothing. So the bits of a row depend on its own keys alone, and not on the room for keys, other rows or other sequences.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct

from tiledsched.kernels.attention.packed import is_filled, own_work
from tiledsched.kernels.attention.scheduler import coordinates, pack_count, work_tiles_per_head
from tiledsched.kernels.attention.tiles import (
    Chain,
    Constants,
    WorkTile,
    block_shape,
    epilogue,
    fresh_chain,
    loop_over_keys,
    part_of,
)

REGISTERS_TOGETHER = 16384
"""Registers of a block for shares on their way: a decoding block waits for each load longer than it works on it."""
MOST_TOGETHER = 16
"""Most shares of a fixed size whose loads are under way at the same time: 64 took three times as long to compile."""


def compute_split(Q, K, V, Out, Lse, Partial, State, Counters, scale_log2, features, const):
    """Compute the current block's share of a work tile; the last block to finish combines all shares and stores the output.

    Partial `[slots, TILE_M, TILE_V + REST_V]` and State `[slots, 2, TILE_M]` hold the chains of each share of each query
    tile. Counters `[work tiles, 1]` holds how many shares have arrived: zero before the launch, and zero again after it.
    """
    work, split = ct.bid(0) // const.KV_SPLITS, ct.bid(0) % const.KV_SPLITS
    work_tiles = work_tiles_per_head(Q, features, const)
    place, head, batch, Q, K, V = own_work(Q, K, V, work, work_tiles, features, const)
    if not const.PACKED or is_filled(place, Q, const):
        work_tile, chains = loop_over_keys(Q, K, V, scale_log2, place, head, batch, split, features, const)
        finish_share(Out, Lse, Partial, State, Counters, work, split, work_tile, chains, features, const)


def finish_share(Out, Lse, Partial, State, Counters, work, split, work_tile, chains, features, const):
    """Store a share; if it is the last one, combine all shares and store the output."""
    for s in ct.static_iter(range(const.Q_SUBTILES)):
        store_share(Partial, State, slot_of(work, s, split, const), chains[s], const)
    arrived = ct.atomic_add(Counters, (work, 0), 1)
    if arrived == const.KV_SPLITS - 1:
        ct.scatter(Counters, (work, 0), 0)
        for s in ct.static_iter(range(const.Q_SUBTILES)):
            epilogue(Out, Lse, work_tile, work_tile.tiles[s], combine(Partial, State, work, s, const), features, const)


def slot_of(work, s, split, const):
    """The slot of scratch memory that holds a share of the `s`-th query tile of a work tile."""
    return (work * const.Q_SUBTILES + s) * const.KV_SPLITS + split


def store_share(Partial, State, slot, chain, const):
    """Store a chain in its slot, which has no edges to cross. Plain stores: the counter's release does not order those of TMA."""
    for part in ct.static_iter(range(2 if const.REST_V else 1)):
        width, column = part_of(part, const.TILE_V, const.REST_V)
        ct.store(
            Partial,
            (slot, 0, column),
            chain.acc[part].astype(ct.float32).reshape((1, const.TILE_M, width)),
            check_bounds=False,
            allow_tma=False,
        )
    store_state(State, slot, chain, const)


def store_state(State, slot, chain, const):
    """Store a chain's row maxima and sums."""
    ct.store(State, (slot, 0, 0), chain.row_max.reshape((1, 1, const.TILE_M)), check_bounds=False, allow_tma=False)
    ct.store(State, (slot, 1, 0), chain.row_sum.reshape((1, 1, const.TILE_M)), check_bounds=False, allow_tma=False)


def combine(Partial, State, work, s, const):
    """The chain over all keys from the shares of the `s`-th query tile of a work tile."""
    place, shares = work * const.Q_SUBTILES + s, (const.KV_SPLITS, 1, const.TILE_M)
    maxima = ct.load(State, (place, 0, 0), shares, check_bounds=False, allow_tma=False)
    sums = ct.load(State, (place, 1, 0), shares, check_bounds=False, allow_tma=False)
    row_max = ct.max(maxima, axis=0)
    row_sum = ct.sum(sums * weight(maxima, row_max), axis=0)
    row_max, row_sum = row_max.reshape((const.TILE_M, 1)), row_sum.reshape((const.TILE_M, 1))
    acc = empty_total(const)
    for group in range(const.KV_SPLITS // together(const)):
        for each in ct.static_iter(range(together(const))):
            slot = slot_of(work, s, group * together(const) + each, const)
            acc = add_share(Partial, State, slot, row_max, acc, const)
    return Chain(acc, row_max, row_sum)


def together(const):
    """Shares in a group, whose loads are under way at the same time: a power of two, like KV_SPLITS."""
    columns = const.TILE_V * (2 if const.REST_V else 1)
    return min(const.KV_SPLITS, max(1, REGISTERS_TOGETHER // (const.TILE_M * columns)))


def weight(row_max, total_max):
    """The weight of a share in the total."""
    return ct.exp2(row_max - total_max, flush_to_zero=True)


def add_share(Partial, State, slot, row_max, acc, const):
    """Each part of the accumulator `acc`, with one share added."""
    own_max = ct.load(State, (slot, 0, 0), (1, 1, const.TILE_M), check_bounds=False, allow_tma=False)
    share_weight = weight(own_max.reshape((const.TILE_M, 1)), row_max)
    total = ()
    for part in ct.static_iter(range(2 if const.REST_V else 1)):
        width, column = part_of(part, const.TILE_V, const.REST_V)
        share = ct.load(Partial, (slot, 0, column), (1, const.TILE_M, width), check_bounds=False, allow_tma=False)
        total = (*total, acc[part] + share.reshape((const.TILE_M, width)) * share_weight)
    return total


def empty_total(const):
    """An empty accumulator in its parts. It sums in float32, whatever the shares were summed in."""
    acc = fresh_chain(const).acc
    return tuple(part.astype(ct.float32) for part in ct.static_iter(acc))


def compute_share(Q, K, V, Shares, State, scale_log2, features, const):
    """Compute the current block's share of a work tile, for a later launch of `combine_shares`.

    Shares `[slots, heads of a tile, rows, TILE_V + REST_V]` and State `[slots, 2, TILE_M]` hold the chains of each share of each
    query tile. Only rows that exist are stored in Shares. A slot's place does not depend on the order of blocks.
    """
    work, split = ct.bid(0) // const.KV_SPLITS, ct.bid(0) % const.KV_SPLITS
    work_tiles, packs = work_tiles_per_head(Q, features, const), pack_count(Q, const)
    place, head, batch = coordinates(work, work_tiles, packs, Q.shape[0], const)
    _, chains = loop_over_keys(Q, K, V, scale_log2, place, head, batch, split, features, const)
    for s in ct.static_iter(range(const.Q_SUBTILES)):
        slot = slot_of((batch * packs + head) * work_tiles + place, s, split, const)
        for part in ct.static_iter(range(2 if const.REST_V else 1)):
            width, column = part_of(part, const.TILE_V, const.REST_V)
            ct.store(
                Shares,
                (slot, 0, 0, column),
                chains[s].acc[part].astype(ct.float32).reshape(block_shape(width, const)),
                allow_tma=False,
            )
        store_state(State, slot, chains[s], const)


@dataclass(frozen=True)
class Combining(Constants):
    """The compile-time constants of `combine_shares`, among them those that `tiles.epilogue` reads. TILE_M are the query rows of
    a block, all of one head; Q_SUBTILES and KV_SPLITS are those of the first launch."""

    TILE_ROWS: int = 0
    """Query rows per head in a query tile of the first launch."""
    TILE_HEADS: int = 0
    """Query heads in a query tile of the first launch."""


def combine_shares(Out, Lse, Shares, State, features, const):
    """Compute TILE_M rows of the outputs from their shares, which lie in one query tile of the first launch."""
    seq_q, heads = Out.shape[2], Out.shape[1]
    chunks = ct.cdiv(seq_q, const.TILE_M)
    chunk = ct.bid(0) % chunks
    head = ct.bid(0) // chunks % heads
    batch = ct.bid(0) // chunks // heads
    tile, row = chunk * const.TILE_M // const.TILE_ROWS, chunk * const.TILE_M % const.TILE_ROWS
    work_tiles = ct.cdiv(seq_q, const.TILE_ROWS * const.Q_SUBTILES)
    pack, member = head // const.TILE_HEADS, head % const.TILE_HEADS
    work = (batch * (heads // const.TILE_HEADS) + pack) * work_tiles + tile // const.Q_SUBTILES
    place = work * const.Q_SUBTILES + tile % const.Q_SUBTILES

    shares, part = (const.KV_SPLITS, 1, const.TILE_M), (member * const.TILE_ROWS + row) // const.TILE_M
    maxima = ct.load(State, (place, 0, part), shares, check_bounds=False, allow_tma=False)
    if const.KV_SPAN:
        chain = added_in_order(Shares, State, maxima, place, (member, row // const.TILE_M, 0), part, const)
    else:
        sums = ct.load(State, (place, 1, part), shares, check_bounds=False, allow_tma=False)
        row_max = ct.max(maxima, axis=0, keepdims=True)
        weights = weight(maxima, row_max)
        row_sum = ct.sum(sums * weights, axis=0)
        acc = ()
        for p in ct.static_iter(range(2 if const.REST_V else 1)):
            width, column = part_of(p, const.TILE_V, const.REST_V)
            found = ct.load(
                Shares,
                (place, member, row // const.TILE_M, column),
                (const.KV_SPLITS, 1, const.TILE_M, width),
                check_bounds=False,
                allow_tma=False,
            ).reshape((const.KV_SPLITS, const.TILE_M, width))
            acc = (*acc, ct.sum(found * weights.reshape((const.KV_SPLITS, const.TILE_M, 1)), axis=0))
        chain = Chain(acc, row_max.reshape((const.TILE_M, 1)), row_sum.reshape((const.TILE_M, 1)))
    epilogue(Out, Lse, WorkTile(batch, head, (chunk,)), chunk, chain, features, const)


def added_in_order(Shares, State, maxima, place, index, part, const):
    """The chain over all keys of rows in one part, from their shares: one by one, in the order of their keys.

    Shares that are empty, behind the others, change no bit, however many they are. A sum over a tile of shares might add them in
    another order where there is room for more.
    """
    row_max = ct.max(maxima, axis=0).reshape((const.TILE_M, 1))
    row_sum = ct.full((const.TILE_M, 1), 0.0, dtype=ct.float32)
    acc = ct.full((const.TILE_M, const.TILE_V), 0.0, dtype=ct.float32)
    state, rows = (1, 1, const.TILE_M), (1, 1, const.TILE_M, const.TILE_V)
    count = min(together(const), MOST_TOGETHER)
    for group in range(const.KV_SPLITS // count):
        for each in ct.static_iter(range(count)):
            slot = place * const.KV_SPLITS + group * count + each
            own_max = ct.load(State, (slot, 0, part), state, check_bounds=False, allow_tma=False)
            own_sum = ct.load(State, (slot, 1, part), state, check_bounds=False, allow_tma=False)
            share = ct.load(Shares, (slot, *index), rows, check_bounds=False, allow_tma=False)
            share_weight = weight(own_max.reshape((const.TILE_M, 1)), row_max)
            row_sum = row_sum + own_sum.reshape((const.TILE_M, 1)) * share_weight
            acc = acc + share.reshape((const.TILE_M, const.TILE_V)) * share_weight
    return Chain((acc,), row_max, row_sum)
