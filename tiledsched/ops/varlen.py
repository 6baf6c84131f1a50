"""`sdpa_varlen` and `sdpa_paged`: attention of packed sequences, and over keys in pages, with FlashAttention's arguments.

Tensors have their tokens before their heads here, as in FlashAttention and vLLM. The kernel takes them with two axes exchanged;
nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiledsched.core.errors import ProblemError
from tiledsched.kernels.attention.problem import hiding_mask
from tiledsched.ops.arguments import CAUSAL, check_array, check_tensors, described, read_causal, read_scale
from tiledsched.ops.features import ALL_KEYS, AttentionFeatures, Window, read_features
from tiledsched.ops.operator import cast_for_autocast, serve_checked

VARLEN_CAUSAL: dict[Any, str | None] = {**CAUSAL, True: "bottom_right"}
"""The values that `causal` may have, and where each aligns the causal mask: True means what it means in FlashAttention."""


def sdpa_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    deterministic: bool | None = None,
) -> Any:
    """Attention of sequences that lie end to end, each over its own keys, as FlashAttention's `flash_attn_varlen_func`.

    Args:
        q: `[total_q, heads, head_dim]`: the rows of all sequences.
        k: `[total_k, kv_heads, head_dim]`, or, with `block_table`, pages as for `sdpa_paged`.
        v: `[total_k, kv_heads, value_dim]`, or pages.
        cu_seqlens_q: `[sequences + 1]` integers on q's device: where each sequence begins in q, and where the last one ends. It
            begins with 0 and does not fall. Sequences may be empty.
        cu_seqlens_k: where each sequence begins in k and v; cu_seqlens_q unless given.
        max_seqlen_q, max_seqlen_k: rows and keys of the longest sequence, at least. The kernel does not need them, and goes
            without a mask that hides nothing of sequences that long; a rival serves only where they are given, and torch's
            attention reads them from the device where they are missing.
        causal: False; True or "bottom_right", where each sequence's last row sees its last key; or "top_left".
        scale, window, softcap, sinks, dropout_p, deterministic: as for `sdpa`.
        return_lse: return the log-sum-exp, too: float32 `[heads, total_q]`.
        block_table, seqused_k: pages of each sequence and keys in use, as for `sdpa_paged`, in place of cu_seqlens_k.
        k_scale, v_scale: for k and v of float8_e4m3fn, as for `sdpa` or, with `block_table`, for `sdpa_paged`.

    Returns:
        `[total_q, heads, value_dim]`, of q's dtype; with `return_lse` a pair. Rows of no sequence are not written. Both are
        differentiable, once, in q, k, v and sinks; where keys lie in pages, by torch's attention.

    Raises:
        ProblemError: arguments that do not fit together.
        UnsupportedError: inputs for torch, where the setting `fallback` is `error`.
    """
    tensors = _read_tensors(q, k, v, 3, 3 if block_table is None else 4)
    check_array("cu_seqlens_q", cu_seqlens_q, "sequences + 1", (None,), q)
    sequences = cu_seqlens_q.shape[0] - 1
    if sequences < 1:
        raise ProblemError(
            "cu_seqlens_q holds where each sequence begins and the last ends, so two numbers at least; got one"
        )
    if block_table is None:
        if seqused_k is not None:
            raise ProblemError("seqused_k says how much of each sequence's pages is in use; give block_table, too")
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        check_array("cu_seqlens_k", cu_seqlens_k, f"{sequences} sequences + 1", (sequences + 1,), q)
        if cu_seqlens_k is cu_seqlens_q and causal in (True, "bottom_right"):
            causal = "top_left"  # with as many keys as rows it is the same mask, and less work
    else:
        if cu_seqlens_k is not None:
            raise ProblemError("cu_seqlens_k and block_table are both given; keys lie end to end or in pages")
        check_array("block_table", block_table, f"{sequences} sequences, pages", (sequences, None), q)
        check_array("seqused_k", seqused_k, f"{sequences} sequences", (sequences,), q)
    if not all(each is None or isinstance(each, (int, torch.SymInt, Tensor)) for each in (max_seqlen_q, max_seqlen_k)):
        raise ProblemError(
            f"max_seqlen_q and max_seqlen_k must be whole numbers or None, got {max_seqlen_q!r} and {max_seqlen_k!r}"
        )
    alignment = read_causal(causal, allowed=VARLEN_CAUSAL)
    pages = 0 if block_table is None else k.shape[0]
    more = (window, softcap, sinks, None, None, None, k_scale, v_scale, pages)
    alignment, features = read_features(q.transpose(0, 1)[None], k.transpose(-3, -2), alignment, *more)
    if alignment is not None and max_seqlen_q and isinstance(max_seqlen_q, int):  # more may be known than of all rows
        keys = max_seqlen_k if block_table is None and isinstance(max_seqlen_k, int) else None
        alignment, visible, right = hiding_mask(
            alignment, features.window, features.window_right, max_seqlen_q, keys or ALL_KEYS
        )
        features = features._replace(window=visible, window_right=right)
    features = features._replace(
        key_lengths=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        max_seqlen_q=max_seqlen_q or 0,
        max_seqlen_k=max_seqlen_k or 0,
    )
    q, k, v = (each.transpose(-3, -2) for each in tensors)
    if block_table is None:
        k, v = k[None], v[None]
    result = _attend(q[None], k, v, alignment, scale, dropout_p, return_lse, features, deterministic)
    out = (result[0] if return_lse else result)[0].transpose(0, 1)
    return (out, result[1][0]) if return_lse else out


def sdpa_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    *,
    causal: bool | str = True,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Any:
    """Attention over keys and values that lie in pages, as FlashAttention's `flash_attn_with_kvcache` and vLLM keep them.

    Args:
        q: `[batch, seq_q, heads, head_dim]`: the last rows of each sequence, whose keys are in the cache already.
        k_cache: `[pages, page_size, kv_heads, head_dim]`; page_size a multiple of 16. Of q's dtype, or, with scales, of
            float8_e4m3fn, and v_cache likewise.
        v_cache: `[pages, page_size, kv_heads, value_dim]`.
        block_table: `[batch, most pages of a sequence]` integers: which pages hold a sequence's keys, in order. What it says
            beyond a sequence's keys does not matter.
        key_lengths: `[batch]` integers: keys of each sequence (FlashAttention's cache_seqlens). What a page holds beyond them
            does not matter.
        causal: True or "bottom_right": the last row of a sequence sees its last key; False: every row sees all keys.
        scale, window, softcap, sinks: as for `sdpa`.
        return_lse: return the log-sum-exp, too: float32 `[batch, heads, seq_q]`.
        k_scale, v_scale: for a cache in 8 bits, as for `sdpa`; or `[pages]`, a scale for each page (`[pages, 1]` where there are
            as many pages as key heads).

    Returns:
        `[batch, seq_q, heads, value_dim]`, of q's dtype; with `return_lse` a pair.

    Raises:
        ProblemError: arguments that do not fit together.
        UnsupportedError: inputs for torch, where the setting `fallback` is `error`.
    """
    tensors = _read_tensors(q, k_cache, v_cache, 4, 4)
    check_array("block_table", block_table, f"{q.shape[0]} sequences, pages", (q.shape[0], None), q)
    check_array("key_lengths", key_lengths, f"{q.shape[0]} sequences", (q.shape[0],), q)
    alignment = read_causal(causal, allowed=VARLEN_CAUSAL)
    q, k, v = (each.transpose(1, 2) for each in tensors)
    alignment, features = read_features(
        q, k, alignment, window, softcap, sinks, None, key_lengths, None, k_scale, v_scale, k.shape[0]
    )
    features = features._replace(block_table=block_table)
    result = _attend(q, k, v, alignment, scale, 0.0, return_lse, features)
    out = (result[0] if return_lse else result).transpose(1, 2)
    return (out, result[1]) if return_lse else out


def _attend(
    q: Any,
    k: Any,
    v: Any,
    alignment: str | None,
    scale: Any,
    dropout_p: float,
    return_lse: bool,
    features: AttentionFeatures,
    deterministic: bool | None = None,
) -> Any:
    """Check the tensors, and call the operator or torch's operations."""
    q, k, v = cast_for_autocast(q, k, v)
    scale = read_scale(scale)
    sample = (q, k, v) if features.block_table is None else (q[:1], k[:1], v[:1])  # of pages there is any number
    check_tensors(*sample, eight_bits=features.k_scale is not None)
    return serve_checked(q, k, v, None, dropout_p, alignment, scale, return_lse, features, deterministic)


def _read_tensors(q: Any, k: Any, v: Any, axes: int, key_axes: int) -> tuple[Any, Any, Any]:
    for name, tensor, wanted in (("q", q, axes), ("k", k, key_axes), ("v", v, key_axes)):
        fits = isinstance(tensor, Tensor) and tensor.ndim == wanted and tensor.layout is torch.strided
        if not fits or (name == "v" and tensor.shape[0] != k.shape[0]):
            shape = {3: "[rows of all, heads, columns]", 4: "[batch or pages, rows, heads, columns]"}[wanted]
            raise ProblemError(f"{name} must be a tensor {shape}, k and v of one first size, got {described(tensor)}")
    return q, k, v
