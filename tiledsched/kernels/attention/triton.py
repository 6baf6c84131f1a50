# mypy: allow-untyped-defs
"""A flash-attention forward kernel in Triton: another compiler's solution of the same problem.

It shares no code with the cuTile kernel. The algorithm is that of FlashAttention-2 (Dao, arXiv:2307.08691, section 3.1):
a block keeps one tile of queries, walks over the keys, and rescales its sum when a row maximum grows.

Annotations are left unquoted here (no `from __future__ import annotations`): Triton reads them.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
SHORT = 32
"""Query rows up to which the autotuner tries small tiles."""


@triton.jit
def _walk(
    accumulator,
    row_max,
    row_sum,
    q,
    k_tile,
    v_tile,
    k_step,
    v_step,
    rows,
    start,
    stop,
    seq_k,
    diagonal,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
    TILE_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Key columns `start` to `stop`; MASKED where some of them may be out of bounds or above the diagonal."""
    d, e, n = tl.arange(0, PAD_D), tl.arange(0, PAD_V), tl.arange(0, TILE_N)
    for first in range(start, stop, TILE_N):
        columns = first + n
        # One mask for each shape of load: a constant mask costs nothing where head_dim is a power of two.
        k_mask, v_mask = d[:, None] < HEAD_DIM, e[None, :] < VALUE_DIM
        if MASKED:
            k_mask = k_mask & (columns[None, :] < seq_k)
            v_mask = v_mask & (columns[:, None] < seq_k)
        k = tl.load(k_tile + columns[None, :] * k_step + d[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(q, k) * scale_log2
        if MASKED:
            visible = columns[None, :] < seq_k
            if CAUSAL:
                visible = visible & (columns[None, :] <= rows[:, None] + diagonal)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = new_max
        if MASKED:
            base = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        v = tl.load(v_tile + columns[:, None] * v_step + e[None, :], mask=v_mask, other=0.0)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator * shrink[:, None])
        row_max = new_max
    return accumulator, row_max, row_sum


@triton.jit(do_not_specialize=["heads", "group", "diagonal"])
def attention_forward(
    Q,
    K,
    V,
    Out,
    scale_log2,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    out_batch,
    out_head,
    out_row,
    heads,
    group,
    seq_q,
    seq_k,
    diagonal,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_D: tl.constexpr,
    PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """One tile of TILE_M query rows of one (batch, head); the last axis of every array is contiguous."""
    first_row = tl.program_id(0) * TILE_M
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    kv_head = head // group
    rows = first_row + tl.arange(0, TILE_M)
    d, e = tl.arange(0, PAD_D), tl.arange(0, PAD_V)
    q = tl.load(
        Q + batch * q_batch + head * q_head + rows[:, None] * q_row + d[None, :],
        mask=(rows[:, None] < seq_q) & (d[None, :] < HEAD_DIM),
        other=0.0,
    )
    k_tile, v_tile = K + batch * k_batch + kv_head * k_head, V + batch * v_batch + kv_head * v_head
    accumulator = tl.zeros([TILE_M, PAD_V], dtype=tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([TILE_M], dtype=tl.float32)
    stop, free = seq_k, seq_k  # columns seen by any row of the tile, and by all of them
    if CAUSAL:
        stop = tl.minimum(seq_k, tl.maximum(0, first_row + TILE_M + diagonal))
        free = tl.minimum(seq_k, tl.maximum(0, first_row + 1 + diagonal))
    unmasked = free // TILE_N * TILE_N
    accumulator, row_max, row_sum = _walk(
        accumulator,
        row_max,
        row_sum,
        q,
        k_tile,
        v_tile,
        k_row,
        v_row,
        rows,
        0,
        unmasked,
        seq_k,
        diagonal,
        scale_log2,
        HEAD_DIM,
        VALUE_DIM,
        PAD_D,
        PAD_V,
        TILE_N,
        CAUSAL,
        False,
    )
    accumulator, row_max, row_sum = _walk(
        accumulator,
        row_max,
        row_sum,
        q,
        k_tile,
        v_tile,
        k_row,
        v_row,
        rows,
        unmasked,
        stop,
        seq_k,
        diagonal,
        scale_log2,
        HEAD_DIM,
        VALUE_DIM,
        PAD_D,
        PAD_V,
        TILE_N,
        CAUSAL,
        True,
    )
    result = accumulator / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # a row that sees nothing is zero
    tl.store(
        Out + batch * out_batch + head * out_head + rows[:, None] * out_row + e[None, :],
        result.to(Out.dtype.element_ty),
        mask=(rows[:, None] < seq_q) & (e[None, :] < VALUE_DIM),
    )


def _config(tile_m, tile_n, warps, stages):
    return triton.Config({"TILE_M": tile_m, "TILE_N": tile_n}, num_warps=warps, num_stages=stages)


CONFIGS = [
    _config(128, 128, 8, 3),
    _config(128, 64, 8, 3),
    _config(128, 64, 4, 3),
    _config(64, 64, 4, 3),
    _config(64, 128, 4, 2),
    _config(64, 32, 4, 2),
    _config(16, 64, 4, 4),
    _config(16, 128, 4, 3),
]
"""What the autotuner chooses among. The last two are for few rows, the one before for archs with little shared memory."""


def _worth_trying(configs, arguments, **constants):
    """The configurations worth trying: small tiles where there are few rows, the others where there are many."""
    few = arguments["seq_q"] <= SHORT
    return [config for config in configs if (config.kwargs["TILE_M"] == 16) == few]


def _time(call, quantiles):
    """Times a configuration briefly: a bench of a hundred shapes cannot spend a second on each."""
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


autotuned = triton.autotune(
    configs=CONFIGS,
    key=["seq_q", "seq_k", "heads", "HEAD_DIM", "VALUE_DIM", "CAUSAL"],
    prune_configs_by={"early_config_prune": _worth_trying},
    do_bench=_time,
)(attention_forward)


def triton_attention(q, k, v, *, causal=False, bottom_right=False, scale=None, kernel=autotuned, **config):
    """softmax(scale * q @ k^T) @ v.

    Args:
        q: `[batch, heads, seq_q, head_dim]`, float16 or bfloat16, last axis contiguous.
        k: `[batch, kv_heads, seq_k, head_dim]`; heads a multiple of kv_heads.
        v: `[batch, kv_heads, seq_k, value_dim]`.
        causal: query row i sees key columns 0..i.
        bottom_right: with causal: 0..i + seq_k - seq_q.
        scale: 1 / sqrt(head_dim) unless given.
        kernel: the autotuned kernel, or `attention_forward` with its TILE_M and TILE_N in `config`.

    Returns:
        `[batch, heads, seq_q, value_dim]`, of q's dtype; rows that see no key are zero.
    """
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k, value_dim = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty((batch, heads, seq_q, value_dim))
    scale = head_dim**-0.5 if scale is None else scale

    def grid(meta):
        return triton.cdiv(seq_q, meta["TILE_M"]), batch * heads

    kernel[grid](
        q,
        k,
        v,
        out,
        scale * LOG2_E,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        heads,
        heads // kv_heads,
        seq_q,
        seq_k,
        seq_k - seq_q if bottom_right else 0,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        PAD_D=max(16, triton.next_power_of_2(head_dim)),
        PAD_V=max(16, triton.next_power_of_2(value_dim)),
        CAUSAL=causal,
        **config,
    )
    return out
