"""Attention in high precision: what every candidate's output is compared with.

Written once for any array module with NumPy's interface, so that the CPU tests (NumPy) and the measuring process
(CuPy) share it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tiledsched.core.arrays import to_float
from tiledsched.kernels.attention.options import EIGHT_BITS

ROWS_PER_CHUNK = 2048


def attention_and_lse(
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float,
    dtype: str = "float64",
    alignment: str = "top_left",
    window: int = 0,
    window_right: int = 0,
    cap: float = 0.0,
    sinks: Any = None,
    starts: Any = None,
    lengths: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    table: Any = None,
    modified: Callable[..., Any] | None = None,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> tuple[Any, Any]:
    """softmax(scale * q @ k^T, masked) @ v and log(sum(exp(scale * q @ k^T, masked))), computed in `dtype`.

    Args:
        xp: numpy or cupy.
        q: `[batch, heads, seq_q, head_dim]`, any float type NumPy can widen.
        k: `[batch, kv_heads, seq_k, head_dim]`. Each serves heads / kv_heads query heads.
        v: `[batch, kv_heads, seq_k, value_columns]`, likewise.
        causal: whether query row i sees key columns 0..i only, or, aligned at the bottom right, 0..i + seq_k - seq_q.
        scale: softmax scale.
        dtype: float64, or float32 where the GPU's float64 is slow.
        alignment: top_left or bottom_right.
        window: keys that a row sees at most, up to its own; 0 for all.
        window_right: keys that it sees after its own where `causal`.
        cap: of scaled scores, cap * tanh(score / cap); 0 for none.
        sinks: `[heads]`, a logit more in each row's denominator; or None.
        starts, lengths: `[batch]`, the first key that counts and the first that does not any more; or None.
        cu_q, cu_k: `[sequences + 1]`, where packed sequences begin and end in q and in k and v, whose batch is 1; or None.
        table: `[sequences, pages]`, which entries of k and v `[entries, kv_heads, page, ...]` hold a sequence's keys, up to
            its length, where the causal diagonal ends when it is aligned at the bottom right; or None.
        modified: `modified(scores, b, h, first)`, other scores of the rows `[rows, seq_k]` of a head from row `first` on, before
            any mask; or None.
        rows_per_chunk: rows whose scores are in memory at a time.

    Returns:
        `[batch, heads, seq_q, value_columns]` and `[batch, heads, seq_q]` in `dtype`. A row that sees no key gives zeros
        and minus infinity.
    """
    more = {
        "causal": causal,
        "scale": scale,
        "dtype": dtype,
        "alignment": alignment,
        "window": window,
        "window_right": window_right,
        "cap": cap,
        "sinks": sinks,
    }
    if cu_q is not None or table is not None:
        return _one_by_one(xp, q, k, v, cu_q, cu_k, table, lengths, more)
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    group = heads // kv_heads
    offset = seq_k - seq_q if alignment == "bottom_right" else 0
    out = xp.empty((batch, heads, seq_q, v.shape[3]), dtype=dtype)
    lse = xp.empty((batch, heads, seq_q), dtype=dtype)
    for start in range(0, seq_q, rows_per_chunk):
        rows = slice(start, min(start + rows_per_chunk, seq_q))
        for b in range(batch):
            for h in range(heads):
                keys = k[b, h // group].astype(dtype)
                values = v[b, h // group].astype(dtype)
                columns = xp.arange(seq_k)
                used = (columns >= (0 if starts is None else int(starts[b]))) & (
                    columns < (seq_k if lengths is None else int(lengths[b]))
                )
                values = xp.where(used[:, None], values, 0.0)  # an unused slot may hold anything
                scores, _ = masked_scores(
                    xp,
                    q[b, h, rows].astype(dtype),
                    keys,
                    start,
                    used,
                    causal=causal,
                    scale=scale,
                    offset=offset,
                    window=window,
                    window_right=window_right,
                    cap=cap,
                    modified=modified and functools.partial(modified, b=b, h=h, first=start),
                )
                largest = scores.max(axis=-1, keepdims=True)
                if sinks is not None:
                    largest = xp.maximum(largest, sinks[h].astype(dtype))
                seen = largest > -xp.inf
                scores -= xp.where(seen, largest, 0.0)
                xp.exp(scores, out=scores)
                total = scores.sum(axis=-1, keepdims=True)
                if sinks is not None:
                    total = total + xp.exp(sinks[h].astype(dtype) - xp.where(seen, largest, 0.0))
                total = xp.where(seen, total, 1.0)
                out[b, h, rows] = (scores @ values) / total
                lse[b, h, rows] = (largest + xp.log(total))[:, 0]
    return out, lse


def scaled_numbers(xp: Any, words: Any, scales: Any, p: Any, dtype: str) -> Any:
    """Keys or values `[entries, kv_heads, rows, columns]` in `dtype`, of the words that hold them in 8 bits, or, with queries in
    8 bits, of the numbers; and of their scales."""
    return (words if p.q8 else to_float(xp, words.view("uint8"), EIGHT_BITS, dtype)) * by_row(scales.astype(dtype), p)


def by_row(scales: Any, p: Any) -> Any:
    """Scales as an array that numbers `[entries, kv_heads, rows, columns]` are multiplied with."""
    return scales.reshape((-1, 1, 1, 1) if p.kv8 == "page" else (1, -1, 1, 1))


def masked_scores(
    xp: Any,
    queries: Any,
    keys: Any,
    first_row: int,
    used: Any,
    *,
    causal: bool,
    scale: float,
    offset: int,
    window: int = 0,
    window_right: int = 0,
    cap: float = 0.0,
    modified: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Scores `[rows, keys]` of queries from row `first_row` on, with minus infinity where a row does not see a key, and without.

    `used` says which keys count at all, and `offset` how many keys the first row of the sequence sees before its own. For
    the rest see :func:`attention_and_lse`.
    """
    logits = (queries @ keys.T) * scale
    if cap:
        logits = cap * xp.tanh(logits / cap)
    if modified:
        logits = modified(logits)
    scores = xp.where(used, logits, -xp.inf)
    if causal:
        columns = xp.arange(len(keys))
        last = xp.arange(first_row, first_row + len(queries))[:, None] + offset
        visible = columns <= last + window_right
        if window:
            visible &= columns > last - window
        scores = xp.where(visible, scores, -xp.inf)
    return scores, logits


def _one_by_one(
    xp: Any, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, table: Any, lengths: Any, more: dict[str, Any]
) -> tuple[Any, Any]:
    """Outputs and log-sum-exps of packed sequences or of keys in pages, computed one sequence at a time."""
    out = xp.zeros((*q.shape[:3], v.shape[3]), dtype=more["dtype"])
    lse = xp.zeros(q.shape[:3], dtype=more["dtype"])
    for index in range(len(table) if cu_q is None else len(cu_q) - 1):
        entry, rows = (index, slice(None)) if cu_q is None else (0, slice(int(cu_q[index]), int(cu_q[index + 1])))
        queries = q[entry : entry + 1, :, rows]
        if table is None:
            own = slice(int(cu_k[index]), int(cu_k[index + 1]))
            keys, values = k[:, :, own], v[:, :, own]
        else:
            length, page = int(lengths[index]), k.shape[2]
            places = [int(each) for each in table[index][: -(-length // page)]]
            keys, values = (
                xp.concatenate([each[:0].reshape(each.shape[1], 0, each.shape[3]), *(each[i] for i in places)], axis=1)[
                    None, :, :length
                ]
                for each in (k, v)
            )
        if queries.shape[2] and not keys.shape[2]:  # a key that no row sees stands for none
            keys, values = (xp.zeros((1, *each.shape[1:2], 1, each.shape[3]), dtype=each.dtype) for each in (k, v))
            part = attention_and_lse(xp, queries, keys, values, **more, lengths=[0])
        elif queries.shape[2]:
            part = attention_and_lse(xp, queries, keys, values, **more)
        else:
            continue
        out[entry, :, rows], lse[entry, :, rows] = part[0][0], part[1][0]
    return out, lse
