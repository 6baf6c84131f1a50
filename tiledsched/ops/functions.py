"""The kernels that ship beside attention, on tuned schedules, as functions like torch's."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.core.registry import kernel_named
from tiledsched.serve import process
from tiledsched.serve.execute import is_transformed

_DIFFERENTIABLE = ("rms_norm", "softmax")
_SUM_FOR_X = {"X": "Sum", "dR": "dX"}
"""With a residual the sum is what is normalised, and both its terms have the same gradient."""


@functools.cache
def _operator(kernel: str, **pinned: Any) -> Any:
    """The operator of a kernel, made at its first call."""
    if (
        torch.compiler.is_dynamo_compiling()
    ):  # which traces this in spite of the cache, and cannot trace how one is made
        return getattr(torch.ops.tiledsched, _registered(kernel, **pinned))
    from tiledsched.serve.op import op

    made = op(f"tiledsched::{_word(kernel, pinned)}", kernel_named(kernel), **pinned)
    if kernel in _DIFFERENTIABLE:
        made.register_autograd(_operator(f"{kernel}_backward"), names=_SUM_FOR_X if pinned else None)
    elif kernel == "rope":
        made.register_autograd(_turn_back, setup_context=_save_angles)
    return made


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save what the gradients of rotated queries and keys need."""
    if any(ctx.needs_input_grad[2:4]):
        raise UnsupportedError("rope has no gradients of cos and sin; detach them")
    ctx.save_for_backward(*inputs[2:4])


def _turn_back(ctx: Any, *gradients: Tensor) -> Any:
    """The gradients of queries and keys: those of the rotated ones, turned the other way."""
    cos, sin = ctx.saved_tensors
    return _operator("rope")(*gradients, cos, -sin)


@torch.compiler.assume_constant_result
def _registered(kernel: str, **pinned: Any) -> str:
    """The name under which torch knows the operator of a kernel, which is made first where need be."""
    _operator(kernel, **pinned)
    return _word(kernel, pinned)


def _word(kernel: str, pinned: dict[str, Any]) -> str:
    return kernel + "".join(f"_{name}" for name, value in pinned.items() if value)


def _rows(x: Tensor) -> Tensor:
    """`[rows, columns]`; their number is not left to torch, which cannot tell it where there are no columns."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _check_shape(name: str, given: Tensor, like: str, shape: Any) -> None:
    """Raise unless a tensor has this shape: as many elements in another order would be taken for others.

    Raises:
        ProblemError: it has another shape.
    """
    if given.shape != shape:
        raise ProblemError(
            f"{name} must have the shape of {like}, {tuple(shape)}, got {tuple(given.shape)}; reshape it"
        )


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """`input @ other` on the tuned schedule, accumulated in float32.

    Args:
        input: `[..., m, k]` CUDA tensor, float16 or bfloat16; a matrix may be row- or column-major.
        other: `[k, n]`, of the same type, row- or column-major (a linear layer's weight is `weight.t()`).

    Returns:
        `[..., m, n]`, of the type of the inputs.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    flat = input if input.ndim == 2 else _rows(input)
    out: Tensor = _operator("matmul")(flat, other)
    return out if input.ndim == 2 else out.reshape(*input.shape[:-1], other.shape[-1])


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: Any = None,
    *,
    use_fast_accum: bool = False,
) -> Tensor:
    """`(a @ b) * scale_a * scale_b + bias` for 8-bit floats on the tuned schedule, in the conventions of `torch._scaled_mm`.

    Args:
        a: `[m, k]` CUDA tensor, row-major, float8_e4m3fn or float8_e5m2; k and n are multiples of 16.
        b: `[k, n]`, of the same type, column-major (a linear layer's weight is `weight.t()`).
        scale_a: one float32 number for all of a, or one for each row, `[m, 1]` or `[m]`.
        scale_b: one float32 number for all of b, or one for each column, `[1, n]` or `[n]`; of both or neither there is one.
        bias: `[n]`, of the output's type.
        out_dtype: bfloat16, float16 or float32; the type of the bias unless given, or else bfloat16.
        use_fast_accum: whether sums may stay in the tensor cores of sm_90, which keep fewer bits than float32; otherwise sums of
            128 products are added in float32. It changes nothing on other GPUs.

    Returns:
        `[m, n]` of the type `out_dtype`.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    rows, columns, kind = a.shape[:1], b.shape[1:], "row"
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        kind = "tensor"
    elif scale_a.shape not in ((*rows, 1), rows) or scale_b.shape not in ((1, *columns), columns):
        raise ProblemError(
            f"scale_a and scale_b must hold one number each, or one for each row of a, {(*rows, 1)}, and one for each column of "
            f"b, {(1, *columns)}; got {tuple(scale_a.shape)} and {tuple(scale_b.shape)}. Scales of blocks are not served: call "
            "torch._scaled_mm"
        )
    operands = a, b, scale_a.reshape(-1), scale_b.reshape(-1)
    if bias is None:
        wanted = str(out_dtype or "bfloat16").removeprefix("torch.")
        out: Tensor = _operator("scaled_matmul", bias=False)(*operands, wanted, kind, use_fast_accum)
        return out
    if out_dtype not in (None, bias.dtype):
        raise ProblemError(f"bias must be of the output's type, {out_dtype}, got {bias.dtype}; cast it")
    out = _operator("scaled_matmul", bias=True)(*operands, bias, kind, use_fast_accum)
    return out


def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The rows of each group of `a` times that group's matrix, on the tuned schedule, as `torch._grouped_mm(a, b, offs=offsets)`.

    No size of a group is read on the host, so that calls can be captured in CUDA graphs.

    Args:
        a: `[tokens, k]` CUDA tensor whose rows are sorted by group, float16 or bfloat16.
        b: `[groups, k, n]`, of the same type; each matrix is row- or column-major (`weight.transpose(1, 2)`).
        offsets: `[groups]`, int32: where each group ends. They never fall; a group may be empty.

    Returns:
        `[tokens, n]`, of the type of the inputs. Rows from the last offset on are undefined.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    out: Tensor = _operator("grouped_matmul")(a, b, offsets)
    return out


def rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-5, *, residual: Tensor | None = None) -> Any:
    """`x / sqrt(mean(x * x) + eps) * weight` over the last axis, where x is `input`, or `input + residual`.

    Args:
        input: `[..., columns]` CUDA tensor, float16 or bfloat16.
        weight: `[columns]`, of the same type.
        eps: added to the mean of squares.
        residual: of the shape of `input`.

    Returns:
        The normalised rows; with a residual, these and the sum `input + residual`.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    rows = _rows(input)
    if residual is None:
        return _operator("rms_norm")(rows, weight, eps=eps).reshape(input.shape)
    _check_shape("residual", residual, "input", input.shape)
    out, total = _operator("rms_norm", residual=True)(rows, residual.reshape(rows.shape), weight, eps=eps)
    return out.reshape(input.shape), total.reshape(input.shape)


def softmax(input: Tensor) -> Tensor:
    """The softmax of `[..., columns]` over the last axis, of float16 or bfloat16 CUDA tensors.

    Raises:
        ProblemError, UnsupportedError: types that are not served, or no CUDA tensors.
    """
    out: Tensor = _operator("softmax")(_rows(input))
    return out.reshape(input.shape)


def layer_norm(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` over the last axis, as `torch.nn.functional.layer_norm`.

    Args:
        input: `[..., columns]` CUDA tensor, float16 or bfloat16.
        weight, bias: `[columns]`, of the same type; either may be None.
        eps: added to the variance.

    Returns:
        The normalised rows, of the shape and type of `input`.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    given = [each for each in (weight, bias) if each is not None]
    norm = _operator("layer_norm", weighted=weight is not None, biased=bias is not None)
    out: Tensor = norm(_rows(input), *given, eps)
    return out.reshape(input.shape)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate: `[..., columns]` CUDA tensor, float16 or bfloat16; without `up`, `[..., 2 * columns]`: gate and up side by side.
        up: of the same shape and type. Both may be strided, such as two parts of one projection.

    Returns:
        `[..., columns]`, of the type of the inputs.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    return _gated(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """`gelu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate, up: see :func:`swiglu`.
        approximate: `"none"`, or `"tanh"` for the approximation of gelu by tanh, as in `torch.nn.functional.gelu`.

    Returns:
        `[..., columns]`, of the type of the inputs.

    Raises:
        ProblemError, UnsupportedError: as :func:`swiglu`, or another word for `approximate`.
    """
    if approximate not in ("none", "tanh"):
        raise ProblemError(f"approximate = {approximate!r}; allowed are 'none' and 'tanh'")
    return _gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh")


def _gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        if gate.shape[-1] % 2:
            raise ProblemError(f"gate and up side by side have an even number of columns, got {gate.shape[-1]}")
        gate, up = gate.chunk(2, -1)
    _check_shape("up", up, "gate", gate.shape)
    out: Tensor = _operator("glu")(_rows(gate), _rows(up), activation)
    return out.reshape(gate.shape)


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
    if copies and torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, cos, sin)):
        turned = rope(q[..., :rotated], k[..., :rotated], cos, sin, interleaved=interleaved)
        out_q, out_k = (torch.cat((new, x[..., rotated:]), -1) for new, x in zip(turned, (q, k), strict=True))
        return out_q, out_k
    if copies:  # what is not rotated is copied
        q, k, inplace = q.clone(), k.clone(), True
    parts = 1 if interleaved else 2
    given = [_by_position(x[..., :rotated] if rotated < head_dim else x, parts) for x in (q, k)]
    tables = [_angles(name, x, rotated, interleaved) for name, x in (("cos", cos), ("sin", sin))]
    if inplace:
        _operator("rope_in_place")(*given, *tables)
        return q, k
    out_q, out_k = (x.flatten(-2).transpose(1, 2) for x in _operator("rope")(*given, *tables))
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


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
) -> Any:
    """The cross entropy of each row of logits with its label, `logsumexp(row) - row[label]`, in float32.

    It is made of differences of logits: rows far from zero lose no digits.

    Args:
        logits: `[..., columns]` CUDA tensor, float16, bfloat16 or float32: classes are on the last axis.
        labels: `[...]`, int64 or int32. A label that is neither a column nor `ignore_index` makes its row's loss NaN.
        ignore_index: the label of rows that do not count; their loss is 0.
        label_smoothing: the share of the target that all columns have alike; the label has the rest.
        reduction: `"none"` for the losses; `"sum"`, or `"mean"` over the rows that count, as in torch.
        return_lse: also return the logarithm of the sum of exponentials of each row.

    Returns:
        The loss or losses in float32; with `return_lse` also `[...]` float32.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, another word for `reduction`, or no CUDA tensors.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ProblemError(f"reduction = {reduction!r}; allowed are 'none', 'mean' and 'sum'")
    _check_shape("labels", labels, "logits without its last axis", logits.shape[:-1])
    loss, lse = _operator("cross_entropy")(
        _rows(logits), labels.reshape(-1), label_smoothing != 0, ignore_index, label_smoothing
    )
    if reduction == "none":
        loss = loss.reshape(labels.shape)
    else:
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / (labels != ignore_index).sum()
    return (loss, lse.reshape(labels.shape)) if return_lse else loss
