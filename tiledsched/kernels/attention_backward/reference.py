"""The gradients of attention in NumPy or CuPy, by formula and in high precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tiledsched.kernels.attention.reference import ROWS_PER_CHUNK, masked_scores


def attention_gradients(
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    gradient: Any,
    lse: Any,
    dlse: Any = None,
    *,
    scale: float,
    dtype: str = "float64",
    cap: float = 0.0,
    sinks: Any = None,
    starts: Any = None,
    lengths: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    alignment: str = "top_left",
    modified: Callable[..., Any] | None = None,
    slope: Callable[..., Any] | None = None,
    rows_per_chunk: int = ROWS_PER_CHUNK,
    **mask: Any,
) -> tuple[Any, Any, Any, Any]:
    """The gradients of q, k, v and the sinks, as far as `out` and `lse` are what attention gives for the other inputs.

    Args:
        xp: numpy or cupy.
        q, k, v: as for :func:`tiledsched.kernels.attention.reference.attention_and_lse`, and likewise what is not listed here.
        out: `[batch, heads, seq_q, value_columns]`, the output of attention.
        gradient: the gradient of `out`.
        lse: `[batch, heads, seq_q]`, its log-sum-exp; minus infinity for rows that see nothing, whose gradients are 0.
        dlse: the gradient of `lse`; or None.
        slope: `slope(scores, b, h, first)`, the derivative of `modified` in the scores; or None.

    Returns:
        Arrays of the shapes of q, k, v and `[heads]`, in `dtype`. Without sinks the last is zero.
    """
    dq, dk, dv = (xp.zeros(each.shape, dtype=dtype) for each in (q, k, v))
    dsinks = xp.zeros(q.shape[1], dtype=dtype)
    group = q.shape[1] // k.shape[1]
    for entry, own_rows, own_keys, first, stop in _sequences(q, k, starts, lengths, cu_q, cu_k):
        seq_q, seq_k = own_rows.stop - own_rows.start, own_keys.stop - own_keys.start
        offset = seq_k - seq_q if alignment == "bottom_right" else 0
        columns = xp.arange(seq_k)
        used = (columns >= first) & (columns < stop)
        for h in range(q.shape[1]):
            # An unused slot may hold anything.
            keys, values = (
                xp.where(used[:, None], each[entry, h // group, own_keys].astype(dtype), 0.0) for each in (k, v)
            )
            for start in range(own_rows.start, own_rows.stop, rows_per_chunk):
                rows = slice(start, min(start + rows_per_chunk, own_rows.stop))
                place = rows.start - own_rows.start
                queries, wanted = (each[entry, h, rows].astype(dtype) for each in (q, gradient))
                own_lse = lse[entry, h, rows].astype(dtype)[:, None]
                seen = own_lse > -xp.inf
                delta = (wanted * out[entry, h, rows].astype(dtype)).sum(axis=-1, keepdims=True)
                if dlse is not None:
                    delta = delta - dlse[entry, h, rows].astype(dtype)[:, None]
                delta = xp.where(seen, delta, 0.0)
                if sinks is not None:
                    share = xp.exp(xp.where(seen, sinks[h].astype(dtype) - own_lse, -xp.inf))
                    dsinks[h] -= (share * delta).sum()
                if not seq_k:
                    continue
                at = {"b": entry, "h": h, "first": place}
                change = modified and functools.partial(modified, **at)
                scores, logits = masked_scores(
                    xp, queries, keys, place, used, scale=scale, cap=cap, offset=offset, modified=change, **mask
                )
                p = xp.exp(scores - xp.where(seen, own_lse, xp.inf))
                ds = p * (wanted @ values.T - delta)
                if cap:
                    ds = ds * (1.0 - (logits / cap) ** 2)
                if slope:
                    ds = xp.where(p > 0, ds * slope(scale * (queries @ keys.T), **at), 0.0)
                dv[entry, h // group, own_keys] += p.T @ wanted
                dq[entry, h, rows] = scale * (ds @ keys)
                dk[entry, h // group, own_keys] += scale * (ds.T @ queries)
    return dq, dk, dv, dsinks


def _sequences(q: Any, k: Any, starts: Any, lengths: Any, cu_q: Any, cu_k: Any) -> Iterator[tuple[Any, ...]]:
    """(entry, rows, keys, first key that counts, first that does not any more) of each sequence, the last two among its keys."""
    if cu_q is not None:
        for index in range(len(cu_q) - 1):
            rows, keys = (slice(int(cu[index]), int(cu[index + 1])) for cu in (cu_q, cu_k))
            yield 0, rows, keys, 0, keys.stop - keys.start
        return
    for entry in range(q.shape[0]):
        first = 0 if starts is None else int(starts[entry])
        stop = k.shape[2] if lengths is None else int(lengths[entry])
        yield entry, slice(0, q.shape[2]), slice(0, k.shape[2]), first, stop
