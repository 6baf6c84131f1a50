"""What strangers' kernels should compute, in torch's float64 on the CPU."""

from __future__ import annotations

import math

import torch


def normal(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed numbers times `scale`."""
    return (torch.randn(shape, dtype=torch.float32) * scale).to(dtype)


def attention(q, k, v, *, scale=None, mask=None, bias=None, cap=None, sinks=None):
    """Softmax attention of `[batch, heads, sequence, columns]`; `mask` holds where keys are seen."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def causal_mask(queries: int, keys: int, window: int | None = None) -> torch.Tensor:
    """Key j is seen by query i where j <= i + keys - queries, and no more than `window` - 1 back."""
    rows, columns = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None, :]
    seen = columns <= rows
    return seen if window is None else seen & (columns > rows - window)


def gated_delta_rule(query, key, value, gate, beta, state=None, *, normalize=False):
    """The recurrence of the gated delta rule over `[batch, time, heads, columns]`: outputs and the last state."""
    query, key, value, gate, beta = (x.double() for x in (query, key, value, gate, beta))
    repeats = value.shape[2] // query.shape[2]
    query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    if normalize:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    batch, steps, heads, columns = query.shape
    empty = torch.zeros(batch, heads, columns, value.shape[-1], dtype=torch.float64)
    state = empty if state is None else state.double()
    outputs = []
    for t in range(steps):
        state = state * gate[:, t, :, None, None].exp()
        seen = (state * key[:, t, :, :, None]).sum(-2)
        delta = (value[:, t] - seen) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * delta[:, :, None, :]
        outputs.append((state * query[:, t, :, :, None]).sum(-2) / math.sqrt(columns))
    return torch.stack(outputs, 1), state


def mixture_of_experts(x, weights, ids, routing, *, routed):
    """Each token's rows by its chosen experts' matrices `[experts, columns, depth]`: `[tokens, chosen, columns]`."""
    out = torch.einsum("td,tknd->tkn", x.double(), weights.double()[ids])
    return out * routing.double()[..., None] if routed else out
