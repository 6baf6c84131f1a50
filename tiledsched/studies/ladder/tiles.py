"""A plain flash attention: one block for each tile of queries, which walks over the tiles of keys.

Online softmax: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv:1805.02867).
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math

import cuda.tile as ct

Int = ct.Constant[int]
Bool = ct.Constant[bool]
LOG2_E = 1.0 / math.log(2.0)


def attend(
    Q,
    K,
    V,
    Out,
    scale: float,
    head_dim: Int,
    TILE_M: Int,
    TILE_N: Int,
    CAUSAL: Bool,
    BASE2: Bool,
    TRANSPOSE: Bool,
    LATENCY_K: Int,
    LATENCY_V: Int,
    IEEE: Bool,
):
    """Out = softmax(scale * Q @ K^T, masked) @ V, all `[pairs, rows, head_dim]`, a pair being one head of one sequence.

    BASE2: exponentials to base 2, flushed to zero, in place of natural ones. TRANSPOSE: keys are loaded as they lie and
    transposed, in place of a load that transposes. LATENCY_K and LATENCY_V: hints to those loads; 0 for none. IEEE: the
    division is correctly rounded.
    """
    tile, pair = ct.bid(0), ct.bid(1)
    keys = K.shape[1]
    q = ct.load(Q, (pair, tile, 0), (1, TILE_M, head_dim), padding_mode=ct.PaddingMode.ZERO).reshape((TILE_M, head_dim))
    rows = tile * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    row_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    row_sum = ct.full((TILE_M, 1), 0.0, dtype=ct.float32)
    acc = ct.full((TILE_M, head_dim), 0.0, dtype=ct.float32)
    factor = scale * LOG2_E if BASE2 else scale
    last = min((tile + 1) * TILE_M, keys) if CAUSAL else keys
    for j in range(ct.cdiv(last, TILE_N)):
        k = load_keys(K, pair, j, TILE_N, head_dim, TRANSPOSE, LATENCY_K)
        scores = ct.mma(q, k, ct.full((TILE_M, TILE_N), 0.0, dtype=ct.float32)) * factor
        columns = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        visible = (columns <= rows) & (columns < keys) if CAUSAL else columns < keys
        scores = ct.where(visible, scores, -math.inf)
        new_max = ct.maximum(row_max, ct.max(scores, axis=-1, keepdims=True))
        p = power(scores - new_max, BASE2)
        alpha = power(row_max - new_max, BASE2)
        row_sum = row_sum * alpha + ct.sum(p, axis=-1, keepdims=True)
        v = ct.load(
            V,
            (pair, j, 0),
            (1, TILE_N, head_dim),
            padding_mode=ct.PaddingMode.ZERO,
            latency=None if LATENCY_V == 0 else LATENCY_V,
        )
        acc = ct.mma(p.astype(V.dtype), v.reshape((TILE_N, head_dim)), acc * alpha)
        row_max = new_max
    out = (
        ct.truediv(acc, row_sum)
        if IEEE
        else ct.truediv(acc, row_sum, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    )
    ct.store(Out, (pair, tile, 0), out.astype(Out.dtype).reshape((1, TILE_M, head_dim)))


def load_keys(K, pair, j, TILE_N, head_dim, TRANSPOSE, LATENCY):
    """The `j`-th tile of keys, `[head_dim, TILE_N]`."""
    latency = None if LATENCY == 0 else LATENCY
    if TRANSPOSE:
        k = ct.load(K, (pair, j, 0), (1, TILE_N, head_dim), padding_mode=ct.PaddingMode.ZERO, latency=latency)
        return ct.permute(k.reshape((TILE_N, head_dim)), (1, 0))
    k = ct.load(
        K, (pair, 0, j), (1, head_dim, TILE_N), order=(0, 2, 1), padding_mode=ct.PaddingMode.ZERO, latency=latency
    )
    return k.reshape((head_dim, TILE_N))


def power(x, BASE2):
    """2 to the power of x where BASE2 is set, else e to the power of x."""
    if BASE2:
        return ct.exp2(x, flush_to_zero=True)
    return ct.exp(x)
