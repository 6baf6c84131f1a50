"""The tile code of the attention kernel: flash-attention forward in cuTile, with its schedule left open.

Online softmax in base 2 after Dao et al., FlashAttention-2 (arXiv:2307.08691), algorithm 1: each block owns rows of
queries and walks over the keys in steps, keeping a running row maximum, row sum and output accumulator. The scale is
applied after the row maximum is taken, which is right for positive scales and saves a pass over the tile.

These functions run on the GPU through cuTile and, unmodified, on the CPU through `tiledsched.interpreter`. They share
one object of compile-time constants, and cuTile inlines them all: an `if` on a constant leaves no trace in the machine
code. From the outside in: `deal_out` gives the blocks their work, `visit` does one piece of it and `finish` stores it;
`walk` goes over the piece's keys, in turns of one `step` or more: `products` makes the scores, `fold` their softmax and
the product with the values. The kernels themselves are in :mod:`tiledsched.kernels.attention.entries`.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

# Indices into BLOCK_ORDERS, PERSISTENT_MODES and KV_DIRECTIONS of the declaration.
NATURAL, REVERSED, HEADS_FASTEST, SWIZZLED = range(4)
ONE_EACH, STRIDED, SNAKE = range(3)
FORWARD, BACKWARD, SAWTOOTH, WIDE_SAWTOOTH = range(4)

LN_2 = math.log(2.0)
SWIZZLE_PAIRS = 8
"""(batch, head) pairs that a swizzled order takes together: as many as have their keys and values in the L2 cache."""
TOOTH = 4
"""Neighbouring query tiles that a wide sawtooth walks in the same direction."""
RESCALE_ABOVE = 8.0
"""Growth of a row's maximum, in powers of two, up to which a lazy rescaling lets the old maximum stand."""
LOWEST = -3.4e38
"""A running maximum below every score and yet finite, so that a step without visible keys does not make NaN."""


@dataclass(frozen=True)
class Constants:
    """What is known when the kernel is compiled, in the order of the kernel's last parameters."""

    TILE_M: int
    """Query rows of a tile."""
    TILE_N: int
    """Keys of a tile."""
    TILE_D: int
    """Columns of a tile of queries or keys: the head dimension rounded up to a power of two, or its first part."""
    GROUP: int
    """Query heads per key/value head."""
    CAUSAL: bool
    """Whether a row sees no keys beyond its own."""
    EVEN: bool
    """Whether the keys of a step divide the number of keys."""
    FP16_ACCUM: bool
    """Whether both products accumulate in float16."""
    LATENCY_K: int
    """Latency hint of the key loads; 0 for none."""
    LATENCY_V: int
    """Latency hint of the value loads; 0 for none."""
    LOOP_SPLIT: bool
    """Whether the unmasked steps have a loop of their own."""
    BLOCK_ORDER: int
    """Index into BLOCK_ORDERS."""
    PERSISTENT: int
    """Index into PERSISTENT_MODES."""
    KV_DIRECTION: int
    """Index into KV_DIRECTIONS."""
    Q_SUBTILES: int
    """Query tiles of a block."""
    KV_SUBTILES: int
    """Key tiles of a step."""
    QK_AHEAD: bool
    """Whether the scores of a step are made during the step before."""
    PERMUTE_K: bool
    """Whether keys are loaded row by row and transposed afterwards."""
    TMA_LOADS: bool
    """Whether loads of keys and values may use the TMA unit."""
    TMA_STORE: bool
    """Whether the store of the output may."""
    CHECK_BOUNDS: bool
    """False where no tile crosses the edge of its array."""
    IEEE_DIVISION: bool
    """Whether the last division is rounded correctly."""
    LAZY_RESCALE: bool
    """Whether small growth of the row maximum leaves the accumulator as it is."""
    BOTTOM_RIGHT: bool
    """Whether the last query's own key is the last one; else the first query's is the first."""
    REST_D: int
    """Columns of the second part of queries and keys; 0 where there is one part."""
    TILE_V: int
    """As TILE_D, of the values and the output."""
    REST_V: int
    """As REST_D, of the values and the output."""
    PACK: int
    """Query heads whose rows share a tile: 1, or all GROUP of a key/value head."""
    KV_SPLITS: int
    """Blocks that share the keys of one piece of work."""
    FLAT_STEPS: int
    """Steps per turn of one flat loop over all pieces of a block; 0 for a loop of its own for each piece."""
    RELOAD_Q: bool
    """Whether a flat loop loads the queries again at each turn."""
    Q_AHEAD: bool
    """Whether a flat loop loads the queries of each piece while it works on the piece before."""
    STORE_LATE: bool
    """Whether a persistent block stores the output of a piece after the loads of the next one have begun."""
    Q_IN_REGISTERS: bool
    """Whether a nested loop's queries are held in registers, so that their shared memory is free for the next ones."""
    UNROLL: int
    """Steps in one turn of the loop over a piece's keys; each has shared memory of its own for them."""
    PEEL_FIRST: bool
    """Whether the compiler sees that a block which stores late has nothing to store in its first lap."""


@dataclass(frozen=True)
class Keys:
    """The keys and values of one piece of work, and how they are visited."""

    K: Any
    """All keys."""
    V: Any
    """All values."""
    batch: Any
    """First index into both."""
    kv_head: Any
    """Second index into both."""
    steps: Any
    """Steps of the walk over all keys that are seen."""
    begin: Any
    """First of them that this block takes."""
    end: Any
    """First that it does not take any more."""
    odd: Any
    """1 where a sawtooth walk goes backward, else 0."""


@dataclass(frozen=True)
class Chain:
    """The running softmax of one query tile. Loops carry it in this order; another order makes other machine code."""

    acc: Any
    """Sum of 2**(scaled score - row_max) times the key's row of V: a tuple of `[TILE_M, TILE_V]` and any second part."""
    row_max: Any
    """Largest scaled score so far, `[TILE_M, 1]`; with LAZY_RESCALE, that of the last rescaling."""
    row_sum: Any
    """Sum of 2**(scaled score - row_max), `[TILE_M, 1]`."""


@dataclass(frozen=True)
class Piece:
    """One piece of work: Q_SUBTILES query tiles of one head, or of the PACK heads that share their keys."""

    batch: Any
    """First index into all arrays."""
    head: Any
    """Second index into Q and the outputs, in units of PACK heads."""
    tiles: Any
    """Indices of the query tiles."""


def deal_out(Q, K, V, Out, Lse, scale_log2, const):
    """All of the current block's work. A block takes one piece, or, when PERSISTENT, one of every `num_blocks`; a snake
    turns round after each lap over the blocks. `Lse` may be None.
    """  # fmt: skip
    pieces = pieces_per_head(Q, const)
    if const.STORE_LATE:
        relay(Q, K, V, Out, Lse, scale_log2, const)
    elif const.PERSISTENT == STRIDED:
        for work in range(ct.bid(0), pieces * pack_count(Q, const) * Q.shape[0], ct.num_blocks(0)):
            attend(Q, K, V, Out, Lse, scale_log2, work, pieces, const)
    elif const.PERSISTENT == SNAKE:
        total, blocks = pieces * pack_count(Q, const) * Q.shape[0], ct.num_blocks(0)
        for lap in range(ct.cdiv(total - snake(ct.bid(0), blocks, total // blocks), blocks)):
            attend(Q, K, V, Out, Lse, scale_log2, lap * blocks + snake(ct.bid(0), blocks, lap), pieces, const)
    else:
        attend(Q, K, V, Out, Lse, scale_log2, ct.bid(0), pieces, const)


def relay(Q, K, V, Out, Lse, scale_log2, const):
    """All work of a persistent block; the output of a piece is stored at the beginning of the next one.

    The compiler gives loads warps of their own, and lets them go on to the next piece when this one ends: to its queries,
    and to its keys after them. They should not wait for the output to be stored. A first lap that the compiler can tell from
    the others gets code of its own, and the loads of the second lap wait for its end.
    """
    pieces, blocks = pieces_per_head(Q, const), ct.num_blocks(0)
    total = pieces * pack_count(Q, const) * Q.shape[0]
    first = snake(ct.bid(0), blocks, total // blocks) if const.PERSISTENT == SNAKE else ct.bid(0)
    piece = Piece(0, 0, tuple(0 for _ in ct.static_iter(range(const.Q_SUBTILES))))
    chains = tuple(fresh_chain(const) for _ in ct.static_iter(range(const.Q_SUBTILES)))
    for lap in range(ct.cdiv(total - first, blocks)):
        place = snake(ct.bid(0), blocks, lap) if const.PERSISTENT == SNAKE else ct.bid(0)
        work = lap * blocks + place
        # The same, twice: the compiler knows the first lap by the lap's number, and not by that of the work.
        later = lap > 0 if const.PEEL_FIRST else work >= blocks
        if later:
            finish_all(Out, Lse, piece, chains, const)
        piece, chains = visit(Q, K, V, scale_log2, work, pieces, 0, const)
    finish_all(Out, Lse, piece, chains, const)


def snake(block, blocks, lap):
    """Place of `block` in a lap over all blocks: even laps go up, odd ones down."""
    return block + lap % 2 * (blocks - 1 - 2 * block)


def pieces_per_head(Q, const):
    """Pieces of work that a head, or a pack of heads, comes to."""
    return ct.cdiv(Q.shape[2], const.TILE_M // const.PACK * const.Q_SUBTILES)


def pack_count(Q, const):
    """Query heads, in units of PACK."""
    return Q.shape[1] if const.PACK == 1 else Q.shape[1] // const.PACK


def attend(Q, K, V, Out, Lse, scale_log2, work, pieces, const):
    """One piece of work, start to finish."""
    piece, chains = visit(Q, K, V, scale_log2, work, pieces, 0, const)
    finish_all(Out, Lse, piece, chains, const)


def finish_all(Out, Lse, piece, chains, const):
    """Store the output of a piece of work."""
    for s in ct.static_iter(range(const.Q_SUBTILES)):
        finish(Out, Lse, piece, piece.tiles[s], chains[s], const)


def visit(Q, K, V, scale_log2, work, pieces, split, const):
    """The `work`-th piece of work, and its chains after the `split`-th of KV_SPLITS shares of its keys."""
    place, head, batch = coordinates(work, pieces, pack_count(Q, const), Q.shape[0], const)
    kv_head = head // const.GROUP if const.PACK == 1 else head
    seq_q, seq_k = Q.shape[2], K.shape[2]
    offset = seq_k - seq_q if const.BOTTOM_RIGHT else 0
    tiles = tuple(query_tile(place, s, seq_q, const) for s in ct.static_iter(range(const.Q_SUBTILES)))
    rows = tuple(rows_of(tile, offset, const) for tile in ct.static_iter(tiles))
    queries = tuple(load_queries(Q, (batch, head, tile), const) for tile in ct.static_iter(tiles))
    queries = tuple(held(q, scale_log2, const) for q in ct.static_iter(queries))
    chains = tuple(fresh_chain(const) for _ in ct.static_iter(range(const.Q_SUBTILES)))

    first_masked, steps = steps_of(place, offset, seq_k, const)
    if const.UNROLL > 1:  # whole turns; what is too much is masked
        first_masked = first_masked // const.UNROLL * const.UNROLL
        steps = ct.cdiv(steps, const.UNROLL) * const.UNROLL
    begin, end = 0, steps
    if const.KV_SPLITS > 1:
        begin, end = steps * split // const.KV_SPLITS, steps * (split + 1) // const.KV_SPLITS
    odd = place // TOOTH % 2 if const.KV_DIRECTION == WIDE_SAWTOOTH else place % 2
    keys = Keys(K, V, batch, kv_head, steps, begin, end, odd)
    chains = walk(queries, rows, keys, chains, first_masked, scale_log2, const)
    return Piece(batch, head, tiles), chains


def steps_of(place, offset, seq_k, const):
    """(first_masked, steps) of a piece: steps before the one lie wholly inside the mask, those from the other on outside."""
    block_rows, step_n = const.TILE_M // const.PACK * const.Q_SUBTILES, const.TILE_N * const.KV_SUBTILES
    if const.CAUSAL and const.BOTTOM_RIGHT:
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


def finish(Out, Lse, piece, tile, chain, const):
    """Divide a chain by its sum and store it; with `Lse`, its log-sum-exp, too."""
    row_sum = chain.row_sum
    if const.BOTTOM_RIGHT:  # rows that see no key: 0 / 1 is what is asked for, 0 / 0 is not
        row_sum = ct.where(row_sum > 0.0, row_sum, 1.0)
    for part in ct.static_iter(range(2 if const.REST_V else 1)):
        acc = chain.acc[part].astype(ct.float32)
        if const.IEEE_DIVISION:
            out = ct.truediv(acc, row_sum)
        else:
            out = ct.truediv(acc, row_sum, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
        width, column = part_of(part, const.TILE_V, const.REST_V)
        ct.store(Out, (piece.batch, piece.head, tile, column), out.astype(Out.dtype).reshape(block_shape(width, const)),
                 check_bounds=const.CHECK_BOUNDS, allow_tma=None if const.TMA_STORE else False)  # fmt: skip
    if Lse is not None:
        lse = (chain.row_max + ct.log2(chain.row_sum)) * LN_2
        ct.store(Lse, (piece.batch, piece.head, tile, 0), lse.reshape(block_shape(1, const)),
                 check_bounds=const.CHECK_BOUNDS, allow_tma=False)  # fmt: skip


def part_of(PART, TILE, REST):
    """(width, index in units of the width) of one of the two parts of a row's columns."""
    return (TILE, 0) if PART == 0 else (REST, TILE // REST)


def block_shape(WIDTH, const):
    """Shape of a tile of queries or outputs as it lies in its array."""
    return (1, const.PACK, const.TILE_M // const.PACK, WIDTH)


def coordinates(work, pieces, heads, batches, const):
    """(piece of the head's queries, head, batch) of the `work`-th piece of work."""
    pairs = heads * batches
    if const.BLOCK_ORDER == HEADS_FASTEST:  # one piece of every head, then the next; the longest rows first
        batch_head = work % pairs
        piece = work // pairs
    elif const.BLOCK_ORDER == SWIZZLED:  # the same among a few heads, whose keys stay in the L2 cache
        first = work // (SWIZZLE_PAIRS * pieces) * SWIZZLE_PAIRS
        width = min(SWIZZLE_PAIRS, pairs - first)
        batch_head = first + work % (SWIZZLE_PAIRS * pieces) % width
        piece = work % (SWIZZLE_PAIRS * pieces) // width
    else:
        batch_head = work // pieces
        piece = work % pieces
    if const.BLOCK_ORDER == REVERSED or (const.BLOCK_ORDER >= HEADS_FASTEST and const.CAUSAL):
        piece = pieces - 1 - piece
    return piece, batch_head % heads, batch_head // heads


def query_tile(place, s, seq_q, const):
    """Index of the `s`-th query tile of a piece. One beyond the end becomes the last tile, which is done twice."""
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
    return last + offset if const.BOTTOM_RIGHT else last


def load(array, index, BLOCK, ORDER, LATENCY, MAY_USE_TMA, const):
    """The tile of shape `BLOCK` at `index`, with zeros beyond the edge of the array."""
    # Without bounds there is no edge, and cuTile refuses a padding mode.
    padding = ct.PaddingMode.ZERO if const.CHECK_BOUNDS else ct.PaddingMode.UNDETERMINED
    return ct.load(array, index, BLOCK, order=ORDER, padding_mode=padding, check_bounds=const.CHECK_BOUNDS,
                   latency=None if LATENCY == 0 else LATENCY, allow_tma=None if MAY_USE_TMA else False)  # fmt: skip


def load_queries(Q, place, const):
    """A query tile in its parts, `[TILE_M, TILE_D]` and `[TILE_M, REST_D]`."""
    parts = ()
    for part in ct.static_iter(range(2 if const.REST_D else 1)):
        width, column = part_of(part, const.TILE_D, const.REST_D)
        q = load(Q, (place[0], place[1], place[2], column), block_shape(width, const), "C", 0, True, const)
        parts = (*parts, q.reshape((const.TILE_M, width)))
    return parts


def held(parts, scale_log2, const):
    """A query tile as the products take it. With Q_IN_REGISTERS it is computed, and what is computed lies in registers."""
    if const.Q_IN_REGISTERS:
        one = ct.where(scale_log2 > 0.0, 1.0, 2.0)  # it always is, but the compiler does not know
        parts = tuple(part * one.astype(part.dtype) for part in ct.static_iter(parts))
    return parts


def fresh_chain(const):
    """A running softmax over nothing."""
    start = LOWEST if may_see_nothing(const) else -math.inf
    row_max = ct.full((const.TILE_M, 1), start, dtype=ct.float32)
    row_sum = ct.full((const.TILE_M, 1), 0.0, dtype=ct.float32)
    acc = ()
    for part in ct.static_iter(range(2 if const.REST_V else 1)):
        width = part_of(part, const.TILE_V, const.REST_V)[0]
        acc = (*acc, ct.full((const.TILE_M, width), 0.0, dtype=ct.float16 if const.FP16_ACCUM else ct.float32))
    return Chain(acc, row_max, row_sum)


def may_see_nothing(const):
    """Whether a row may see no key in the first step of a walk, or no step may be taken."""
    return const.KV_DIRECTION != FORWARD or const.BOTTOM_RIGHT or const.KV_SPLITS > 1


def walk(queries, rows, keys, chains, first_masked, scale_log2, const):
    """Fold the block's keys into the chains, in one loop or in two, of which one goes without masks."""
    begin, end = keys.begin, keys.end
    scores = ()
    if const.QK_AHEAD:  # the last step has no next one: it stands behind the loops
        end = end - 1
        scores = products(queries, keys, begin, const)
    if const.LOOP_SPLIT:
        backward = const.KV_DIRECTION == BACKWARD
        boundary = keys.steps - first_masked if backward else first_masked
        if const.KV_SPLITS > 1:
            boundary = max(boundary, begin)
        if const.QK_AHEAD or const.KV_SPLITS > 1:
            boundary = min(boundary, end)
        for i in range(begin, boundary, const.UNROLL):
            chains, scores = turn(queries, rows, keys, i, chains, scores, backward, scale_log2, const)
        for i in range(boundary, end, const.UNROLL):
            chains, scores = turn(queries, rows, keys, i, chains, scores, not backward, scale_log2, const)
    else:
        for i in range(begin, end, const.UNROLL):
            chains, scores = turn(queries, rows, keys, i, chains, scores, True, scale_log2, const)
    if const.QK_AHEAD:
        chains = fold(rows, keys, end, chains, scores, True, scale_log2, const)
    return chains


def turn(queries, rows, keys, i, chains, scores, MASKED, scale_log2, const):
    """One turn of the loop: the UNROLL steps from the `i`-th on."""
    for u in ct.static_iter(range(const.UNROLL)):
        chains, scores = step(queries, rows, keys, i + u, chains, scores, MASKED, scale_log2, const)
    return chains, scores


def step(queries, rows, keys, i, chains, scores, MASKED, scale_log2, const):
    """The `i`-th step: the chains after it and, with QK_AHEAD, the scores of the next one."""
    if const.QK_AHEAD:
        ahead = products(queries, keys, i + 1, const)
    else:
        ahead = ()
        scores = products(queries, keys, i, const)
    return fold(rows, keys, i, chains, scores, MASKED, scale_log2, const), ahead


def key_tile(keys, i, t, const):
    """Index of the `t`-th key tile of the `i`-th step. It may lie beyond the last one, where all is masked."""
    if const.KV_DIRECTION == BACKWARD:
        i = keys.steps - 1 - i
    elif const.KV_DIRECTION >= SAWTOOTH:
        i = i + keys.odd * (keys.steps - 1 - 2 * i)
    return i if const.KV_SUBTILES == 1 else i * const.KV_SUBTILES + t


def existing_tile(keys, i, t, const):
    """The same, or the last tile instead of one beyond it."""
    j = key_tile(keys, i, t, const)
    if const.EVEN or (const.KV_SUBTILES == 1 and const.FLAT_STEPS < 2 and const.UNROLL == 1):
        return j
    return min(j, ct.cdiv(keys.K.shape[2], const.TILE_N) - 1)


def products(queries, keys, i, const):
    """Scores of the `i`-th step, unscaled and unmasked: one tuple for each query tile, of one tile for each key tile."""
    tiles = tuple(load_keys(keys, i, t, const) for t in ct.static_iter(range(const.KV_SUBTILES)))
    return tuple(tuple(score(q, k, const) for k in ct.static_iter(tiles)) for q in ct.static_iter(queries))


def load_keys(keys, i, t, const):
    """The `t`-th key tile of the `i`-th step in its parts, `[TILE_D, TILE_N]` and `[REST_D, TILE_N]`."""
    j = existing_tile(keys, i, t, const)
    parts = ()
    for part in ct.static_iter(range(2 if const.REST_D else 1)):
        width, column = part_of(part, const.TILE_D, const.REST_D)
        if const.PERMUTE_K:
            k = load(keys.K, (keys.batch, keys.kv_head, j, column), (1, 1, const.TILE_N, width), "C", const.LATENCY_K,
                     const.TMA_LOADS, const)  # fmt: skip
            k = ct.permute(k.reshape((const.TILE_N, width)), (1, 0))
        else:
            k = load(keys.K, (keys.batch, keys.kv_head, column, j), (1, 1, width, const.TILE_N), (0, 1, 3, 2),
                     const.LATENCY_K, const.TMA_LOADS, const).reshape((width, const.TILE_N))  # fmt: skip
        parts = (*parts, k)
    return parts


def load_values(keys, i, t, const):
    """The `t`-th value tile of the `i`-th step in its parts, `[TILE_N, TILE_V]` and `[TILE_N, REST_V]`."""
    j = existing_tile(keys, i, t, const)
    parts = ()
    for part in ct.static_iter(range(2 if const.REST_V else 1)):
        width, column = part_of(part, const.TILE_V, const.REST_V)
        v = load(keys.V, (keys.batch, keys.kv_head, j, column), (1, 1, const.TILE_N, width), "C", const.LATENCY_V,
                 const.TMA_LOADS, const)  # fmt: skip
        parts = (*parts, v.reshape((const.TILE_N, width)))
    return parts


def score(q, k, const):
    """q @ k, over their parts."""
    product = ct.full((const.TILE_M, const.TILE_N), 0.0, dtype=ct.float16 if const.FP16_ACCUM else ct.float32)
    for part in ct.static_iter(range(2 if const.REST_D else 1)):
        product = ct.mma(q[part], k[part], product)
    return product


def fold(rows, keys, i, chains, scores, MASKED, scale_log2, const):
    """Fold the `i`-th step into every chain, each of which uses the same values."""
    halves = tuple(soften(chains[s], scores[s], rows[s], keys, i, MASKED, scale_log2, const)
                   for s in ct.static_iter(range(const.Q_SUBTILES)))  # fmt: skip
    values = tuple(load_values(keys, i, t, const) for t in ct.static_iter(range(const.KV_SUBTILES)))
    return tuple(accumulate(chain, p, values, const) for chain, p in ct.static_iter(halves))


def soften(chain, scores, rows, keys, i, MASKED, scale_log2, const):
    """The softmax of one step: the chain with its sum updated and its accumulator rescaled; and the probabilities."""
    scores = tuple(mask(scores[t].astype(ct.float32), rows, keys, key_tile(keys, i, t, const), MASKED, const)
                   for t in ct.static_iter(range(const.KV_SUBTILES)))  # fmt: skip
    step_max = ct.max(scores[0], axis=-1, keepdims=True)
    for t in ct.static_iter(range(1, const.KV_SUBTILES)):
        step_max = ct.maximum(step_max, ct.max(scores[t], axis=-1, keepdims=True))
    new_max = ct.maximum(chain.row_max, step_max * scale_log2)
    if const.LAZY_RESCALE:
        row_sum, acc = chain.row_sum, chain.acc
        if ct.max(new_max - chain.row_max) > RESCALE_ABOVE:
            alpha = ct.exp2(chain.row_max - new_max, flush_to_zero=True)
            row_sum = row_sum * alpha
            acc = scaled(acc, alpha)
        else:
            new_max = chain.row_max
        p = tuple(ct.exp2(s * scale_log2 - new_max, flush_to_zero=True) for s in ct.static_iter(scores))
        row_sum = add_rows(row_sum, p)
    else:
        p = tuple(ct.exp2(s * scale_log2 - new_max, flush_to_zero=True) for s in ct.static_iter(scores))
        alpha = ct.exp2(chain.row_max - new_max, flush_to_zero=True)
        row_sum = add_rows(chain.row_sum * alpha, p)
        acc = scaled(chain.acc, alpha)
    return Chain(acc, new_max, row_sum), p


def scaled(acc, alpha):
    """An accumulator, in its parts, times `alpha`."""
    return tuple(part * alpha.astype(part.dtype) for part in ct.static_iter(acc))


def add_rows(row_sum, p):
    """`row_sum` and the sum of each row of the tiles `p`."""
    for tile in ct.static_iter(p):
        row_sum = row_sum + ct.sum(tile, axis=-1, keepdims=True)
    return row_sum


def mask(scores, rows, keys, j, MASKED, const):
    """`scores` of key tile `j` with minus infinity where a row does not see a key."""
    if MASKED and (const.CAUSAL or not const.EVEN):
        columns = j * const.TILE_N + ct.arange(const.TILE_N, dtype=ct.int32)[None, :]
        if const.CAUSAL and not const.EVEN:
            visible = (columns <= rows) & (columns < keys.K.shape[2])
        elif const.CAUSAL:
            visible = columns <= rows
        else:
            visible = columns < keys.K.shape[2]
        scores = ct.where(visible, scores, -math.inf)
    return scores


def accumulate(chain, p, values, const):
    """Add the product of the probabilities and the values to the accumulator."""
    acc = ()
    for part in ct.static_iter(range(2 if const.REST_V else 1)):
        total = chain.acc[part]
        for t in ct.static_iter(range(const.KV_SUBTILES)):
            total = ct.mma(p[t].astype(values[t][part].dtype), values[t][part], total)
        acc = (*acc, total)
    return Chain(acc, chain.row_max, chain.row_sum)
