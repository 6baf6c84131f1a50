"""The grouped product, as a function like torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiledsched.ops.front import multiply, takes_tensors


@takes_tensors
def grouped_matmul(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: str | Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_scale: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    arrays: tuple[Tensor, ...] = (),
) -> Tensor:
    """The rows of each group of `a` times that group's matrix, on the tuned schedule, as `torch._grouped_mm(a, b, offs=offsets)`.

    What follows the product is computed from the float32 sums in the same kernel, as in :func:`tiledsched.matmul`.

    No size of a group is read on the host, so that calls can be captured in CUDA graphs.

    Args:
        a: `[tokens, k]` CUDA tensor whose rows are sorted by group, float16 or bfloat16.
        b: `[groups, k, n]`, of the same type; each matrix is row- or column-major (`weight.transpose(1, 2)`).
        offsets: `[groups]`, int32: where each group ends. They never fall; a group may be empty.
        bias: `[groups, n]`, of the same type.
        activation, out_scale, epilogue, arrays: see :func:`tiledsched.matmul`; rows are those of `a`.
        gate: `[groups, k, n]`, or how `b`, `[groups, k, 2 * n]`, holds both; see :func:`tiledsched.matmul`.
        residual: `[tokens, n]`, of the same type.

    Returns:
        `[tokens, n]`, of the type of the inputs, or float8_e4m3fn, without gradients. Rows from the last offset on are undefined.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    parts = bias, activation, gate, residual, out_scale
    return multiply("grouped_matmul", (a, b, offsets), epilogue, arrays, *parts)
