"""What the kernel does not serve: torch's attention, with one warning per reason, or an error where so configured."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn import functional

from tiledsched.attention.arguments import heads_grouped
from tiledsched.attention.beside import NOTHING, Beside, attend_beside
from tiledsched.errors import UnsupportedError
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


def attend_nested(q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, causal: Any, scale: float | None,
                  return_lse: bool) -> Any:  # fmt: skip
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


def attend_in_torch(q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, causal: str | None, scale: float | None,
                    return_lse: bool, beside: Beside = NOTHING) -> Any:  # fmt: skip
    """torch's attention, with the log-sum-exp where asked for; of what torch has nothing for, its operations."""
    if beside is not NOTHING and any(beside.key):
        pair = attend_beside(q, k, v, attn_mask, dropout_p, causal, scale, beside)
        return pair if return_lse else pair[0]
    out = torch_sdpa(q, k, v, attn_mask, dropout_p, causal, scale)
    return (out, torch_lse(q, k, attn_mask, causal, scale).expand(out.shape[:-1])) if return_lse else out
