"""The second pass of attention's gradients, which makes dQ: a block owns a tile of query rows and goes over the keys."""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.attention.features import capped, narrowed, own_keys, seen, unmasked_turns
from tiledsched.kernels.attention.mods import changed_with_slope, listed_keys, variant_of, weights_by_mod
from tiledsched.kernels.attention.packed import first_place, own_rows, place_in_sequence
from tiledsched.kernels.attention.scheduler import coordinates, rows_of
from tiledsched.kernels.attention.tiles import Keys
from tiledsched.kernels.attention_backward.tiles import (
    Rows,
    across,
    load_parts,
    load_queries,
    row_values,
    score_gradients,
    score_shape,
    store_parts,
    store_zeros,
    with_bits,
    zero_parts,
)


def compute_queries(Q, K, V, dOut, LseLog2, Delta, dQ, scale_log2, scale, features, const):
    """dQ of the work tiles of the current block."""
    place_count = ct.cdiv(Q.shape[2], const.TILE_M)
    if const.PACKED:
        place_count = Q.shape[2] // const.TILE_M + features.CuQ.shape[0]
    total = place_count * Q.shape[1] * Q.shape[0]
    if const.PERSISTENT:
        for work in range(ct.bid(0), total, ct.num_blocks(0)):
            compute_query_tile(Q, K, V, dOut, LseLog2, Delta, dQ, scale_log2, scale, work, place_count, features, const)
    else:
        compute_query_tile(
            Q, K, V, dOut, LseLog2, Delta, dQ, scale_log2, scale, ct.bid(0), place_count, features, const
        )


def compute_query_tile(Q, K, V, dOut, LseLog2, Delta, dQ, scale_log2, scale, work, place_count, features, const):
    """dQ of one tile of query rows."""
    place, head, batch = coordinates(work, place_count, Q.shape[1], Q.shape[0], const)
    if const.PACKED:
        behind = place - first_place(features.CuQ.shape[0] - 1, const.TILE_M, features)
        if behind >= 0:
            store_zeros(dQ, features.CuQ, behind, head, const.TILE_M, const.TILE_D, const.REST_D)
        else:
            place, sequence = place_in_sequence(place, const.TILE_M, features)
            K, V = own_rows(K, features.CuK, sequence), own_rows(V, features.CuK, sequence)
            Q, dOut = own_rows(Q, features.CuQ, sequence), own_rows(dOut, features.CuQ, sequence)
            LseLog2, Delta = own_rows(LseLog2, features.CuQ, sequence), own_rows(Delta, features.CuQ, sequence)
            dQ = own_rows(dQ, features.CuQ, sequence)
            if place * const.TILE_M < Q.shape[2]:
                store_query_sums(
                    Q, K, V, dOut, LseLog2, Delta, dQ, scale_log2, scale, place, head, batch, features, const
                )
    else:
        store_query_sums(Q, K, V, dOut, LseLog2, Delta, dQ, scale_log2, scale, place, head, batch, features, const)


def store_query_sums(Q, K, V, dOut, LseLog2, Delta, dQ, scale_log2, scale, place, head, batch, features, const):
    """dQ of the tile of query rows at `place` of a head."""
    offset = K.shape[2] - Q.shape[2] if const.BOTTOM_RIGHT else 0
    if const.WINDOW_RIGHT:
        offset = offset + features.window_right
    if const.STARTS or const.LENGTHS:
        K, V, offset = own_keys(K, V, batch, offset, features, const)
    first_masked, steps, span = narrowed(place, batch, offset, K, features, const)
    variant, first = None, 0
    if const.MODS:
        variant = variant_of(0, head, batch, offset, features, const)
    if const.BLOCK:
        block, tiles = place * const.TILE_M // const.BLOCK, const.BLOCK // const.TILE_N
        least, most = listed_keys(head, batch, block, features.Blocks)
        steps = min(steps, (most + 1) * tiles)
        first = min(least * tiles, steps)
    keys = Keys(K, V, batch, head // const.GROUP, steps, 0, steps, 0, span, variant)
    rows = Rows(Q, dOut, LseLog2, Delta, None, batch, head)
    q = load_queries(Q, rows, place, const.TILE_D, const.REST_D, 0, const)
    gradient = load_queries(dOut, rows, place, const.TILE_V, const.REST_V, 0, const)
    own = (q, gradient, row_values(LseLog2, rows, place, const), row_values(Delta, rows, place, const))
    last = rows_of(place, offset, const)
    sums = zero_parts(const.TILE_M, const.TILE_D, const.REST_D)
    loops = ((first, steps, True),)
    if const.LOOP_SPLIT and const.WINDOW:
        boundary, second = unmasked_turns(keys, first_masked, 0, steps, const)
        loops = ((0, boundary, True), (boundary, second, False), (second, steps, True))
    elif const.LOOP_SPLIT:
        boundary = min(first_masked, steps)
        if const.BLOCK:
            boundary = max(boundary, first)
        loops = ((first, boundary, False), (boundary, steps, True))
    for begin, end, masked in ct.static_iter(loops):
        for j in range(begin, end):
            sums = key_step(keys, own, last, j, sums, masked, scale_log2, const)
    scaled = tuple(part * scale for part in ct.static_iter(sums))
    store_parts(dQ, (batch, head, place), scaled, const.TILE_M, const.TILE_D, const.REST_D)


def key_step(keys, own, last, j, sums, MASKED, scale_log2, const):
    """The sums of a tile of query rows after the `j`-th tile of the keys that they see."""
    if const.WINDOW:
        j = j + keys.span.first
    index = (keys.batch, keys.kv_head, j)
    k = load_parts(keys.K, index, const.TILE_N, const.TILE_D, const.REST_D, const.LATENCY_Q, const.TMA_LOADS)
    v = load_parts(keys.V, index, const.TILE_N, const.TILE_V, const.REST_V, const.LATENCY_DO, const.TMA_LOADS)
    q, gradient, lse, delta = own
    zeros = ct.zeros(score_shape(const), ct.float32)
    logits, slope, factors = capped(across(k, q, zeros, const), keys, const), None, None
    if const.MODS:
        columns = j * const.TILE_N + ct.arange(const.TILE_N, dtype=ct.int32)[None, :]
        logits, slope = changed_with_slope(logits, columns, last, columns < keys.K.shape[2], keys)
        factors = weights_by_mod(columns, last, keys.variant)
    if slope is not None:
        lse = with_bits(lse)
    p = ct.exp2(logits * scale_log2 - lse, flush_to_zero=True)
    if MASKED and (const.CAUSAL or not const.EVEN):
        columns = j * const.TILE_N + ct.arange(const.TILE_N, dtype=ct.int32)[None, :]
        p = ct.where(seen(columns, last, keys, const), p, 0.0)
    dp = across(v, gradient, zeros, const)
    ds = score_gradients(p, (dp if factors is None else dp * factors) - delta, slope, logits, const).astype(k[0].dtype)
    parts = ()
    for part in ct.static_iter(range(len(sums))):
        parts = (*parts, ct.mma(ds, k[part], sums[part]))
    return parts
