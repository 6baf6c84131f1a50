"""The tile code of attention's gradients, with its schedule left open.

After Dao et al., FlashAttention-2 (arXiv:2307.08691), algorithm 2. With P = exp(scores - log-sum-exp), which is made again from
the queries and keys:

    delta = row sums of dOut * Out        dV = P^T dOut        dP = dOut V^T
    dS = P * (dP - delta)                 dQ = scale * dS K    dK = scale * dS^T Q

A gradient of the log-sum-exp is taken off delta. The launches are:

- `rows.prepare_rows` computes delta.
- `compute_keys`: a block owns a tile of keys and goes over the query rows that see them, with the sums of dK and dV in registers.
  It may add its share of dQ to a float32 array, which `rows.store_queries` scales and rounds.
- `queries.compute_queries` makes dQ where that does not: a block owns a tile of query rows and goes over the keys.
- `rows.sum_groups` and `rows.sum_sinks`, where they are needed.

These functions run on the GPU through cuTile and, unmodified, on the CPU through `tiledsched.interpreter`. Where keys and query
rows are, which of them see each other and in which order blocks run is shared with attention forward.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.attention.features import Features, capped
from tiledsched.kernels.attention.mods import changed_with_slope, lists_of, variant_of, weights_by_mod
from tiledsched.kernels.attention.packed import first_place, own_rows, place_in_sequence
from tiledsched.kernels.attention.scheduler import HEADS_FASTEST, coordinates
from tiledsched.kernels.attention.tiles import Constants, part_of

MOST_LSE = 2.0**20
"""The largest log-sum-exp in powers of two, of either sign, of rows that an author's function changes and that have gradients."""


@dataclass(frozen=True)
class BackwardConstants(Constants):
    """The compile-time constants of `compute_keys` and `compute_queries`. TMA_LOADS is about the loop's loads, and PERSISTENT is
    whether a block takes one work tile after the other."""

    LATENCY_Q: int = 0
    """Latency hint of the loop's loads of queries, or of keys; 0 for none."""
    LATENCY_DO: int = 0
    """Latency hint of the loop's loads of output gradients, or of values; 0 for none."""
    # Only `compute_keys` knows the following.
    TRANSPOSED: bool = False
    """Whether a step's scores are `[TILE_N, TILE_M]`."""
    AHEAD: bool = False
    """Whether the scores of a step are made during the step before."""
    DQ_LATE: bool = False
    """Whether a step adds the share of dQ of the step before."""
    DV_PLACE: int = 0
    """Where a step's product for dV stands: 0 before that for dK, 1 after it, 2 after that for dQ."""
    DQ_TRANSPOSED: bool = False
    """Whether the product for a share of dQ is made as its transpose."""
    DELTA_FIRST: bool = False
    """Whether the sum of dP begins with minus delta, which is else taken off it."""
    TOGETHER: bool = True
    """Whether a block goes over all query heads of a group; else there is a block for each of them."""
    ADDS: bool = False
    """Whether a block adds its share of dQ to an array."""
    MODS: bool = False
    """Whether functions of an author's change or hide scores."""
    BLOCK: int = 0
    """Query rows, and keys, of a block in the lists of blocks that are seen; 0 where there are no lists."""


@dataclass(frozen=True)
class Rows:
    """Arrays of the query rows of one sequence, and which of their heads is at work."""

    Q: Any
    dOut: Any
    LseLog2: Any
    """Log-sum-exps times log2(e); infinite where a row sees nothing."""
    Delta: Any
    """Row sums of dOut * Out."""
    dQSum: Any
    """What shares of dQ are added to, or None."""
    entry: Any
    """First index into the arrays."""
    head: Any
    """Second index into the arrays."""


@dataclass(frozen=True)
class KeyTile:
    """A block's own tile of keys and values, and which query rows see it."""

    k: Any
    """The keys in their parts, `[TILE_N, TILE_D]` and, unless REST_D is 0, `[TILE_N, REST_D]`."""
    v: Any
    """The values in their parts."""
    columns: Any
    """Indices of the keys, `[TILE_N]`."""
    offset: Any
    """The last key that row 0 sees when causal."""
    window: Any
    """The most keys that a row sees."""
    start: Any
    """The first key of the sequence that counts."""
    stop: Any
    """The first key of the sequence that does not count any more."""
    span: Any
    """The `features.Features` of the launch."""
    tiles: Any
    """(begin, first, second, end): the tiles of query rows that see it. Those from `first` to `second` need no mask."""
    variant: Any = None
    """What an author's own functions are given for one query head, as a `mods.Variant`; None where there are none."""
    place: Any = 0
    """Index of the tile among those of a head."""


@dataclass(frozen=True)
class KeySums:
    """The sums of a tile of keys."""

    dk: Any
    """A tuple of `[TILE_N, TILE_D]` and any second part."""
    dv: Any
    """A tuple of `[TILE_N, TILE_V]` and any second part."""


def compute_keys(Q, K, V, dOut, LseLog2, Delta, dQSum, dK, dV, scale_log2, scale, features, const):
    """dK and dV of the work tiles of the current block, and with ADDS its shares of dQ.

    dK and dV have the heads of K, or with TOGETHER false those of Q, whose sums `sum_groups` adds up.
    """
    arrays = (Q, K, V, dOut, LseLog2, Delta, dQSum, dK, dV)
    place_count = key_places(K, features, const)
    if const.PERSISTENT:
        for work in range(ct.bid(0), place_count * dK.shape[1] * dK.shape[0], ct.num_blocks(0)):
            place, head, batch = key_coordinates(work, place_count, dK, const)
            compute_key_tile(arrays, scale_log2, scale, place, head, batch, features, const)
    else:
        place, head, batch = key_coordinates(ct.bid(0), place_count, dK, const)
        compute_key_tile(arrays, scale_log2, scale, place, head, batch, features, const)


def key_coordinates(work, place_count, dK, const):
    """(place, head, batch) of the `work`-th work tile. With a causal mask the first keys, which most rows see, come first."""
    place, head, batch = coordinates(work, place_count, dK.shape[1], dK.shape[0], const)
    if const.BLOCK_ORDER >= HEADS_FASTEST and const.CAUSAL:
        place = place_count - 1 - place
    return place, head, batch


def key_places(K, features, const):
    """Work tiles of a head. For packed sequences, places for work tiles: each sequence has at most one too many, and so have the
    keys behind the last sequence.
    """
    return K.shape[2] // const.TILE_N + features.CuK.shape[0] if const.PACKED else ct.cdiv(K.shape[2], const.TILE_N)


def compute_key_tile(arrays, scale_log2, scale, place, head, batch, features, const):
    """dK and dV of the tile of keys at `place` of a head of dK, which is a query head with TOGETHER false.

    Of packed sequences the place is one of those of all sequences, and may be empty.
    """
    if const.PACKED:
        Q, K, V, dOut, LseLog2, Delta, dQSum, dK, dV = arrays
        # Places are counted by keys here, and by query rows in forward.
        counted = Features(None, None, None, 0, 0, 0, features.CuK)
        behind = place - first_place(features.CuK.shape[0] - 1, const.TILE_N, counted)
        if behind >= 0:
            store_zeros(dK, features.CuK, behind, head, const.TILE_N, const.TILE_D, const.REST_D)
            store_zeros(dV, features.CuK, behind, head, const.TILE_N, const.TILE_V, const.REST_V)
        else:
            place, sequence = place_in_sequence(place, const.TILE_N, counted)
            keys = tuple(own_rows(each, features.CuK, sequence) for each in ct.static_iter((K, V, dK, dV)))
            rows = tuple(own_rows(each, features.CuQ, sequence) for each in ct.static_iter((Q, dOut, LseLog2, Delta)))
            if const.ADDS:
                dQSum = own_rows(dQSum, features.CuQ, sequence)
            if place * const.TILE_N < keys[0].shape[2]:
                own = (rows[0], keys[0], keys[1], rows[1], rows[2], rows[3], dQSum, keys[2], keys[3])
                store_key_sums(own, scale_log2, scale, place, head, batch, features, const)
    else:
        store_key_sums(arrays, scale_log2, scale, place, head, batch, features, const)


def store_zeros(array, offsets, place, head, ROWS, TILE, REST):
    """Zeros in the tile at `place` among the rows behind the last packed sequence, if there is one."""
    rows = array.shape[2]
    begin = min(max(ct.gather(offsets, (offsets.shape[0] - 1,), check_bounds=False), 0), rows)
    if begin + place * ROWS < rows:
        behind = array.slice(axis=2, start=begin, stop=rows)
        for part in ct.static_iter(range(2 if REST else 1)):
            width, column = part_of(part, TILE, REST)
            ct.store(behind, (0, head, place, column), ct.zeros((1, 1, ROWS, width), array.dtype))


def store_key_sums(arrays, scale_log2, scale, place, head, batch, features, const):
    """dK and dV of the tile of keys at `place` of a head, and the share of dQ added."""
    Q, K, V, dOut, LseLog2, Delta, dQSum, dK, dV = arrays
    kv_head = head if const.TOGETHER else head // const.GROUP
    tile = load_key_tile(K, V, Q.shape[2], place, kv_head, batch, features, const)
    sums = KeySums(
        zero_parts(const.TILE_N, const.TILE_D, const.REST_D), zero_parts(const.TILE_N, const.TILE_V, const.REST_V)
    )
    if const.TOGETHER and const.GROUP > 1:
        for member in range(const.GROUP):
            rows = Rows(Q, dOut, LseLog2, Delta, dQSum, batch, head * const.GROUP + member)
            sums = over_queries(rows, tile, sums, scale_log2, const)
    else:
        rows = Rows(Q, dOut, LseLog2, Delta, dQSum, batch, head)
        sums = over_queries(rows, tile, sums, scale_log2, const)
    scaled = tuple(part * scale for part in ct.static_iter(sums.dk))
    store_parts(dK, (batch, head, place), scaled, const.TILE_N, const.TILE_D, const.REST_D)
    store_parts(dV, (batch, head, place), sums.dv, const.TILE_N, const.TILE_V, const.REST_V)


def zero_parts(ROWS, TILE, REST):
    """Sums of a tile of rows in their parts, before the first is added."""
    parts = (ct.zeros((ROWS, TILE), ct.float32),)
    if REST:
        parts = (*parts, ct.zeros((ROWS, REST), ct.float32))
    return parts


def store_parts(array, index, parts, ROWS, TILE, REST):
    """Store a tile of rows, whose parts are given."""
    for part in ct.static_iter(range(len(parts))):
        width, column = part_of(part, TILE, REST)
        ct.store(array, (*index, column), parts[part].astype(array.dtype).reshape((1, 1, ROWS, width)))


def load_key_tile(K, V, seq_q, place, kv_head, batch, features, const):
    """The tile of keys at `place` of a head. Keys that do not count are 0 there: their slots may hold anything."""
    offset = K.shape[2] - seq_q if const.BOTTOM_RIGHT else 0
    window = features.window
    if const.WINDOW_RIGHT:
        offset = offset + features.window_right
        window = window + features.window_right
    start, stop = 0, K.shape[2]
    if const.STARTS:
        start = min(max(ct.gather(features.Starts, (batch,), check_bounds=False), 0), stop)
    if const.LENGTHS:
        stop = min(max(ct.gather(features.Lengths, (batch,), check_bounds=False), start), stop)
    columns = place * const.TILE_N + ct.arange(const.TILE_N, dtype=ct.int32)
    index = (batch, kv_head, place)
    k = load_parts(K, index, const.TILE_N, const.TILE_D, const.REST_D, 0, True)
    v = load_parts(V, index, const.TILE_N, const.TILE_V, const.REST_V, 0, True)
    if const.STARTS or const.LENGTHS:
        used = ((columns >= start) & (columns < stop))[:, None]
        k = tuple(ct.where(used, part, ct.zeros(part.shape, part.dtype)) for part in ct.static_iter(k))
        v = tuple(ct.where(used, part, ct.zeros(part.shape, part.dtype)) for part in ct.static_iter(v))
    tiles = query_tiles(place * const.TILE_N, offset, window, start, stop, seq_q, const)
    return KeyTile(k, v, columns, offset, window, start, stop, features, tiles, None, place)


def load_parts(array, index, ROWS, TILE, REST, LATENCY, MAY_USE_TMA):
    """A tile of rows in its parts: `[ROWS, TILE]` and, unless REST is 0, `[ROWS, REST]`."""
    parts = ()
    for part in ct.static_iter(range(2 if REST else 1)):
        width, column = part_of(part, TILE, REST)
        found = ct.load(
            array,
            (*index, column),
            (1, 1, ROWS, width),
            padding_mode=ct.PaddingMode.ZERO,
            latency=None if LATENCY == 0 else LATENCY,
            allow_tma=None if MAY_USE_TMA else False,
        )
        parts = (*parts, found.reshape((ROWS, width)))
    return parts


def query_tiles(first_key, offset, window, start, stop, seq_q, const):
    """(begin, first, second, end): the tiles of query rows that see a key of the tile that begins at `first_key`. In those from
    `first` to `second` every row sees every key of it.
    """
    count = ct.cdiv(seq_q, const.TILE_M)
    begin, first, second, end = 0, 0, count, count
    if const.CAUSAL:
        begin = min(max(first_key - offset, 0) // const.TILE_M, count)
        first = min(ct.cdiv(max(first_key + (const.TILE_N - 1) - offset, 0), const.TILE_M), count)
        first = max(first, begin)
    if const.WINDOW:
        end = min(ct.cdiv(max(first_key + (const.TILE_N - 1) - offset + window, 0), const.TILE_M), count)
        end = max(end, begin)
        first = min(first, end)
        second = min(max(first_key - offset + window, 0) // const.TILE_M, end)
        second = max(second, first)
    if not const.EVEN:
        if (first_key < start) | (first_key + const.TILE_N > stop):  # some keys do not count
            first, second = end, end
        if (first_key + const.TILE_N <= start) | (first_key >= stop):  # none does
            first, second, end = begin, begin, begin
    return begin, first, second, end


def over_queries(rows, tile, sums, scale_log2, const):
    """The sums after all query rows of one head, in one loop over their tiles, or in several of which one needs no masks."""
    begin, first, second, end = tile.tiles
    if const.MODS:
        tile = replace(tile, variant=variant_of(0, rows.head, rows.entry, tile.offset, tile.span, const))
    if const.BLOCK:
        Spans, tiles = tile.span.Blocks, const.BLOCK // const.TILE_M
        at = (*lists_of(rows.head, rows.entry, Spans), tile.place * const.TILE_N // const.BLOCK)
        end = min(end, ct.gather(Spans, (*at, 1), check_bounds=False) * tiles)
        begin = min(max(begin, ct.gather(Spans, (*at, 0), check_bounds=False) * tiles), end)
        first = min(max(first, begin), end)
    carried = ()
    if const.AHEAD:
        carried = score(rows, tile, min(begin, ct.cdiv(rows.Q.shape[2], const.TILE_M) - 1), const)
    elif const.DQ_LATE:
        carried = ct.zeros(score_shape(const), rows.Q.dtype), begin
    loops = ((begin, end, True),)
    if const.LOOP_SPLIT and const.WINDOW:
        loops = ((begin, first, True), (first, second, False), (second, end, True))
    elif const.LOOP_SPLIT:
        loops = ((begin, first, True), (first, end, False))
    for start, stop, masked in ct.static_iter(loops):
        for i in range(start, stop):
            sums, carried = query_step(rows, tile, i, sums, carried, masked, scale_log2, const)
    if const.DQ_LATE and begin < end:
        add_queries(rows, tile, carried[1], carried[0], const)
    return sums


def score(rows, tile, i, const):
    """Products of the block's keys with the `i`-th tile of queries: `[TILE_N, TILE_M]` if TRANSPOSED, else `[TILE_M, TILE_N]`."""
    q = load_queries(rows.Q, rows, i, const.TILE_D, const.REST_D, const.LATENCY_Q, const)
    return across(tile.k, q, ct.zeros(score_shape(const), ct.float32), const)


def score_shape(const):
    """Shape of the scores of a step."""
    return (const.TILE_N, const.TILE_M) if const.TRANSPOSED else (const.TILE_M, const.TILE_N)


def load_queries(array, rows, i, TILE, REST, LATENCY, const):
    """The `i`-th tile of query rows of an array in its parts."""
    return load_parts(array, (rows.entry, rows.head, i), const.TILE_M, TILE, REST, LATENCY, const.TMA_LOADS)


def across(of_keys, of_rows, product, const):
    """`product` plus the products of every key with every row, summed over the parts of their columns."""
    for part in ct.static_iter(range(len(of_keys))):
        if const.TRANSPOSED:
            product = ct.mma(of_keys[part], ct.transpose(of_rows[part]), product)
        else:
            product = ct.mma(of_rows[part], ct.transpose(of_keys[part]), product)
    return product


def query_step(rows, tile, i, sums, carried, MASKED, scale_log2, const):
    """(sums, carried) after the `i`-th tile of query rows.

    A step hands on the scores of the next tile if AHEAD; if DQ_LATE the gradients of its own scores, whose share of dQ is still
    to be added, and its tile; and else nothing. The compiler (13.5 on sm_90) begins the products in the order in which they stand
    here.
    """
    handed_on = ()
    if const.DQ_LATE:
        add_queries(rows, tile, carried[1], carried[0], const)
    if const.AHEAD:
        handed_on = score(rows, tile, min(i + 1, ct.cdiv(rows.Q.shape[2], const.TILE_M) - 1), const)
    q = load_queries(rows.Q, rows, i, const.TILE_D, const.REST_D, const.LATENCY_Q, const)
    scores = carried if const.AHEAD else across(tile.k, q, ct.zeros(score_shape(const), ct.float32), const)
    gradient = load_queries(rows.dOut, rows, i, const.TILE_V, const.REST_V, const.LATENCY_DO, const)
    logits, slope, factors = capped(scores, tile, const), None, None
    if const.MODS:
        columns, last = places(tile, i, const)
        logits, slope = changed_with_slope(scores, columns, last, last < rows.Q.shape[2] + tile.offset, tile)
        factors = weights_by_mod(columns, last, tile.variant)
    powers, lse = logits * scale_log2, row_values(rows.LseLog2, rows, i, const)
    if slope is not None:
        lse = with_bits(lse)
    p = ct.exp2(powers - lse, flush_to_zero=True)
    p = masked(p, tile, i, MASKED, const)
    delta = row_values(rows.Delta, rows, i, const)
    if factors is not None:
        dp = across(tile.v, gradient, ct.zeros(score_shape(const), ct.float32), const) * factors - delta
    elif const.DELTA_FIRST:  # less is left to do once the product is there
        dp = across(tile.v, gradient, ct.broadcast_to(-delta, score_shape(const)), const)
    else:
        dp = across(tile.v, gradient, ct.zeros(score_shape(const), ct.float32), const) - delta
    dk, dv = sums.dk, sums.dv
    weights = (p if factors is None else p * factors).astype(gradient[0].dtype)
    if const.DV_PLACE == 0:
        dv = add_parts(dv, weights, gradient, const)
    ds = score_gradients(p, dp, slope, logits, const).astype(q[0].dtype)
    dk = add_parts(dk, ds, q, const)
    if const.DV_PLACE == 1:
        dv = add_parts(dv, weights, gradient, const)
    if const.DQ_LATE:
        handed_on = ds, i
    elif const.ADDS:
        add_queries(rows, tile, i, ds, const)
    if const.DV_PLACE == 2:
        dv = add_parts(dv, weights, gradient, const)
    return KeySums(dk, dv), handed_on


def score_gradients(p, dp, slope, logits, const):
    """The gradients of scores, from probabilities and from the gradients of these less their row's mean; `slope` is that of an
    author's function, None where there is none, and with SOFTCAP `logits` are hyperbolic tangents."""
    ds = p * dp
    if slope is not None:
        ds = ct.where(p == 0.0, 0.0, ds * slope)
    if const.SOFTCAP:
        ds = ds * (1.0 - logits * logits)
    return ds


def row_values(array, rows, i, const):
    """One number for each row of the `i`-th tile, beside the scores."""
    # Without the TMA unit these few numbers halve the rate of the whole launch (13.5 on an H200).
    found = ct.load(array, (rows.entry, rows.head, i), (1, 1, const.TILE_M), padding_mode=ct.PaddingMode.ZERO)
    return found.reshape((1, const.TILE_M) if const.TRANSPOSED else (const.TILE_M, 1))


def with_bits(lse):
    """The log-sum-exp of rows, and infinity, which makes all probabilities 0, where float32 has no bits left for what scores are
    above or below it: as where a mask adds -1e9 to all scores of a row."""
    return ct.where(ct.abs(lse) < MOST_LSE, lse, math.inf)


def masked(p, tile, i, MASKED, const):
    """The probabilities, and 0 where a row does not see a key. (Of a key that no row of a sequence sees they may be infinite.)"""
    if MASKED and (const.CAUSAL or not const.EVEN):
        columns, last = places(tile, i, const)
        if const.CAUSAL:
            visible = columns <= last
            if const.WINDOW:
                visible = visible & (columns > last - tile.window)
            if not const.EVEN:
                visible = visible & (columns < tile.stop)
        else:
            visible = columns < tile.stop
        if const.STARTS:
            visible = visible & (columns >= tile.start)
        p = ct.where(visible, p, 0.0)
    return p


def places(tile, i, const):
    """(numbers of the keys, the last key that each row of the `i`-th tile sees when causal), beside the scores."""
    columns = tile.columns[:, None] if const.TRANSPOSED else tile.columns[None, :]
    last = i * const.TILE_M + ct.arange(const.TILE_M, dtype=ct.int32) + tile.offset
    last = last[None, :] if const.TRANSPOSED else last[:, None]
    return columns, last


def add_parts(total, weights, of_rows, const):
    """Each part of `total`, with the rows of `of_rows` added with their weights for each key."""
    parts = ()
    for part in ct.static_iter(range(len(total))):
        by_key = weights if const.TRANSPOSED else ct.transpose(weights)
        parts = (*parts, ct.mma(by_key, of_rows[part], total[part]))
    return parts


def add_queries(rows, tile, i, ds, const):
    """Add the block's share of dQ to the sums of the `i`-th tile of query rows."""
    for part in ct.static_iter(range(len(tile.k))):
        width, column = part_of(part, const.TILE_D, const.REST_D)
        if const.DQ_TRANSPOSED:  # keys and dS change sides, and so may the registers and shared memory that hold them
            by_key = ds if const.TRANSPOSED else ct.transpose(ds)
            share = ct.transpose(
                ct.mma(ct.transpose(tile.k[part]), by_key, ct.zeros((width, const.TILE_M), ct.float32))
            )
        else:
            by_row = ct.transpose(ds) if const.TRANSPOSED else ds
            share = ct.mma(by_row, tile.k[part], ct.zeros((const.TILE_M, width), ct.float32))
        view = rows.dQSum.tiled_view((1, 1, const.TILE_M, width))
        view.atomic_store_add((rows.entry, rows.head, i, column), share.reshape((1, 1, const.TILE_M, width)))
