"""The matrix product, as a function like torch's."""

from __future__ import annotations

from torch import Tensor

from tiledsched.ops.front import flat_rows, operator, takes_tensors


@takes_tensors
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
    flat = input if input.ndim == 2 else flat_rows(input)
    out: Tensor = operator("matmul")(flat, other)
    return out if input.ndim == 2 else out.reshape(*input.shape[:-1], other.shape[-1])
