"""The tile code of the attention kernel: flash-attention forward in cuTile, with its schedule left open.

Online softmax in base 2 after Dao et al., FlashAttention-2 (arXiv:2307.08691), algorithm 1: each block owns rows of
queries and loops over the keys in steps, keeping a running row maximum, row sum and output accumulator. The scale is
applied after the row maximum is taken, which is right for positive scales and saves a pass over the tile.

These functions run on the GPU through cuTile and, unmodified, on the CPU through `tiledsched.interpreter`. They share
one object of compile-time constants, and cuTile inlines them all: an `if` on a constant leaves no trace in the machine
code. From the outside in: `schedule_work` gives the blocks their work tiles, `compute_work_tile` computes one and `epilogue`
stores it; `main_loop` goes over its keys, in turns of one `step` or more: `products` makes the scores, `fold` their softmax
and the product with the values. The order of the work tiles is in :mod:`tiledsched.kernels.attention.scheduler`, the
kernels themselves are in :mod:`tiledsched.kernels.attention.entries`.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.kernels.attention.eight_bits import (
    EIGHT_BIT_POWER,
    PER_PAGE,
    Scales,
    in_float16,
    joined,
    key_planes,
    own_scale,
    planes_of_keys,
    planes_of_values,
    scales_of_values,
    with_key_scales,
)
from tiledsched.kernels.attention.features import (
    capped,
    narrowed,
    own_keys,
    rows_see_nothing,
    seen,
    unmasked_turns,
    used_values,
)
from tiledsched.kernels.attention.mods import (
    listed_step,
    listed_steps,
    modified,
    seen_by_mod,
    variant_of,
    weights_by_mod,
)
from tiledsched.kernels.attention.packed import is_filled, offset_in_pages, own_outputs, own_work, pages_of, spans_pages
from tiledsched.kernels.attention.scheduler import (
    BACKWARD,
    FORWARD,
    SAWTOOTH,
    SNAKE,
    STRIDED,
    WIDE_SAWTOOTH,
    pack_count,
    query_tile,
    rows_of,
    snake,
    work_tiles_per_head,
)

LN_2 = math.log(2.0)
LOG2_E = math.log2(math.e)
TOOTH = 4
"""Neighbouring query tiles whose keys a wide sawtooth takes in the same direction."""
RESCALE_ABOVE = 8.0
"""Growth of a row's maximum, in powers of two, up to which a lazy rescaling keeps the old maximum."""
LOWEST = -3.4e38
"""A running maximum below every score and yet finite, so that a step without visible keys does not make NaN.

It is a maximum of scores that are scaled already, and no factor, so that no product of it can be contracted. A score's can: where
it is the row's maximum, `score * scale_log2 - row_max` is not 0 then but what rounding took off `row_max`, at most 2**-24 of it.
That changes all probabilities of a row and their sum by one factor, which the division takes out. The factor leaves float16 where
scaled scores pass 2**28, and float32 where they pass 2**31; such rows become NaN. Scores that an author's function changes may
pass them, as where it adds -1e9 to hide a key; they are scaled before the maximum is taken.
"""


@dataclass(frozen=True)
class Constants:
    """The compile-time constants of a kernel, in the order of its last parameters. Those that a kernel does not know have their
    defaults, which ask for nothing; `split.Combining` and the constants of gradients add some."""

    TILE_M: int
    """Query rows of a tile."""
    TILE_N: int = 0
    """Keys of a tile."""
    TILE_D: int = 0
    """Columns of a tile of queries or keys: the head dimension rounded up to a power of two, or its first part."""
    GROUP: int = 1
    """Query heads per key/value head."""
    CAUSAL: bool = False
    """Whether a row sees no keys beyond its own."""
    EVEN: bool = False
    """Whether the keys of a step divide the number of keys."""
    FP16_ACCUM: bool = False
    """Whether both products accumulate in float16."""
    LATENCY_K: int = 0
    """Latency hint of the key loads; 0 for none."""
    LATENCY_V: int = 0
    """Latency hint of the value loads; 0 for none."""
    LOOP_SPLIT: bool = False
    """Whether the unmasked steps have a loop of their own."""
    BLOCK_ORDER: int = 0
    """Index into BLOCK_ORDERS."""
    PERSISTENT: int = 0
    """Index into PERSISTENT_MODES."""
    KV_DIRECTION: int = 0
    """Index into KV_DIRECTIONS."""
    Q_SUBTILES: int = 1
    """Query tiles of a block."""
    KV_SUBTILES: int = 1
    """Key tiles of a step."""
    QK_AHEAD: bool = False
    """Whether the scores of a step are made during the step before."""
    TMA_LOADS: bool = False
    """Whether loads of keys and values may use the TMA unit."""
    TMA_STORE: bool = False
    """Whether the store of the output may use the TMA unit."""
    CHECK_BOUNDS: bool = True
    """Whether loads and stores check the edges of the arrays; false only where no tile crosses an edge."""
    IEEE_DIVISION: bool = False
    """Whether the last division is rounded correctly."""
    LAZY_RESCALE: bool = False
    """Whether small growth of the row maximum leaves the accumulator as it is."""
    BOTTOM_RIGHT: bool = False
    """Whether the last query's own key is the last one; else the first query's is the first."""
    REST_D: int = 0
    """Columns of the second part of queries and keys; 0 where there is one part."""
    TILE_V: int = 0
    """Columns of a tile of values or outputs: their width rounded up to a power of two, or its first part."""
    REST_V: int = 0
    """Columns of the second part of values and outputs; 0 where there is one part."""
    PACK: int = 1
    """Query heads that a tile has rows for: 1, or GROUP rounded up to a power of two."""
    KV_SPLITS: int = 1
    """Blocks that share the keys of one work tile."""
    FLAT_STEPS: int = 0
    """Steps per turn of one flat loop over all work tiles of a block; 0 for a main loop for each."""
    RELOAD_Q: bool = False
    """Whether a flat loop loads the queries again at each turn."""
    Q_AHEAD: bool = False
    """Whether a flat loop loads the queries of each work tile while it computes the one before."""
    STORE_LATE: bool = False
    """Whether a persistent block stores each output late, after the loads of the next work tile have begun."""
    Q_IN_REGISTERS: bool = False
    """Whether a nested loop's queries are held in registers, so that their shared memory is free for the next ones."""
    UNROLL: int = 1
    """Steps in one turn of the loop over a work tile's keys; each has shared memory of its own for them."""
    PEEL_FIRST: bool = False
    """Whether the compiler sees that a block which stores late has nothing to store in its first lap."""
    # Only the kernels with optional features and those of packed sequences or pages know the following.
    WINDOW: bool = False
    """Whether a row sees its last keys only."""
    WINDOW_RIGHT: bool = False
    """Whether a row also sees keys after its own: the causal diagonal lies that many keys further to the right."""
    SOFTCAP: bool = False
    """Whether scores are capped."""
    SINKS: bool = False
    """Whether each head has a logit in its denominators."""
    STARTS: bool = False
    """Whether each sequence says where its keys start."""
    LENGTHS: bool = False
    """Whether each sequence says where its keys end."""
    # Only the kernels of packed sequences or pages know the following.
    PACKED: bool = False
    """Whether the sequences lie end to end."""
    PAGE: int = 0
    """Keys of a page; 0 where a sequence's keys lie end to end."""
    PAGE_BY_PAGE: bool = False
    """Whether each page of a tile is looked up by itself."""
    # Only the kernels of keys and values in 8 bits know the following.
    KV8: int = 0
    """Index into KV8_SCALES; 0 where queries have 8 bits, too."""
    NUMBERS: int = 1
    """Numbers of 8 bits in an element of K or V."""
    Q8: int = 0
    """Index into KV8_SCALES where queries have 8 bits, too, and products take numbers of 8 bits as they are; 0 elsewhere."""
    # Only the kernels whose shares a later launch combines know the following.
    KV_SPAN: int = 0
    """Steps of each share of the keys, counted from the sequence's first key; 0 where KV_SPLITS shares are about equal."""
    # Only the kernels of an author's own attention know the following.
    SCORE_MOD: bool = False
    """Whether a function of the author's changes the scores."""
    MASK_MOD: bool = False
    """Whether a function of the author's says which keys a row sees."""
    WEIGHT_MOD: bool = False
    """Whether a function says what probabilities are multiplied with after the softmax."""
    BLOCK_ROWS: int = 0
    """Query rows of a block in the lists of blocks that are not empty; 0 where there are no lists."""
    BLOCK_KEYS: int = 0
    """Keys of such a block."""


@dataclass(frozen=True)
class Keys:
    """The keys and values of one work tile, and the steps of the loop over them."""

    K: Any
    """All keys."""
    V: Any
    """All values."""
    batch: Any
    """First index into both."""
    kv_head: Any
    """Second index into both."""
    steps: Any
    """Number of steps over all keys that the work tile sees."""
    begin: Any
    """The first step that this block takes."""
    end: Any
    """The first step that this block does not take any more."""
    odd: Any
    """1 where a sawtooth goes backward, else 0."""
    span: Any
    """Which keys count, as a `features.Span`; None where all keys do."""
    variant: Any = None
    """What an author's own functions are given, as a `mods.Variant`; None where there are none."""
    eight: Any = None
    """The scales of keys and values in 8 bits, as `eight_bits.Scales`; None where they have the type of the queries."""


@dataclass(frozen=True)
class Chain:
    """The running softmax of one query tile. Loops carry it in this order; another order makes other machine code."""

    acc: Any
    """Sum of 2**(scaled score - row_max) times the key's row of V: a tuple of `[TILE_M, TILE_V]` and any second part."""
    row_max: Any
    """Largest scaled score so far, `[TILE_M, 1]`; with LAZY_RESCALE, the one at the last rescaling; with Q8, less
    EIGHT_BIT_POWER."""
    row_sum: Any
    """Sum of 2**(scaled score - row_max), `[TILE_M, 1]`."""


@dataclass(frozen=True)
class WorkTile:
    """One work tile: Q_SUBTILES query tiles of one head, or of the pack of heads that share their keys."""

    batch: Any
    """First index into all arrays; of packed sequences, which one."""
    head: Any
    """Second index into Q and the outputs, in units of packs."""
    tiles: Any
    """Indices of the query tiles."""


def schedule_work(Q, K, V, Out, Lse, scale_log2, features, const):
    """Compute all of the current block's work.

    A block takes one work tile, or, when PERSISTENT, one of every `num_blocks`; a snake turns round after each lap over the
    blocks. `Lse` and `features`, a `features.Features`, may be None.
    """
    work_tiles = work_tiles_per_head(Q, features, const)
    if const.STORE_LATE:
        run_with_late_epilogue(Q, K, V, Out, Lse, scale_log2, features, const)
    elif const.PERSISTENT == STRIDED:
        for work in range(ct.bid(0), work_tiles * pack_count(Q, const) * Q.shape[0], ct.num_blocks(0)):
            compute_work_tile(Q, K, V, Out, Lse, scale_log2, work, work_tiles, features, const)
    elif const.PERSISTENT == SNAKE:
        total, blocks = work_tiles * pack_count(Q, const) * Q.shape[0], ct.num_blocks(0)
        for lap in range(ct.cdiv(total - snake(ct.bid(0), blocks, total // blocks), blocks)):
            compute_work_tile(
                Q, K, V, Out, Lse, scale_log2, lap * blocks + snake(ct.bid(0), blocks, lap), work_tiles, features, const
            )
    else:
        compute_work_tile(Q, K, V, Out, Lse, scale_log2, ct.bid(0), work_tiles, features, const)


def run_with_late_epilogue(Q, K, V, Out, Lse, scale_log2, features, const):
    """Compute all work of a persistent block; the output of a work tile is stored at the beginning of the next one.

    The compiler gives loads warps of their own. When a work tile ends, these go on to the queries of the next one, and then to
    its keys. They should not wait for the output to be stored. If the compiler can tell the first lap from the others, it makes
    code for the first lap alone, and the loads of the second lap wait for the end of the first.
    """
    work_tiles, blocks = work_tiles_per_head(Q, features, const), ct.num_blocks(0)
    total = work_tiles * pack_count(Q, const) * Q.shape[0]
    first = snake(ct.bid(0), blocks, total // blocks) if const.PERSISTENT == SNAKE else ct.bid(0)
    work_tile = WorkTile(0, 0, tuple(0 for _ in ct.static_iter(range(const.Q_SUBTILES))))
    chains = tuple(fresh_chain(const) for _ in ct.static_iter(range(const.Q_SUBTILES)))
    for lap in range(ct.cdiv(total - first, blocks)):
        place = snake(ct.bid(0), blocks, lap) if const.PERSISTENT == SNAKE else ct.bid(0)
        work = lap * blocks + place
        # Both conditions mean the same. The compiler recognises the first lap by `lap`, but not by `work`.
        later = lap > 0 if const.PEEL_FIRST else work >= blocks
        if later:
            epilogues(Out, Lse, work_tile, chains, features, const)
        place, head, batch, _, _, _ = own_work(Q, K, V, work, work_tiles, features, const)
        work_tile, chains = loop_over_keys(Q, K, V, scale_log2, place, head, batch, 0, features, const)
    epilogues(Out, Lse, work_tile, chains, features, const)


def compute_work_tile(Q, K, V, Out, Lse, scale_log2, work, work_tiles, features, const):
    """Compute one work tile and store it. A place of a packed sequence may hold no work tile."""
    place, head, batch, Q, K, V = own_work(Q, K, V, work, work_tiles, features, const)
    if not const.PACKED or is_filled(place, Q, const):
        work_tile, chains = loop_over_keys(Q, K, V, scale_log2, place, head, batch, 0, features, const)
        epilogues(Out, Lse, work_tile, chains, features, const)


def epilogues(Out, Lse, work_tile, chains, features, const):
    """Store the outputs of all query tiles of a work tile."""
    for s in ct.static_iter(range(const.Q_SUBTILES)):
        epilogue(Out, Lse, work_tile, work_tile.tiles[s], chains[s], features, const)


def loop_over_keys(Q, K, V, scale_log2, place, head, batch, split, features, const):
    """(work tile, chains) of the work tile at `place` of a head, after the `split`-th of KV_SPLITS shares of its keys.

    Of packed sequences, Q, K and V are the slices of one sequence, and `batch` is the number of that sequence.
    """
    entry = 0 if const.PACKED else batch
    kv_head = head // const.GROUP if const.PACK == 1 else head
    seq_q = Q.shape[2]
    offset = K.shape[2] - seq_q if const.BOTTOM_RIGHT else 0
    if const.PAGE:
        offset = offset_in_pages(batch, seq_q, features, const)
    if const.WINDOW_RIGHT:
        offset = offset + features.window_right
    if (const.STARTS or const.LENGTHS) and not const.PAGE:
        K, V, offset = own_keys(K, V, batch, offset, features, const)
    tiles = tuple(query_tile(place, s, seq_q, const) for s in ct.static_iter(range(const.Q_SUBTILES)))
    rows = tuple(rows_of(tile, offset, const) for tile in ct.static_iter(tiles))
    queries = tuple(load_queries(Q, (entry, head, tile), const) for tile in ct.static_iter(tiles))
    queries = tuple(in_registers(q, scale_log2, const) for q in ct.static_iter(queries))
    chains = tuple(fresh_chain(const) for _ in ct.static_iter(range(const.Q_SUBTILES)))

    first_masked, steps, span = narrowed(place, batch, offset, K, features, const)
    variant = None
    if const.SCORE_MOD or const.MASK_MOD or const.WEIGHT_MOD:
        variant = variant_of(place, head, batch, offset, features, const)
    if const.SCORE_MOD:  # changed scores are scaled already; the compiler does not know that this is 1, see LOWEST
        scale_log2 = ct.where(scale_log2 > 0.0, 1.0, 2.0)
    if const.BLOCK_ROWS:
        first_masked, steps = listed_steps(variant, const)
        if const.LENGTHS and K.shape[2] == 0:  # then there is no tile to load
            steps = 0
    elif const.MASK_MOD:  # which may hide any key
        first_masked = 0
    if const.UNROLL > 1:  # whole turns; what is too much is masked
        first_masked = first_masked // const.UNROLL * const.UNROLL
        steps = ct.cdiv(steps, const.UNROLL) * const.UNROLL
    begin, end = 0, steps
    if const.KV_SPAN:
        begin, end = own_span(split, steps, span, const)
    elif const.KV_SPLITS > 1:
        begin, end = steps * split // const.KV_SPLITS, steps * (split + 1) // const.KV_SPLITS
    odd = place // TOOTH % 2 if const.KV_DIRECTION == WIDE_SAWTOOTH else place % 2
    eight = None
    if const.KV8:
        eight = Scales(own_scale(features.KScale, kv_head, const), own_scale(features.VScale, kv_head, const))
        queries = tuple(in_float16(q[0], eight, const) for q in ct.static_iter(queries))
        chains = tuple(
            Chain(
                tuple(
                    ct.full((const.TILE_M, const.TILE_V // const.NUMBERS), 0.0, dtype=ct.float32)
                    for _ in ct.static_iter(range(const.NUMBERS))
                ),
                chain.row_max,
                chain.row_sum,
            )
            for chain in ct.static_iter(chains)
        )
    keys = Keys(K, V, batch if const.PAGE else entry, kv_head, steps, begin, end, odd, span, variant, eight)
    if const.Q8:
        scale_log2 = scale_log2 * own_scale(features.KScale, kv_head, const)
    chains = main_loop(queries, rows, keys, chains, first_masked, scale_log2, const)
    if const.Q8:
        chains = tuple(
            Chain(scaled(chain.acc, own_scale(features.VScale, kv_head, const)), chain.row_max, chain.row_sum)
            for chain in ct.static_iter(chains)
        )
    if const.KV8:
        chains = tuple(
            Chain((joined(chain.acc, eight, const),), chain.row_max, chain.row_sum) for chain in ct.static_iter(chains)
        )
    return WorkTile(batch, head, tiles), chains


def own_span(split, steps, span, const):
    """The first step of the `split`-th share of KV_SPAN steps, and the first one after it, among a work tile's `steps`.

    Shares are counted from the sequence's first key, wherever a window begins, so that the rows of all tiles divide their keys at
    the same places. Shares behind the last step are empty.
    """
    first = span.first if const.WINDOW else 0
    begin, end = split * const.KV_SPAN - first, (split + 1) * const.KV_SPAN - first
    return min(max(begin, 0), steps), min(max(end, 0), steps)


def epilogue(Out, Lse, work_tile, tile, chain, features, const):
    """Divide a chain by its sum and store it in `Out`; store its log-sum-exp in `Lse`, unless that is None."""
    if const.PACKED:
        Out, Lse = own_outputs(Out, Lse, work_tile.batch, features)
        work_tile = WorkTile(0, work_tile.head, work_tile.tiles)
    if const.SINKS:
        chain = sunk(chain, features.Sinks, work_tile.head, const)
    row_sum = chain.row_sum
    if rows_see_nothing(const):  # rows that see no key become 0 / 1 = 0 instead of 0 / 0
        row_sum = ct.where(row_sum > 0.0, row_sum, 1.0)
    for part in ct.static_iter(range(2 if const.REST_V else 1)):
        acc = chain.acc[part].astype(ct.float32)
        if const.IEEE_DIVISION:
            out = ct.truediv(acc, row_sum)
        else:
            out = ct.truediv(acc, row_sum, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
        width, column = part_of(part, const.TILE_V, const.REST_V)
        ct.store(
            pack_of(Out, work_tile.head, const),
            (work_tile.batch, place_of(work_tile.head, const), tile, column),
            out.astype(Out.dtype).reshape(block_shape(width, const)),
            check_bounds=const.CHECK_BOUNDS,
            allow_tma=None if const.TMA_STORE else False,
        )
    if Lse is not None:
        lse = (chain.row_max + ct.log2(chain.row_sum)) * LN_2
        ct.store(
            pack_of(Lse, work_tile.head, const),
            (work_tile.batch, place_of(work_tile.head, const), tile, 0),
            lse.reshape(block_shape(1, const)),
            check_bounds=const.CHECK_BOUNDS,
            allow_tma=False,
        )


def sunk(chain, Sinks, head, const):
    """The chain with the sink of each row's head added to the row's sum."""
    first = head * const.GROUP if const.PACK > 1 else head
    heads = first + ct.arange(const.TILE_M, dtype=ct.int32)[:, None] // (const.TILE_M // const.PACK)
    sink = ct.gather(Sinks, (heads,)).astype(ct.float32) / LN_2
    row_max = ct.maximum(chain.row_max, sink)
    alpha = ct.exp2(chain.row_max - row_max, flush_to_zero=True)
    acc = tuple(part.astype(ct.float32) * alpha for part in ct.static_iter(chain.acc))
    row_sum = chain.row_sum * alpha + ct.exp2(sink - row_max, flush_to_zero=True)
    return Chain(acc, row_max, row_sum)


def part_of(PART, TILE, REST):
    """(width, index in units of that width) of one of the two parts of a row's columns."""
    return (TILE, 0) if PART == 0 else (REST, TILE // REST)


def pack_of(array, head, const):
    """The array, or a slice of one pack's heads where a tile has rows for more heads than the pack has.

    Elements beyond the edge of the slice are read as zeros and not written.
    """
    if const.PACK > const.GROUP:
        array = array.slice(axis=1, start=head * const.GROUP, stop=(head + 1) * const.GROUP)
    return array


def place_of(head, const):
    """Second index into the array that `pack_of` returns."""
    return 0 if const.PACK > const.GROUP else head


def block_shape(WIDTH, const):
    """Shape of a tile of queries or outputs in its array, `[1, heads, rows, columns]`."""
    return (1, const.PACK, const.TILE_M // const.PACK, WIDTH)


def load(array, index, BLOCK, ORDER, LATENCY, MAY_USE_TMA, const):
    """The tile of shape `BLOCK` at `index`. Elements beyond the edge of the array are zeros."""
    # Without checked bounds there is no edge, and cuTile accepts no padding mode.
    padding = ct.PaddingMode.ZERO if const.CHECK_BOUNDS else ct.PaddingMode.UNDETERMINED
    return ct.load(
        array,
        index,
        BLOCK,
        order=ORDER,
        padding_mode=padding,
        check_bounds=const.CHECK_BOUNDS,
        latency=None if LATENCY == 0 else LATENCY,
        allow_tma=None if MAY_USE_TMA else False,
    )


def load_pages(array, index, width, LATENCY, const):
    """The rows of whole pages as one tile `[TILE_N, width]`. `index` is a tile of page numbers, a head, and a tile of columns."""
    pages, head, column = index
    slices = (pages, ct.Slice(head, 1), ct.Slice(0, const.PAGE), ct.Slice(column * width, width))
    padding = ct.PaddingMode.ZERO if const.CHECK_BOUNDS else ct.PaddingMode.UNDETERMINED
    rows = ct.load_advanced_indexing(
        array,
        slices,
        padding_mode=padding,
        latency=None if LATENCY == 0 else LATENCY,
        allow_tma=None if const.TMA_LOADS else False,
    )
    return rows.reshape((const.TILE_N, width))


def load_queries(Q, place, const):
    """A query tile in its parts: `[TILE_M, TILE_D]` and, unless REST_D is 0, `[TILE_M, REST_D]`."""
    parts = ()
    for part in ct.static_iter(range(2 if const.REST_D else 1)):
        width, column = part_of(part, const.TILE_D, const.REST_D)
        q = load(
            pack_of(Q, place[1], const),
            (place[0], place_of(place[1], const), place[2], column),
            block_shape(width, const),
            "C",
            0,
            True,
            const,
        )
        parts = (*parts, q.reshape((const.TILE_M, width)))
    return parts


def in_registers(parts, scale_log2, const):
    """A query tile for the products. With Q_IN_REGISTERS it is computed, because computed tiles lie in registers."""
    if const.Q_IN_REGISTERS:
        one = ct.where(scale_log2 > 0.0, 1.0, 2.0)  # always 1, but the compiler does not know that
        parts = tuple(part * one.astype(part.dtype) for part in ct.static_iter(parts))
    return parts


def fresh_chain(const):
    """The running softmax of a query tile before its first key."""
    start = LOWEST if may_see_nothing(const) else -math.inf
    row_max = ct.full((const.TILE_M, 1), start, dtype=ct.float32)
    row_sum = ct.full((const.TILE_M, 1), 0.0, dtype=ct.float32)
    acc = ()
    for part in ct.static_iter(range(2 if const.REST_V else 1)):
        width = part_of(part, const.TILE_V, const.REST_V)[0]
        acc = (*acc, ct.full((const.TILE_M, width), 0.0, dtype=ct.float16 if const.FP16_ACCUM else ct.float32))
    return Chain(acc, row_max, row_sum)


def may_see_nothing(const):
    """Whether a row may see no key in its first step, or a block may take no step at all."""
    return const.KV_DIRECTION != FORWARD or rows_see_nothing(const) or const.KV_SPLITS > 1


def main_loop(queries, rows, keys, chains, first_masked, scale_log2, const):
    """The chains after the block's keys, in one loop over the steps, or in several of which one needs no masks."""
    begin, end = keys.begin, keys.end
    scores = ()
    if const.QK_AHEAD:  # the last step has no next step, and is taken after the loops
        end = end - 1
        scores = products(queries, keys, begin, const)
    loops = ((begin, end, True),)
    if const.LOOP_SPLIT and const.WINDOW:  # masks at both ends
        boundary, second = unmasked_turns(keys, first_masked, begin, end, const)
        loops = ((begin, boundary, True), (boundary, second, False), (second, end, True))
    elif const.LOOP_SPLIT:
        backward = const.KV_DIRECTION == BACKWARD or const.BLOCK_ROWS > 0  # partial blocks come first
        boundary = keys.steps - first_masked if backward else first_masked
        if const.KV_SPLITS > 1:
            boundary = max(boundary, begin)
        if const.QK_AHEAD or const.KV_SPLITS > 1:
            boundary = min(boundary, end)
        loops = ((begin, boundary, backward), (boundary, end, not backward))
    for first, stop, masked in ct.static_iter(loops):
        for i in range(first, stop, const.UNROLL):
            for u in ct.static_iter(range(const.UNROLL)):
                chains, scores = step(queries, rows, keys, i + u, chains, scores, masked, scale_log2, const)
    if const.QK_AHEAD:
        chains = fold(rows, keys, end, chains, scores, True, scale_log2, const)
    return chains


def step(queries, rows, keys, i, chains, scores, MASKED, scale_log2, const):
    """(chains, scores) after the `i`-th step. The scores are those of the next step with QK_AHEAD, and otherwise empty."""
    if const.QK_AHEAD:
        ahead = products(queries, keys, i + 1, const)
    else:
        ahead = ()
        scores = products(queries, keys, i, const)
    return fold(rows, keys, i, chains, scores, MASKED, scale_log2, const), ahead


def key_tile(keys, i, t, const):
    """Index of the `t`-th key tile of the `i`-th step. It may lie beyond the last tile, where every score is masked."""
    if const.KV_DIRECTION == BACKWARD:
        i = keys.steps - 1 - i
    elif const.KV_DIRECTION >= SAWTOOTH:
        i = i + keys.odd * (keys.steps - 1 - 2 * i)
    if const.WINDOW:
        i = i + keys.span.first
    if const.BLOCK_ROWS:
        i = listed_step(keys.variant, i, const)
    return i if const.KV_SUBTILES == 1 else i * const.KV_SUBTILES + t


def existing_tile(keys, i, t, const):
    """Index of the `t`-th key tile of the `i`-th step, or of the last tile instead of one beyond it."""
    j = key_tile(keys, i, t, const)
    whole = const.KV_SUBTILES == 1 and const.FLAT_STEPS < 2 and const.UNROLL == 1 and not const.BLOCK_ROWS
    if const.EVEN or whole:
        return j
    if const.PAGE:
        return min(j, max(ct.cdiv(keys.span.end, const.TILE_N) - 1, 0))
    return min(j, ct.cdiv(keys.K.shape[2], const.TILE_N) - 1)


def products(queries, keys, i, const):
    """Scores of the `i`-th step, before masks and, unless they are capped, before the scale: `[query tile][key tile]`."""
    tiles = tuple(
        load_tile(keys.K, keys, i, t, const.TILE_D, const.REST_D, const.LATENCY_K, not const.KV8, const)
        for t in ct.static_iter(range(const.KV_SUBTILES))
    )
    if const.KV8:
        scores = products_of_words(queries, tiles, keys, i, const)
    else:
        scores = tuple(
            tuple(capped(score(q, k, const), keys, const) for k in ct.static_iter(tiles))
            for q in ct.static_iter(queries)
        )
    return scores


def products_of_words(queries, words, keys, i, const):
    """The scores of keys in 8 bits, given as words, before masks."""
    tiles = tuple(planes_of_keys(each[0], const) for each in ct.static_iter(words))
    return tuple(
        tuple(
            capped(
                with_key_scales(score(q, tiles[t], const), q, keys, existing_tile(keys, i, t, const), const),
                keys,
                const,
            )
            for t in ct.static_iter(range(const.KV_SUBTILES))
        )
        for q in ct.static_iter(queries)
    )


def load_tile(array, keys, i, t, TILE, REST, LATENCY, TRANSPOSED, const):
    """The `t`-th tile of keys or values of the `i`-th step in its parts: `[TILE_N, TILE]` and, unless REST is 0,
    `[TILE_N, REST]`; each transposed with TRANSPOSED.
    """
    entry, j = keys.batch, existing_tile(keys, i, t, const)
    if const.PAGE:
        entry, j = pages_of(keys, j, const)
    parts = ()
    for part in ct.static_iter(range(2 if REST else 1)):
        width, column = part_of(part, TILE, REST)
        if const.KV8:
            width = width // const.NUMBERS
        if spans_pages(const):
            found = load_pages(array, (entry, keys.kv_head, column), width, LATENCY, const)
            if TRANSPOSED:
                found = ct.permute(found, (1, 0))
        elif TRANSPOSED:
            index, block = (entry, keys.kv_head, column, j), (1, 1, width, const.TILE_N)
            found = load(array, index, block, (0, 1, 3, 2), LATENCY, const.TMA_LOADS, const)
            found = found.reshape((width, const.TILE_N))
        else:
            index, block = (entry, keys.kv_head, j, column), (1, 1, const.TILE_N, width)
            found = load(array, index, block, "C", LATENCY, const.TMA_LOADS, const).reshape((const.TILE_N, width))
        parts = (*parts, found)
    return parts


def score(q, k, const):
    """The product q @ k, summed over the parts of their columns, `[TILE_M, TILE_N]`."""
    product = ct.full((const.TILE_M, const.TILE_N), 0.0, dtype=ct.float16 if const.FP16_ACCUM else ct.float32)
    for part in ct.static_iter(range(key_planes(const) if const.KV8 else 2 if const.REST_D else 1)):
        product = ct.mma(q[part], k[part], product, use_fast_acc=const.Q8 > 0)
    return product


def fold(rows, keys, i, chains, scores, MASKED, scale_log2, const):
    """The chains after the `i`-th step, whose values all of them use."""
    halves = tuple(
        soften(chains[s], scores[s], rows[s], keys, i, MASKED, scale_log2, const)
        for s in ct.static_iter(range(const.Q_SUBTILES))
    )
    values = tuple(
        load_tile(keys.V, keys, i, t, const.TILE_V, const.REST_V, const.LATENCY_V, False, const)
        for t in ct.static_iter(range(const.KV_SUBTILES))
    )
    if const.PAGE and MASKED:
        values = tuple(
            used_values(values[t], keys, key_tile(keys, i, t, const), const)
            for t in ct.static_iter(range(const.KV_SUBTILES))
        )
    if const.WEIGHT_MOD:
        halves = tuple(
            (halves[s][0], weighted(halves[s][1], rows[s], keys, i, const))
            for s in ct.static_iter(range(const.Q_SUBTILES))
        )
    if const.KV8:
        found = tuple(accumulate_words(chain, p, values, keys, i, const) for chain, p in ct.static_iter(halves))
    else:
        found = tuple(accumulate(chain, p, values, const) for chain, p in ct.static_iter(halves))
    return found


def weighted(p, rows, keys, i, const):
    """The probabilities of the `i`-th step, multiplied with what a function says. Their sum was taken before."""
    first = ct.arange(const.TILE_N, dtype=ct.int32)[None, :]
    return tuple(
        p[t] * weights_by_mod(key_tile(keys, i, t, const) * const.TILE_N + first, rows, keys.variant)
        for t in ct.static_iter(range(const.KV_SUBTILES))
    )


def soften(chain, scores, rows, keys, i, MASKED, scale_log2, const):
    """(chain, probabilities) of one step: the chain has its sum updated and its accumulator rescaled."""
    scores = tuple(
        mask(scores[t].astype(ct.float32), rows, keys, key_tile(keys, i, t, const), MASKED, const)
        for t in ct.static_iter(range(const.KV_SUBTILES))
    )
    step_max = ct.max(scores[0], axis=-1, keepdims=True)
    for t in ct.static_iter(range(1, const.KV_SUBTILES)):
        step_max = ct.maximum(step_max, ct.max(scores[t], axis=-1, keepdims=True))
    step_max = step_max * scale_log2
    if const.Q8:
        step_max = step_max - EIGHT_BIT_POWER
    new_max = ct.maximum(chain.row_max, step_max)
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
    """Each part of an accumulator, times `alpha`."""
    return tuple(part * alpha.astype(part.dtype) for part in ct.static_iter(acc))


def add_rows(row_sum, p):
    """`row_sum` plus the sums of the rows of the tiles `p`."""
    for tile in ct.static_iter(p):
        row_sum = row_sum + ct.sum(tile, axis=-1, keepdims=True)
    return row_sum


def mask(scores, rows, keys, j, MASKED, const):
    """The scores of key tile `j`, as the author's function changes them, with minus infinity where a row does not see a key."""
    if const.SCORE_MOD:
        scores = modified(scores, rows, keys, j, const) * LOG2_E
    if MASKED and (const.CAUSAL or not const.EVEN or const.MASK_MOD):
        columns = j * const.TILE_N + ct.arange(const.TILE_N, dtype=ct.int32)[None, :]
        visible = ct.full((1, 1), True, dtype=ct.bool_)
        if const.CAUSAL or not const.EVEN:
            visible = seen(columns, rows, keys, const)
        if const.MASK_MOD:
            visible = visible & seen_by_mod(columns, rows, keys, const)
        scores = ct.where(visible, scores, -math.inf)
    return scores


def accumulate(chain, p, values, const):
    """The chain with the product of the probabilities and the values added to its accumulator."""
    acc = ()
    for part in ct.static_iter(range(const.NUMBERS if const.KV8 else 2 if const.REST_V else 1)):
        total = chain.acc[part]
        for t in ct.static_iter(range(const.KV_SUBTILES)):
            total = ct.mma(p[t].astype(values[t][part].dtype), values[t][part], total, use_fast_acc=const.Q8 > 0)
        acc = (*acc, total)
    return Chain(acc, chain.row_max, chain.row_sum)


def accumulate_words(chain, p, words, keys, i, const):
    """The chain with the product of the probabilities and values in 8 bits, given as words, added to its accumulator.

    Where each page of values has a scale, probabilities are multiplied with the scales of a step divided by the largest of them,
    which float16 holds, and the product with that one.
    """
    values = tuple(planes_of_values(each[0], const) for each in ct.static_iter(words))
    if const.KV8 == PER_PAGE:
        places = tuple(existing_tile(keys, i, t, const) for t in ct.static_iter(range(const.KV_SUBTILES)))
        factors, largest = scales_of_values(keys, places, const)
        p = tuple(p[t] * factors[t] for t in ct.static_iter(range(const.KV_SUBTILES)))
        empty = tuple(ct.full(part.shape, 0.0, dtype=ct.float32) for part in ct.static_iter(chain.acc))
        added = accumulate(Chain(empty, chain.row_max, chain.row_sum), p, values, const).acc
        acc = tuple(chain.acc[n] + added[n] * largest for n in ct.static_iter(range(const.NUMBERS)))
        chain = Chain(acc, chain.row_max, chain.row_sum)
    else:
        chain = accumulate(chain, p, values, const)
    return chain
