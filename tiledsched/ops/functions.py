"""Matrix product, RMSNorm and softmax on tuned schedules, as functions like torch's."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from tiledsched.core.registry import kernel_named

if TYPE_CHECKING:
    from torch import Tensor


@functools.cache
def _operator(kernel: str, **pinned: Any) -> Any:
    """The operator of a kernel, made at its first call."""
    from tiledsched.serve.op import op

    suffix = "".join(f"_{name}" for name, value in pinned.items() if value)
    return op(f"tiledsched::{kernel}{suffix}", kernel_named(kernel), **pinned)


def _rows(x: Tensor) -> Tensor:
    """`[rows, columns]`; their number is not left to torch, which cannot tell it where there are no columns."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


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
    out, total = _operator("rms_norm", residual=True)(rows, residual.reshape(rows.shape), weight, eps=eps)
    return out.reshape(input.shape), total.reshape(input.shape)


def softmax(input: Tensor) -> Tensor:
    """The softmax of `[..., columns]` over the last axis, of float16 or bfloat16 CUDA tensors.

    Raises:
        ProblemError, UnsupportedError: types that are not served, or no CUDA tensors.
    """
    out: Tensor = _operator("softmax")(_rows(input))
    return out.reshape(input.shape)
