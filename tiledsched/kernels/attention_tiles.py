"""The tile code of the attention kernel: flash-attention forward in cuTile, with its schedule left open.

Online softmax in base 2 after Dao et al., FlashAttention-2 (arXiv:2307.08691), algorithm 1: each block owns rows of
queries and walks over the keys in steps, keeping a running row maximum, row sum and output accumulator. The scale is
applied after the row maximum is taken, which is right for positive scales and saves a pass over the tile.

These functions run on the GPU through cuTile and, unmodified, on the CPU through `tiledsched.interpreter`. They share
one object of compile-time constants, and cuTile inlines them all: an `if` on a constant leaves no trace in the machine
code. From the outside in: `attention` deals out the work, `attend` does one piece of it, `walk` goes over its keys, and
`step` takes one step of that walk: `products` makes the scores, `fold` their softmax and the product with the values.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import cuda.tile as ct

# The kernel sees the index into each of these.
BLOCK_ORDERS = ("natural", "reversed", "heads_fastest", "swizzled")
NATURAL, REVERSED, HEADS_FASTEST, SWIZZLED = range(4)
PERSISTENT_MODES = ("no", "strided", "snake")
ONE_EACH, STRIDED, SNAKE = range(3)
KV_DIRECTIONS = ("forward", "backward", "sawtooth")
FORWARD, BACKWARD, SAWTOOTH = range(3)

SWIZZLE_PAIRS = 8
"""(batch, head) pairs that a swizzled order takes together: as many as have their keys and values in the L2 cache."""
RESCALE_ABOVE = 8.0
"""Growth of a row's maximum, in powers of two, up to which a lazy rescaling lets the old maximum stand."""
LOWEST = -3.4e38
"""A running maximum below every score and yet finite, so that a step without visible keys does not make NaN."""

# The head dimension is a compile-time constant. Saying so also keeps cuTile from making a size-one batch axis static,
# which would give batch 1 its own machine code.
HeadArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]
Bool = ct.Constant[bool]


@dataclass(frozen=True)
class Constants:
    """What is known when the kernel is compiled, in the order of the kernel's last parameters."""

    TILE_M: int
    """Query rows of a tile."""
    TILE_N: int
    """Keys of a tile."""
    TILE_D: int
    """Columns of a tile: the head dimension, rounded up to a power of two."""
    GROUP: int
    """Query heads per key/value head."""
    CAUSAL: bool
    """Whether row i sees keys 0..i only."""
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
    """Steps of the walk."""
    odd: Any
    """1 where a sawtooth walk goes backward, else 0."""


@dataclass(frozen=True)
class Chain:
    """The running softmax of one query tile. Loops carry it in this order; another order makes other machine code."""

    acc: Any
    """Sum of 2**(scaled score - row_max) times the key's row of V, `[TILE_M, TILE_D]`."""
    row_max: Any
    """Largest scaled score so far, `[TILE_M, 1]`; with LAZY_RESCALE, that of the last rescaling."""
    row_sum: Any
    """Sum of 2**(scaled score - row_max), `[TILE_M, 1]`."""


def attention(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, scale_log2: float,
              TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
              LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int, KV_DIRECTION: Int,
              Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool, TMA_LOADS: Bool, TMA_STORE: Bool,
              CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool):  # fmt: skip
    """Out = softmax(scale * Q @ K^T, masked) @ V for arrays `[batch, heads, rows, head_dim]`.

    `scale_log2` is the softmax scale times log2(e). A piece of work is Q_SUBTILES query tiles of one head. A block
    takes one piece, or, when PERSISTENT, one of every `num_blocks`; a snake turns round after each lap over the blocks.
    """
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE)  # fmt: skip
    pieces = ct.cdiv(Q.shape[2], const.TILE_M * const.Q_SUBTILES)
    if PERSISTENT == STRIDED:
        for work in range(ct.bid(0), pieces * Q.shape[1] * Q.shape[0], ct.num_blocks(0)):
            attend(Q, K, V, Out, scale_log2, work, pieces, const)
    elif PERSISTENT == SNAKE:
        total, blocks = pieces * Q.shape[1] * Q.shape[0], ct.num_blocks(0)
        for lap in range(ct.cdiv(total - snake(ct.bid(0), blocks, total // blocks), blocks)):
            attend(Q, K, V, Out, scale_log2, lap * blocks + snake(ct.bid(0), blocks, lap), pieces, const)
    else:
        attend(Q, K, V, Out, scale_log2, ct.bid(0), pieces, const)


def snake(block, blocks, lap):
    """Place of `block` in a lap over all blocks: even laps go up, odd ones down."""
    return block + lap % 2 * (blocks - 1 - 2 * block)


def attend(Q, K, V, Out, scale_log2, work, pieces, const):
    """One piece of work, start to finish."""
    piece, head, batch = coordinates(work, pieces, Q.shape[1], Q.shape[0], const)
    kv_head = head // const.GROUP
    tiles = tuple(query_tile(piece, s, Q.shape[2], const) for s in ct.static_iter(range(const.Q_SUBTILES)))
    rows = tuple(rows_of(tile, const) for tile in ct.static_iter(tiles))
    shape = (const.TILE_M, const.TILE_D)
    queries = tuple(load(Q, (batch, head, tile, 0), shape, "C", 0, True, const) for tile in ct.static_iter(tiles))
    chains = tuple(fresh_chain(const) for _ in ct.static_iter(range(const.Q_SUBTILES)))

    # Steps before `first_masked` lie wholly inside the mask; those from `steps` on lie wholly outside.
    seq_k, block_m, step_n = K.shape[2], const.TILE_M * const.Q_SUBTILES, const.TILE_N * const.KV_SUBTILES
    if const.CAUSAL:
        first_masked = min(piece * block_m, seq_k) // step_n
        steps = ct.cdiv(min((piece + 1) * block_m, seq_k), step_n)
    else:
        first_masked = seq_k // step_n
        steps = ct.cdiv(seq_k, step_n)
    keys = Keys(K, V, batch, kv_head, steps, piece % 2)
    chains = walk(queries, rows, keys, chains, first_masked, scale_log2, const)

    for s in ct.static_iter(range(const.Q_SUBTILES)):
        acc, row_sum = chains[s].acc.astype(ct.float32), chains[s].row_sum
        if const.IEEE_DIVISION:
            out = ct.truediv(acc, row_sum)
        else:
            out = ct.truediv(acc, row_sum, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
        ct.store(Out, (batch, head, tiles[s], 0), out.astype(Out.dtype).reshape((1, 1, const.TILE_M, const.TILE_D)),
                 check_bounds=const.CHECK_BOUNDS, allow_tma=None if const.TMA_STORE else False)  # fmt: skip


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


def query_tile(piece, s, seq_q, const):
    """Index of the `s`-th query tile of a piece. One beyond the end becomes the last tile, which is done twice."""
    tile = piece
    if const.Q_SUBTILES > 1:
        tile = piece * const.Q_SUBTILES + s
        if const.CHECK_BOUNDS:
            tile = min(tile, ct.cdiv(seq_q, const.TILE_M) - 1)
    return tile


def rows_of(tile, const):
    """Indices of the queries of a tile, `[TILE_M, 1]`."""
    return tile * const.TILE_M + ct.arange(const.TILE_M, dtype=ct.int32)[:, None]


def load(array, index, SHAPE, ORDER, LATENCY, MAY_USE_TMA, const):
    """The tile of the last two axes at `index`, with zeros beyond the edge of the array."""
    # Without bounds there is no edge, and cuTile refuses a padding mode.
    padding = ct.PaddingMode.ZERO if const.CHECK_BOUNDS else ct.PaddingMode.UNDETERMINED
    tile = ct.load(array, index, (1, 1, SHAPE[0], SHAPE[1]), order=ORDER, padding_mode=padding,
                   check_bounds=const.CHECK_BOUNDS, latency=None if LATENCY == 0 else LATENCY,
                   allow_tma=None if MAY_USE_TMA else False)  # fmt: skip
    return tile.reshape(SHAPE)


def fresh_chain(const):
    """A running softmax over nothing."""
    start = -math.inf if const.KV_DIRECTION == FORWARD else LOWEST
    row_max = ct.full((const.TILE_M, 1), start, dtype=ct.float32)
    row_sum = ct.full((const.TILE_M, 1), 0.0, dtype=ct.float32)
    acc = ct.full((const.TILE_M, const.TILE_D), 0.0, dtype=ct.float16 if const.FP16_ACCUM else ct.float32)
    return Chain(acc, row_max, row_sum)


def walk(queries, rows, keys, chains, first_masked, scale_log2, const):
    """Fold all keys into the chains, in one loop or in two, of which one goes without masks."""
    end = keys.steps
    scores = ()
    if const.QK_AHEAD:  # the last step has no next one: it stands behind the loops
        end = keys.steps - 1
        scores = products(queries, keys, 0, const)
    if const.LOOP_SPLIT:
        backward = const.KV_DIRECTION == BACKWARD
        boundary = keys.steps - first_masked if backward else first_masked
        if const.QK_AHEAD:
            boundary = min(boundary, end)
        for i in range(boundary):
            chains, scores = step(queries, rows, keys, i, chains, scores, backward, scale_log2, const)
        for i in range(boundary, end):
            chains, scores = step(queries, rows, keys, i, chains, scores, not backward, scale_log2, const)
    else:
        for i in range(end):
            chains, scores = step(queries, rows, keys, i, chains, scores, True, scale_log2, const)
    if const.QK_AHEAD:
        chains = fold(rows, keys, end, chains, scores, True, scale_log2, const)
    return chains


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
    elif const.KV_DIRECTION == SAWTOOTH:
        i = i + keys.odd * (keys.steps - 1 - 2 * i)
    return i if const.KV_SUBTILES == 1 else i * const.KV_SUBTILES + t


def existing_tile(keys, i, t, const):
    """The same, or the last tile instead of one beyond it."""
    j = key_tile(keys, i, t, const)
    return j if const.KV_SUBTILES == 1 or const.EVEN else min(j, ct.cdiv(keys.K.shape[2], const.TILE_N) - 1)


def products(queries, keys, i, const):
    """Scores of the `i`-th step, unscaled and unmasked: one tuple for each query tile, of one tile for each key tile."""
    tiles = tuple(load_keys(keys, i, t, const) for t in ct.static_iter(range(const.KV_SUBTILES)))
    return tuple(tuple(score(q, k, const) for k in ct.static_iter(tiles)) for q in ct.static_iter(queries))


def load_keys(keys, i, t, const):
    """The `t`-th key tile of the `i`-th step, `[TILE_D, TILE_N]`."""
    j = existing_tile(keys, i, t, const)
    if const.PERMUTE_K:
        k = load(keys.K, (keys.batch, keys.kv_head, j, 0), (const.TILE_N, const.TILE_D), "C", const.LATENCY_K,
                 const.TMA_LOADS, const)  # fmt: skip
        k = ct.permute(k, (1, 0))
    else:
        k = load(keys.K, (keys.batch, keys.kv_head, 0, j), (const.TILE_D, const.TILE_N), (0, 1, 3, 2), const.LATENCY_K,
                 const.TMA_LOADS, const)  # fmt: skip
    return k


def load_values(keys, i, t, const):
    """The `t`-th value tile of the `i`-th step, `[TILE_N, TILE_D]`."""
    j = existing_tile(keys, i, t, const)
    return load(keys.V, (keys.batch, keys.kv_head, j, 0), (const.TILE_N, const.TILE_D), "C", const.LATENCY_V,
                const.TMA_LOADS, const)  # fmt: skip


def score(q, k, const):
    """q @ k."""
    accum_dtype = ct.float16 if const.FP16_ACCUM else ct.float32
    return ct.mma(q, k, ct.full((const.TILE_M, const.TILE_N), 0.0, dtype=accum_dtype))


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
            acc = acc * alpha.astype(acc.dtype)
        else:
            new_max = chain.row_max
        p = tuple(ct.exp2(s * scale_log2 - new_max, flush_to_zero=True) for s in ct.static_iter(scores))
        row_sum = add_rows(row_sum, p)
    else:
        p = tuple(ct.exp2(s * scale_log2 - new_max, flush_to_zero=True) for s in ct.static_iter(scores))
        alpha = ct.exp2(chain.row_max - new_max, flush_to_zero=True)
        row_sum = add_rows(chain.row_sum * alpha, p)
        acc = chain.acc * alpha.astype(chain.acc.dtype)
    return Chain(acc, new_max, row_sum), p


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
    acc = chain.acc
    for t in ct.static_iter(range(const.KV_SUBTILES)):
        acc = ct.mma(p[t].astype(values[t].dtype), values[t], acc)
    return Chain(acc, chain.row_max, chain.row_sum)
