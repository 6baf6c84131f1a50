"""Attention that the kernel does not serve: torch's, with one warning per reason, or an error where the settings say so."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from typing import Any

import torch
from torch.nn import functional

from tiledsched.core.config import log
from tiledsched.core.errors import UnsupportedError
from tiledsched.kernels.attention.backends import output_dtype
from tiledsched.ops.arguments import heads_grouped
from tiledsched.ops.features import NO_FEATURES, AttentionFeatures
from tiledsched.serve.process import is_invariant, settings

MOST_SCORES = 1 << 28
"""Scores, of 4 bytes each, that may be kept in full for a call that could wait instead."""
torch_attention = functional.scaled_dot_product_attention
"""The attention function of torch, even after something replaced it in torch."""


def report(reason: str, features: Any = NO_FEATURES) -> None:
    """Warn once for each reason why a call goes to torch, or to what else its `features` name.

    Raises:
        UnsupportedError: the setting `fallback` is `error`.
    """
    if is_invariant():
        raise UnsupportedError(
            f"{reason}; {features.elsewhere}, which computes such calls, has bits that depend on the batch: call it outside of "
            "batch_invariant()"
        )
    if settings().fallback == "error":
        raise UnsupportedError(f"{reason} (setting fallback = error; set it to torch to use {features.elsewhere})")
    _warn(reason, features.front, features.elsewhere)


@functools.cache
def _warn(reason: str, front: str, elsewhere: str) -> None:
    log.info("%s: %s", elsewhere, reason)
    warnings.warn(f"tiledsched.{front} uses {elsewhere}: {reason}", stacklevel=6)


# Under torch.compile: called while tracing and not traced, so that the warning is given and the graph stays whole.
report._dynamo_marked_constant = True  # type: ignore[attr-defined]


forget_warnings = _warn.cache_clear
"""Have each warning given once more."""


def attend_in_torch(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    dropout_p: float,
    causal: str | None,
    scale: float | None,
    return_lse: bool,
    features: AttentionFeatures = NO_FEATURES,
) -> Any:
    """Attention in torch, with the log-sum-exp where it is wanted. Differentiable.

    torch's own function is used where it can compute the call; otherwise torch's operations on the full scores.

    Args:
        q, k, v: as for `sdpa`; heads may be grouped. Packed sequences and pages as in
            :class:`tiledsched.ops.plans.AttentionCall`.
        attn_mask: a mask tensor or None.
        dropout_p: probability.
        causal: top_left, bottom_right or None.
        scale: softmax scale or None.
        return_lse: return a pair.
        features: everything else.
    """
    if features.k_scale is not None:
        q = q.to(output_dtype(q))
        k, v = (
            (
                each.float()
                * by.float().reshape(() if by.numel() == 1 else (-1, 1, 1, 1) if features.kv8 == "page" else (-1, 1, 1))
            ).to(q.dtype)
            for each, by in ((k, features.k_scale), (v, features.v_scale))
        )
        features = features._replace(k_scale=None, v_scale=None)
    if features.attn_mask is not None:
        attn_mask, features = features.attn_mask, NO_FEATURES
    if features.by_reference is not None:
        out, lse = features.by_reference(q, k, v, scale)
    elif features.is_varlen:
        out, lse = _attend_varlen(q, k, v, dropout_p, causal, scale, features)
    elif any(features.key):
        visible = visible_keys(q, k, causal, features)
        out, lse = attend_visible(q, k, v, attn_mask, visible, dropout_p, scale, features)
    else:
        out = _attend_plain(q, k, v, attn_mask, dropout_p, causal, scale)
        lse = _plain_lse(q, k, v, attn_mask, causal, scale).expand(out.shape[:-1]) if return_lse else None
    return (out, lse) if return_lse else out


def computes_at_once(
    q: Any, k: Any, causal: str | None, lse: bool, features: AttentionFeatures, most: int = MOST_SCORES
) -> bool:
    """Whether :func:`attend_in_torch` may stand in while a program is compiled: by torch's own function, or with scores in full
    that take a gigabyte at most, and without reading lengths from the device.

    Args:
        q, k, causal, features: as there.
        lse: whether the log-sum-exp is wanted.
        most: number of scores that may be kept in full.
    """
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    if features.by_reference is not None and features.attn_mask is None:
        return False
    if features.is_varlen:
        if features.cu_seqlens_q is not None:
            batch, rows = features.cu_seqlens_q.shape[0] - 1, features.max_seqlen_q
        keys = features.max_seqlen_k if features.block_table is None else keys * features.block_table.shape[1]
        return 0 < batch * heads * rows * keys <= most
    in_full = any(features.key) and features.attn_mask is None
    in_full = in_full or lse or (causal == "bottom_right" and rows > keys)
    return not in_full or batch * heads * rows * keys <= most


def attend_nested(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, causal: Any, scale: float | None, return_lse: bool
) -> Any:
    """torch's attention over nested tensors; torch itself checks that they fit together.

    Raises:
        UnsupportedError: torch cannot compute it.
    """
    if return_lse or causal not in (False, True, "top_left"):
        what = "the log-sum-exp" if return_lse else f"causal = {causal!r}"
        raise UnsupportedError(
            f"{what} of nested tensors is not served, by torch neither; call it for each of their parts"
        )
    return torch_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=bool(causal), scale=scale)


def visible_keys(q: Any, k: Any, causal: str | None, features: AttentionFeatures) -> Any:
    """`[batch or 1, 1, rows or 1, keys]`, True where only a mask tensor may hide a key; None where every key is visible."""
    keys = torch.arange(k.shape[-2], device=q.device)
    visible = None
    if causal is not None:
        before = k.shape[-2] - q.shape[-2] if causal == "bottom_right" else 0
        visible = _below_diagonal(q.shape[-2], keys, before, features)[None, None]
    for edge, counts in ((features.key_starts, operator.ge), (features.key_lengths, operator.lt)):
        if edge is not None:
            own = counts(keys, edge[:, None])[:, None, None]
            visible = own if visible is None else visible & own
    return visible


def attend_visible(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    visible: Any,
    dropout_p: float,
    scale: float | None,
    features: AttentionFeatures,
) -> tuple[Any, Any]:
    """The output and the log-sum-exp of each row, from the scores in full. Differentiable; rows that see no key are zero.

    Products in the dtype of q, as torch's attention makes them, and the softmax in float32.

    Args:
        q, k, v: `[batch, heads, rows, columns]`; heads may be grouped.
        attn_mask: a mask tensor or None.
        visible: True where `attn_mask` alone may hide a key; None for every key.
        dropout_p: probability.
        scale: softmax scale or None.
        features: of which softcap and sinks are read.
    """
    if visible is not None:  # a key that no row sees may hold anything, and 0 times NaN is NaN
        unseen = ~visible.any(dim=-2)[..., None]
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    if min(q.ndim, k.ndim) > 2 and q.shape[-3] != k.shape[-3] > 1 and heads_grouped(q, k, k):
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], dim=-3) for each in (k, v))
    scores = (q @ k.transpose(-2, -1)).float() * (1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale)
    if features.softcap:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = attn_mask if visible is None else visible & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if features.sinks is not None:
        lse = torch.logaddexp(lse, features.sinks.float()[:, None].expand(lse.shape[-2:]))
    blind = lse == -math.inf
    weights = torch.exp(scores - lse.masked_fill(blind, 0.0)[..., None])
    weights = functional.dropout(weights, dropout_p, training=dropout_p > 0)
    return weights.to(v.dtype) @ v, lse


def _attend_plain(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, causal: str | None, scale: float | None
) -> Any:
    """torch's attention function with our meaning of `causal`."""
    grouped = q.ndim == k.ndim == v.ndim >= 4 and q.shape[-3] != k.shape[-3] and heads_grouped(q, k, v)
    more: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, **({"enable_gqa": True} if grouped else {})}
    rows, columns = q.shape[-2], k.shape[-2]
    if 0 in q.shape[:-1]:  # of an empty batch, torch's kernels return None on a GPU
        return attend_visible(q, k, v, None, None, 0.0, scale, NO_FEATURES)[0]
    if causal != "bottom_right" or rows == columns:
        return torch_attention(q, k, v, attn_mask=attn_mask, is_causal=causal is not None, **more)
    visible = visible_keys(q, k, causal, NO_FEATURES)[0, 0]
    if rows < columns:
        return torch_attention(q, k, v, attn_mask=visible, **more)
    # The first rows see nothing and are zero, as in the kernel; in torch's function they are not in every version.
    return attend_visible(q, k, v, attn_mask, visible, dropout_p, scale, NO_FEATURES)[0]


def _plain_lse(q: Any, k: Any, v: Any, attn_mask: Any, causal: str | None, scale: float | None) -> Any:
    """The log-sum-exp of each row, for which torch has no public function. Products are in float32, also of float16."""
    if k.ndim > 2 and not k.shape[-3]:  # no keys at all
        return q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
    visible = None if causal is None else visible_keys(q, k, causal, NO_FEATURES)[0, 0]
    return attend_visible(q.float(), k.float(), v, attn_mask, visible, 0.0, scale, NO_FEATURES)[1]


def _below_diagonal(rows: int, keys: Any, before: Any, features: AttentionFeatures) -> Any:
    """`[..., rows, keys]`, True where a causal mask with the features' window shows a key.

    Args:
        rows: number of query rows.
        keys: `[keys]`, their positions.
        before: keys that the first row sees before the one of its own number; a number, or `[batch, 1, 1, 1]`.
        features: of which the window is read.
    """
    last = torch.arange(rows, device=keys.device)[:, None] + before
    visible = keys <= last + features.window_right
    return visible & (keys > last - features.window) if features.window else visible


def _attend_varlen(
    q: Any, k: Any, v: Any, dropout_p: float, causal: str | None, scale: float | None, features: AttentionFeatures
) -> tuple[Any, Any]:
    """The output and the log-sum-exp of packed sequences or of keys in pages, which are padded for it.

    Args:
        q: `[1, heads, rows of all, head_dim]`, or `[batch, heads, seq_q, head_dim]` where only the keys lie in pages.
        k, v: `[1, kv_heads, keys of all, ...]` or `[pages, kv_heads, page, ...]`.
        dropout_p, causal, scale: as for `sdpa`; bottom_right aligns the mask with each sequence's own keys.
        features: say where everything lies. Lengths of the longest sequence that are missing are read from the device.
    """
    if not k.numel() or not q.numel():  # no row sees a key
        lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
        lse = lse if features.sinks is None else features.sinks.float()[:, None].expand(lse.shape)
        return q.new_zeros((*q.shape[:3], v.shape[3])), lse
    offsets = features.cu_seqlens_q
    queries, own_rows = q, q.shape[2]
    if offsets is not None:
        own_rows = offsets.diff()
        queries = _padded(q, offsets, own_rows, features.max_seqlen_q)
    if features.block_table is None:
        lengths = features.cu_seqlens_k.diff()
        keys, values = (_padded(each, features.cu_seqlens_k, lengths, features.max_seqlen_k) for each in (k, v))
    else:
        table = features.block_table.long().clamp(0, k.shape[0] - 1)
        keys, values = (each[table].transpose(1, 2).flatten(2, 3) for each in (k, v))
        lengths = features.key_lengths.clamp(0, keys.shape[2])
    columns = torch.arange(keys.shape[2], device=q.device)
    visible = (columns < lengths[:, None, None])[:, None]
    if causal is not None:
        before = lengths - own_rows if causal == "bottom_right" else torch.zeros_like(lengths)
        visible = visible & _below_diagonal(queries.shape[2], columns, before[:, None, None, None], features)
    out, lse = attend_visible(queries, keys, values, None, visible, dropout_p, scale, features)
    if offsets is None:
        return out, lse
    places = torch.arange(q.shape[2], device=q.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), places.to(offsets.dtype), right=True)
    sequence = sequence.clamp(max=len(offsets) - 2)
    row = (places - offsets[sequence]).clamp(0, queries.shape[2] - 1)
    return out[sequence, :, row].transpose(0, 1)[None], lse[sequence, :, row].transpose(0, 1)[None]


def _padded(packed: Any, offsets: Any, lengths: Any, longest: int) -> Any:
    """Packed sequences `[1, heads, rows of all, columns]` as `[sequences, heads, longest, columns]`, with zeros beyond their
    ends; the length of the longest is read from the device where it is 0."""
    rows = torch.arange(max(1, longest or int(lengths.max())), device=packed.device)
    index = (offsets[:-1, None] + rows).clamp(0, packed.shape[2] - 1)
    found = packed[0].transpose(0, 1)[index.long()].transpose(1, 2)
    return found.masked_fill((rows >= lengths[:, None])[:, None, :, None], 0.0)
