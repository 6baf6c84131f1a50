"""Matrix products, RMSNorm and softmax on tuned schedules, as functions like torch's."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from tiledsched.core.errors import ProblemError
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
        scale_a: one float32 number for all of a, or one for each row, `[m, 1]`.
        scale_b: one float32 number for all of b, or one for each column, `[1, n]`; of both or neither there is one.
        bias: `[n]`, of the output's type.
        out_dtype: bfloat16, float16 or float32; the type of the bias unless given, or else bfloat16.
        use_fast_accum: whether sums may stay in the tensor cores of sm_90, which keep fewer bits than float32; otherwise sums of
            128 products are added in float32. It changes nothing on other GPUs.

    Returns:
        `[m, n]` of the type `out_dtype`.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    operands = a, b, scale_a.reshape(-1), scale_b.reshape(-1)
    kind = "tensor" if scale_b.numel() == 1 else "row"
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
    out, total = _operator("rms_norm", residual=True)(rows, residual.reshape(rows.shape), weight, eps=eps)
    return out.reshape(input.shape), total.reshape(input.shape)


def softmax(input: Tensor) -> Tensor:
    """The softmax of `[..., columns]` over the last axis, of float16 or bfloat16 CUDA tensors.

    Raises:
        ProblemError, UnsupportedError: types that are not served, or no CUDA tensors.
    """
    out: Tensor = _operator("softmax")(_rows(input))
    return out.reshape(input.shape)
