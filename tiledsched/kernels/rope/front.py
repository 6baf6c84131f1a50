"""Rotary position embedding, as a function like torch's, with gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.ops.front import GRADIENTS, operator, takes_tensors
from tiledsched.serve import process
from tiledsched.serve.execute import is_transformed


@takes_tensors
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding: each pair (a, b) of a head's elements becomes (a cos - b sin, b cos + a sin).

    It is computed in float32 and rounded once.

    Args:
        q: `[batch, heads, seq, head_dim]` CUDA tensor, float16 or bfloat16, or without batch. Elements of a head are neighbours
            in memory; else strides are free, so that q may be a part of a projection of q, k and v.
        k: of the same type, with the same axes except for the number of heads.
        cos, sin: `[seq, rotary_dim / 2]`, or `[batch, seq, rotary_dim / 2]` where positions differ, of float16, bfloat16 or
            float32. Tables `rotary_dim` wide, which hold each angle twice, are allowed, too: both elements of a pair find their
            angle at their own place. The first calls of a process read a row of such a table, and wait for the GPU.
        interleaved: whether a pair is two neighbours (GPT-J); else its elements are half of `rotary_dim` apart (Llama).
        rotary_dim: the first elements of a head, which are rotated; by default all of them.
        inplace: rotate q and k where they lie. Without gradients, which are otherwise those of q and k.

    Returns:
        The rotated q and k: new tensors, in which the heads of a position are neighbours; or q and k themselves.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    if q.ndim not in (3, 4) or k.ndim != q.ndim:
        raise ProblemError(
            f"q and k must both be [batch, heads, seq, head_dim] or [heads, seq, head_dim], got {tuple(q.shape)} and "
            f"{tuple(k.shape)}"
        )
    head_dim = q.shape[-1]
    rotated = head_dim if rotary_dim is None else rotary_dim
    if rotated % 2 or not 0 < rotated <= head_dim or k.shape[-1] != head_dim:
        raise ProblemError(
            f"rope rotates an even number of elements of each head of q and k, got {rotated} of {head_dim} and {k.shape[-1]}"
        )
    copies = rotated < head_dim and not inplace
    differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, cos, sin))
    if copies and (differentiable or (not torch.compiler.is_dynamo_compiling() and is_transformed())):
        turned = rope(q[..., :rotated], k[..., :rotated], cos, sin, interleaved=interleaved)
        out_q, out_k = (torch.cat((new, x[..., rotated:]), -1) for new, x in zip(turned, (q, k), strict=True))
        return out_q, out_k
    if copies:  # what is not rotated is copied
        q, k, inplace = q.clone(), k.clone(), True
    parts = 1 if interleaved else 2
    given = [_by_position(x[..., :rotated] if rotated < head_dim else x, parts) for x in (q, k)]
    tables = [_angles(name, x, rotated, interleaved) for name, x in (("cos", cos), ("sin", sin))]
    if inplace:
        operator("rope_in_place")(*given, *tables)
        return q, k
    out_q, out_k = (x.flatten(-2).transpose(1, 2) for x in operator("rope")(*given, *tables))
    return (out_q, out_k) if q.ndim == 4 else (out_q[0], out_k[0])


def _by_position(x: Tensor, parts: int) -> Tensor:
    """`[batch, seq, heads, parts, width]`, a view of `[batch, heads, seq, head_dim]`."""
    return (x if x.ndim == 4 else x[None]).transpose(1, 2).unflatten(-1, (parts, x.shape[-1] // parts))


def _angles(name: str, table: Tensor, rotated: int, interleaved: bool) -> Tensor:
    """`[1 or batch, seq, rotated / 2]` of a table of cosines or sines."""
    axes, columns, width = table.ndim, table.shape[-1], rotated // 2
    if axes not in (2, 3) or columns not in (width, rotated):
        raise ProblemError(
            f"{name} must be [seq, columns] or [batch, seq, columns], with {width} or {rotated} columns where {rotated} elements "
            f"are rotated, got {tuple(table.shape)}"
        )
    if columns == rotated:  # each angle is there twice
        key = (name, rotated, interleaved)
        if not torch.compiler.is_dynamo_compiling() and _looks[key] < MOST_LOOKS and _can_be_read(table):
            _looks[key] += _check_twice(name, table, interleaved)
        table = table[..., ::2].contiguous() if interleaved else table[..., :width]
    return table if axes == 3 else table[None]


_looks: Counter[tuple[str, int, bool]] = Counter()
"""How often tables were looked into, by their name, their width, and whether pairs were neighbours."""
MOST_LOOKS = 3
"""Calls that look into tables whose angles are all zero, which tell nothing; the first other table ends it."""


def _can_be_read(table: Tensor) -> bool:
    """Whether the values of a table can be read: not in a capture, nor under modes and transforms of torch."""
    served = table.device.type == process.runtime.device_type
    return served and table.numel() > 0 and not (is_transformed() or process.runtime.is_capturing())


def _check_twice(name: str, table: Tensor, interleaved: bool) -> int:
    """How many looks it counts for that the last row of a table holds each angle at the places of both elements of a pair.

    The call waits for the GPU.

    Raises:
        ProblemError: the table was made for pairs of the other kind, or holds each angle once.
    """
    last = table.detach().flatten(0, -2)[-1].float().cpu()
    halves, neighbours = (
        torch.allclose(one, other, rtol=0.0, atol=1e-3) for one, other in (last.chunk(2), (last[::2], last[1::2]))
    )
    if not (neighbours if interleaved else halves):
        found = "half a row apart" if halves else "side by side" if neighbours else "nowhere twice"
        wanted = "side by side" if interleaved else "half a row apart"
        raise ProblemError(
            f"{name} is as wide as the elements that are rotated, and must hold each angle twice, {wanted} with interleaved = "
            f"{interleaved}; they are {found}. Give the other interleaved, or each angle once: {len(last) // 2} columns"
        )
    return 1 if halves == neighbours else MOST_LOOKS


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save what the gradients of rotated queries and keys need."""
    if any(ctx.needs_input_grad[2:4]):
        raise UnsupportedError("rope has no gradients of cos and sin; detach them")
    ctx.save_for_backward(*inputs[2:4])


def _turn_back(ctx: Any, *gradients: Tensor) -> Any:
    """The gradients of queries and keys: those of the rotated ones, turned the other way."""
    cos, sin = ctx.saved_tensors
    return operator("rope")(*gradients, cos, -sin)


GRADIENTS["rope"] = lambda made, pinned: made.register_autograd(_turn_back, setup_context=_save_angles)
