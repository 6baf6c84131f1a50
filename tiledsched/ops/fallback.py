"""What the kernel does not serve: torch's attention, with one warning per reason, or an error where so configured."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn import functional

from tiledsched.core.errors import UnsupportedError
from tiledsched.ops.arguments import heads_grouped
from tiledsched.ops.features import NOTHING, AttentionFeatures, attend_beside, attend_seen
from tiledsched.serve.process import log, settings

torch_attention = functional.scaled_dot_product_attention
"""torch's own, whatever replaces it later."""
_warned: set[str] = set()


def report(reason: str) -> None:
    """Say once why a call goes to torch.

    Raises:
        UnsupportedError: the setting `fallback` is `error`.
    """
    if settings().fallback == "error":
        raise UnsupportedError(f"{reason} (setting fallback = error; set it to torch to use torch's attention)")
    if reason not in _warned:
        _warned.add(reason)
        log.info("torch's attention: %s", reason)
        warnings.warn(f"tiledsched.sdpa uses torch's attention: {reason}", stacklevel=4)


# Under torch.compile: called while tracing and not traced, so that the warning is given and the graph stays whole.
report._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget_warnings() -> None:
    """Give each warning once more."""
    _warned.clear()


def torch_sdpa(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, causal: str | None, scale: float | None
) -> Any:
    """torch's attention with our meaning of `causal`. Differentiable.

    Args:
        q, k, v: as for `sdpa`; heads may be grouped.
        attn_mask: a mask tensor or None.
        dropout_p: probability.
        causal: top_left, bottom_right or None.
        scale: softmax scale or None.
    """
    grouped = q.ndim == k.ndim == v.ndim >= 4 and q.shape[-3] != k.shape[-3] and heads_grouped(q, k, v)
    more: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, **({"enable_gqa": True} if grouped else {})}
    rows, columns = q.shape[-2], k.shape[-2]
    if causal != "bottom_right" or rows == columns:
        return torch_attention(q, k, v, attn_mask=attn_mask, is_causal=causal is not None, **more)
    if rows < columns:
        return torch_attention(q, k, v, attn_mask=causal_mask(q, k, causal), **more)
    # The first rows see nothing and are zero, as in the kernel; for the others both alignments are one.
    seen = torch_attention(q[..., rows - columns :, :], k, v, is_causal=True, **more)
    blind = seen.new_zeros((*seen.shape[:-2], rows - columns, seen.shape[-1]))
    return torch.cat([blind, seen], dim=-2)


def causal_mask(q: Any, k: Any, causal: str | None) -> Any:
    """`[rows of q, rows of k]`, True where a key is seen; None without a causal mask."""
    if causal is None:
        return None
    rows, columns = q.shape[-2], k.shape[-2]
    diagonal = columns - rows if causal == "bottom_right" else 0
    return torch.ones((rows, columns), dtype=torch.bool, device=q.device).tril(diagonal)


def attend_nested(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, causal: Any, scale: float | None, return_lse: bool
) -> Any:
    """torch's attention over nested tensors, of which torch says what fits.

    Raises:
        UnsupportedError: what torch has nothing for.
    """
    if return_lse or causal not in (False, True, "top_left"):
        what = "the log-sum-exp" if return_lse else f"causal = {causal!r}"
        raise UnsupportedError(
            f"{what} of nested tensors is not served, by torch neither; call it for each of their parts"
        )
    return torch_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=bool(causal), scale=scale)


def torch_lse(q: Any, k: Any, attn_mask: Any, causal: str | None, scale: float | None) -> Any:
    """Log-sum-exp of the scaled, masked scores of each row, natural, float32 `[batch, heads, rows]`.

    From the scores in full: torch has no public function for it. float32 products, whatever the dtype of q and k.
    """
    if k.ndim > 2 and not k.shape[-3]:  # no keys at all
        return q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
    if q.ndim == k.ndim >= 4 and k.shape[-3] != q.shape[-3] and heads_grouped(q, k, k):
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    scores = q.float() @ k.float().transpose(-2, -1) * (1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale)
    mask = causal_mask(q, k, causal) if attn_mask is None else attn_mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.logsumexp(scores, dim=-1)


def attend_in_torch(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    dropout_p: float,
    causal: str | None,
    scale: float | None,
    return_lse: bool,
    beside: AttentionFeatures = NOTHING,
) -> Any:
    """torch's attention, with the log-sum-exp where asked for; of what torch has nothing for, its operations."""
    if beside.placed:
        pair = attend_placed(q, k, v, dropout_p, causal, scale, beside)
        return pair if return_lse else pair[0]
    if beside is not NOTHING and any(beside.key):
        pair = attend_beside(q, k, v, attn_mask, dropout_p, causal, scale, beside)
        return pair if return_lse else pair[0]
    out = torch_sdpa(q, k, v, attn_mask, dropout_p, causal, scale)
    return (out, torch_lse(q, k, attn_mask, causal, scale).expand(out.shape[:-1])) if return_lse else out


def attend_placed(
    q: Any, k: Any, v: Any, dropout_p: float, causal: str | None, scale: float | None, beside: AttentionFeatures
) -> tuple[Any, Any]:
    """The output and the log-sum-exp of packed sequences or keys in pages, which are padded for it. Differentiable.

    Args:
        q: `[1, heads, rows of all, head_dim]`, or `[batch, heads, seq_q, head_dim]` where only the keys lie in pages.
        k, v: `[1, kv_heads, keys of all, ...]` or `[pages, kv_heads, page, ...]`.
        dropout_p, causal, scale: as for `sdpa`; bottom_right is each sequence's own.
        beside: where everything lies. The lengths of the longest are read from the device where they are not given.
    """
    rows_given = beside.cu_q is not None
    lengths_q = beside.cu_q.diff() if rows_given else None
    queries = _padded(q, beside.cu_q, lengths_q, beside.most_q) if rows_given else q
    if beside.table is None:
        lengths_k = beside.cu_k.diff()
        keys, values = (_padded(each, beside.cu_k, lengths_k, beside.most_k) for each in (k, v))
    else:
        table = beside.table.long().clamp(0, k.shape[0] - 1)
        keys, values = (each[table].transpose(1, 2).flatten(2, 3) for each in (k, v))
        lengths_k = beside.lengths.clamp(0, keys.shape[2])
    rows, columns = (torch.arange(size, device=q.device) for size in (queries.shape[2], keys.shape[2]))
    visible = (columns < lengths_k[:, None, None])[:, None]
    if causal is not None:
        own_rows = lengths_q if rows_given else queries.shape[2]
        before = lengths_k - own_rows if causal == "bottom_right" else torch.zeros_like(lengths_k)
        last = rows[:, None] + before[:, None, None, None]
        visible = visible & (columns <= last + beside.window_right)
        if beside.window:
            visible = visible & (columns > last - beside.window)
    out, lse = attend_seen(queries, keys, values, None, visible, dropout_p, scale, beside)
    if not rows_given:
        return out, lse
    places = torch.arange(q.shape[2], device=q.device)
    sequence = torch.searchsorted(beside.cu_q[1:].contiguous(), places.to(beside.cu_q.dtype), right=True)
    sequence = sequence.clamp(max=len(beside.cu_q) - 2)
    row = (places - beside.cu_q[sequence]).clamp(0, queries.shape[2] - 1)
    return out[sequence, :, row].transpose(0, 1)[None], lse[sequence, :, row].transpose(0, 1)[None]


def _padded(packed: Any, offsets: Any, lengths: Any, most: int) -> Any:
    """Packed sequences `[1, heads, rows of all, columns]` as `[sequences, heads, most, columns]`; zeros beyond their ends."""
    if not most:
        most = int(lengths.max())
    rows = torch.arange(max(1, most), device=packed.device)
    index = (offsets[:-1, None] + rows).clamp(0, packed.shape[2] - 1)
    found = packed[0].transpose(0, 1)[index.long()].transpose(1, 2)
    return found.masked_fill((rows >= lengths[:, None])[:, None, :, None], 0.0)
