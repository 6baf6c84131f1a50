"""Gradients of attention in float64, by torch's autograd over scores in full."""

from __future__ import annotations

from typing import Any

import torch


def exact_gradients(
    q, k, v, dout, *, dlse=None, sinks=None, cu_q=None, cu_k=None, causal: Any = False, **features
) -> list[torch.Tensor]:
    """Of q, k, v and sinks, where there are sinks.

    Args:
        q, k, v, dout: `[batch, heads, rows, columns]`.
        dlse: gradient of the log-sum-exp.
        cu_q, cu_k: where packed sequences begin; causal is top_left or bottom_right there.
        features: scale, window, softcap, key_starts, key_lengths, as `sdpa` takes them.
    """
    given = [each.detach().double().requires_grad_() for each in (q, k, v, *(() if sinks is None else (sinks,)))]
    with torch.enable_grad():
        out, lse = _attention(*given, causal=causal, places=_places(q, k, cu_q, cu_k), **features)
        total = (out * dout.double()).sum()
        if dlse is not None:
            total = total + lse.masked_fill(lse < -1e29, 0.0).mul(dlse.double()).sum()
    return [*torch.autograd.grad(total, given)]


def _places(q, k, cu_q, cu_k):
    """Of each row and key its sequence and its place there, and how many rows and keys its sequence has."""
    rows, keys = (torch.arange(each.shape[2], device=q.device) for each in (q, k))
    if cu_q is None:
        none = torch.zeros_like(rows), torch.zeros_like(keys)
        return *none, rows, keys, len(keys) - len(rows)
    found = []
    for each, offsets in ((rows, cu_q), (keys, cu_k)):
        sequence = torch.searchsorted(offsets[1:].contiguous(), each, right=True)
        found.append((sequence, each - offsets[sequence.clamp(max=len(offsets) - 2)]))
    more_keys = (cu_k.diff() - cu_q.diff())[found[0][0].clamp(max=len(cu_q) - 2)]
    return found[0][0], found[1][0], found[0][1], found[1][1], more_keys[:, None]


def _attention(
    q, k, v, sinks=None, *, causal, places, scale=None, window=None, softcap=None, key_starts=None, key_lengths=None
):
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    of_row, of_key, row, key, more_keys = places
    causal = {True: "top_left"}.get(causal, causal)
    before, after = (window - 1, 0) if isinstance(window, int) else window or (-1, -1)
    if isinstance(window, tuple) and not causal:
        causal = "bottom_right"
    elif causal:
        after = 0
    last = row[:, None] + (more_keys if causal == "bottom_right" else 0)
    seen = of_row[:, None] == of_key
    if causal:
        seen = seen & (key <= last + after if after >= 0 else True) & (key >= last - before if before >= 0 else True)
    seen = seen.expand(q.shape[0], 1, *seen.shape)
    for ends, counts in ((key_starts, torch.ge), (key_lengths, torch.lt)):
        if ends is not None:
            seen = seen & counts(key, ends[:, None])[:, None, None]
    scores = scores.masked_fill(~seen, -1e30)  # finite, so that rows that see nothing have gradients
    every = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(every, -1)
    return torch.exp(scores - lse[..., None]).masked_fill(~seen, 0.0) @ v, lse


def errors(found, wanted) -> list[float]:
    """Relative Frobenius error of each gradient."""
    return [
        float((one.detach().double() - other.detach()).norm() / other.detach().norm().clamp(min=1e-6))
        for one, other in zip(found, wanted, strict=True)
    ]
