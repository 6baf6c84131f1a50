"""Attention in high precision: what every candidate's output is compared with.

Written once for any array module with NumPy's interface, so that the CPU tests (NumPy) and the measuring process
(CuPy) share it.
"""

from __future__ import annotations

from typing import Any

from tiledsched.problem import Problem

ROWS_PER_CHUNK = 2048


def attention_reference(xp: Any, q: Any, k: Any, v: Any, *, causal: bool, scale: float, dtype: str = "float64") -> Any:
    """softmax(scale * q @ k^T, masked) @ v, computed in `dtype`.

    Args:
        xp: numpy or cupy.
        q: `[batch, heads, seq_q, head_dim]`, any float type NumPy can widen.
        k: `[batch, kv_heads, seq_k, head_dim]`; v likewise. Each serves heads / kv_heads query heads.
        causal: whether query row i sees key columns 0..i only.
        scale: softmax scale.
        dtype: float64, or float32 where the GPU's float64 is slow.

    Returns:
        `[batch, heads, seq_q, head_dim]` in `dtype`.
    """
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    group = heads // kv_heads
    out = xp.empty((batch, heads, seq_q, head_dim), dtype=dtype)
    for b in range(batch):
        for h in range(heads):
            keys = k[b, h // group].astype(dtype)
            values = v[b, h // group].astype(dtype)
            for start in range(0, seq_q, ROWS_PER_CHUNK):
                rows = slice(start, min(start + ROWS_PER_CHUNK, seq_q))
                scores = (q[b, h, rows].astype(dtype) @ keys.T) * scale
                if causal:
                    row = xp.arange(rows.start, rows.stop)[:, None]
                    scores = xp.where(xp.arange(seq_k)[None, :] <= row, scores, -xp.inf)
                scores -= scores.max(axis=-1, keepdims=True)
                xp.exp(scores, out=scores)
                out[b, h, rows] = (scores @ values) / scores.sum(axis=-1, keepdims=True)
    return out


def default_scale(problem: Problem) -> float:
    """1 / sqrt(head_dim), as in Vaswani et al. (arXiv:1706.03762), section 3.2.1."""
    return float(problem.head_dim) ** -0.5
