"""What a call of `sdpa` asks for beside causal masks: a window, capped scores, sinks, keys that start or end early."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple, TypeAlias

import torch

from tiledsched.core.errors import ProblemError


class AttentionFeatures(NamedTuple):
    """What is asked for beside; each at its default where it is not."""

    window: int = 0
    """Keys that a row sees up to its own, which is one of them; 0 for all."""
    softcap: float = 0.0
    """Cap of the scaled scores; 0 for none."""
    sinks: Any = None
    """`[heads]`."""
    starts: Any = None
    """`[batch]`."""
    lengths: Any = None
    """`[batch]`."""
    cu_q: Any = None
    """`[sequences + 1]`: where packed sequences begin in q."""
    cu_k: Any = None
    """The same in k and v."""
    table: Any = None
    """`[sequences, pages]`: which entries of k and v hold a sequence's keys."""
    most_q: int = 0
    """Rows of the longest packed sequence, for torch's operations; 0 where nobody said."""
    most_k: int = 0
    """The same of keys."""
    window_right: int = 0
    """Keys that a row sees after its own."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What a plan depends on."""
        return (
            self.window,
            self.softcap,
            self.sinks is not None,
            self.starts is not None,
            self.lengths is not None,
            None if self.cu_q is None else self.cu_q.shape[0] - 1,
            None if self.table is None else self.table.shape,
            self.window_right,
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The problem's."""
        window, softcap, sinks, starts, lengths, packed, _, window_right = self.key
        return {
            "window": window,
            "window_right": window_right,
            "softcap": softcap > 0,
            "sinks": sinks,
            "starts": starts,
            "lengths": lengths,
            "packed": packed or 0,
        }

    @property
    def placed(self) -> bool:
        """Whether sequences are packed or their keys lie in pages."""
        return self.cu_q is not None or self.table is not None

    def for_kernel(self, q: Any) -> tuple[Any, ...]:
        """Sinks and the integer arrays of a launch, in its order; None for those that are not asked for."""
        sinks = None if self.sinks is None else self.sinks.detach().to(q.dtype).contiguous()
        whole = (self.starts, self.lengths, self.cu_q, self.cu_k, self.table)
        return (sinks, *(None if each is None else each.to(torch.int32).contiguous() for each in whole))


NOTHING = AttentionFeatures()
Window: TypeAlias = "int | tuple[int, int] | None"
"""What `sdpa` takes for a window."""
ALL_KEYS = 1 << 30
"""After a row's own: more than there are, and in 32 bits when added to a row."""
NAMES = ("window", "softcap", "sinks", "key_starts", "key_lengths")
"""Of the arguments of `sdpa`, in that order."""


def read_beside(
    q: Any, k: Any, alignment: str | None, window: Any, softcap: Any, sinks: Any, key_starts: Any, key_lengths: Any
) -> tuple[str | None, AttentionFeatures]:
    """What the arguments of `sdpa` by these names ask for, checked, and where the causal mask is aligned, which a window of two
    sides needs.

    Args:
        q, k: tensors that fit together.
        alignment: of the causal mask that is asked for; None for no mask.
        window, softcap, sinks, key_starts, key_lengths: as they were given; None for what was not.

    Raises:
        ProblemError: one has a value that is not allowed, or does not fit q and k.
    """
    if window is None and softcap is None and sinks is None and key_starts is None and key_lengths is None:
        return alignment, NOTHING
    right = 0
    if isinstance(window, (tuple, list)):
        window, alignment, right = _two_sides(window, alignment)
        if window is None and not right:
            return read_beside(q, k, alignment, None, softcap, sinks, key_starts, key_lengths)
    if window is not None:
        if not isinstance(window, (int, torch.SymInt)) or isinstance(window, bool) or window < 1:
            raise ProblemError(
                f"window must be a positive integer, the keys that a row sees up to its own, or a pair of keys before and after "
                f"it, got {window!r}"
            )
        if alignment is None:
            raise ProblemError(
                f"window = {window} needs causal = True or 'bottom_right': row i sees the last keys up to its own"
            )
    if softcap is not None and (
        isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf
    ):
        raise ProblemError(f"softcap must be a positive number, or 0 or None for none, got {softcap!r}")
    heads, batch = (q.shape[-3] if q.ndim > 2 else 1), (q.shape[0] if q.ndim > 3 else 1)
    _check(sinks, "sinks", "heads", heads, q, whole=False)
    _check(key_starts, "key_starts", "batch", batch, q, whole=True)
    _check(key_lengths, "key_lengths", "batch", batch, q, whole=True)
    return alignment, AttentionFeatures(
        window or 0, float(softcap or 0.0), sinks, key_starts, key_lengths, window_right=right
    )


def _two_sides(window: Any, alignment: str | None) -> tuple[int | None, str | None, int]:
    """Of FlashAttention's pair: the keys up to a row's own, the mask that is needed, and the keys after a row's own."""
    pair = [-1 if each is None else each for each in window]
    if len(pair) != 2 or any(not isinstance(each, int) or isinstance(each, bool) or each < -1 for each in pair):
        raise ProblemError(
            f"window must be a positive integer, or a pair of keys before and after a row's own, -1 for all, "
            f"got {window!r}"
        )
    before, after = (min(each, ALL_KEYS) for each in pair)
    if alignment is not None:
        after = 0
    elif before >= 0 or after >= 0:
        alignment = "bottom_right"
    return before + 1 or None, alignment, (ALL_KEYS if after < 0 else after) if alignment else 0


def _check(given: Any, name: str, axis: str, size: int, q: Any, *, whole: bool) -> None:
    if given is None:
        return
    kind = "an integer" if whole else "a floating-point"
    if not isinstance(given, torch.Tensor):
        raise ProblemError(f"{name} must be {kind} tensor [{axis}], got {type(given).__name__}")
    if tuple(given.shape) != (size,):
        raise ProblemError(f"{name} must be [{axis}], here ({size},), got {tuple(given.shape)}")
    if given.device != q.device:
        raise ProblemError(f"{name} must be on q's device, {q.device}, got {given.device}")
    if given.is_floating_point() == whole or given.is_complex() or given.dtype == torch.bool:
        raise ProblemError(f"{name} must be {kind} tensor, got {given.dtype}")


def visible_keys(q: Any, k: Any, causal: str | None, beside: AttentionFeatures) -> Any:
    """`[batch or 1, 1, rows, keys]`, True where a key is seen by all that is not a mask tensor; None where every key is."""
    rows, columns = q.shape[-2], k.shape[-2]
    last = torch.arange(rows, device=q.device)[:, None] + (columns - rows if causal == "bottom_right" else 0)
    keys = torch.arange(columns, device=q.device)[None]
    visible = None
    if causal is not None:
        visible = keys <= last + beside.window_right
        if beside.window:
            visible = visible & (keys > last - beside.window)
        visible = visible[None, None]
    for edge, sees in ((beside.starts, operator.ge), (beside.lengths, operator.lt)):
        if edge is not None:
            own = sees(keys, edge[:, None])[:, None, None]
            visible = own if visible is None else visible & own
    return visible


def attend_beside(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    dropout_p: float,
    causal: str | None,
    scale: float | None,
    beside: AttentionFeatures,
) -> tuple[Any, Any]:
    """The output and the log-sum-exp of each row, from the scores in full. Differentiable; rows that see no key are zero.

    Products in the dtype of q, as torch's attention makes them, and the softmax in float32.
    """
    return attend_seen(q, k, v, attn_mask, visible_keys(q, k, causal, beside), dropout_p, scale, beside)


def attend_seen(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    visible: Any,
    dropout_p: float,
    scale: float | None,
    beside: AttentionFeatures,
) -> tuple[Any, Any]:
    """The same, with what is visible beside the mask given."""
    if k.ndim > 2 and k.shape[-3] != q.shape[-3] and k.shape[-3] > 1:
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], dim=-3) for each in (k, v))
    scores = (q @ k.transpose(-2, -1)).float() * (1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale)
    if beside.softcap:
        scores = beside.softcap * torch.tanh(scores / beside.softcap)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = attn_mask if visible is None else visible & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if beside.sinks is not None:
        lse = torch.logaddexp(lse, beside.sinks.float()[:, None].expand(lse.shape[-2:]))
    blind = lse == -math.inf
    weights = torch.exp(scores - lse.masked_fill(blind, 0.0)[..., None])
    weights = torch.nn.functional.dropout(weights, dropout_p, training=dropout_p > 0)
    return weights.to(v.dtype) @ v, lse
