"""The matrix product, as a function like torch's, with what a model does to its result, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiledsched.ops.front import Steps, check_shape, differentiate, flat_rows, multiply, operator, takes_tensors


@takes_tensors
def matmul(
    input: Tensor,
    other: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: str | Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_scale: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    arrays: tuple[Tensor, ...] = (),
) -> Tensor:
    """`activation(input @ other + bias) + residual` on the tuned schedule, accumulated in float32.

    With a gate the result is `activation(input @ gate) * (input @ other + bias) + residual`, in one kernel. All is computed from
    float32 sums and rounded once; torch rounds the product first.

    Args:
        input: `[..., m, k]` CUDA tensor, float16 or bfloat16; a matrix may be row- or column-major.
        other: `[k, n]`, of the same type, row- or column-major (a linear layer's weight is `weight.t()`).
        bias: `[n]`, of the same type.
        activation: "relu", "squared_relu", "silu", "gelu" or "gelu_tanh" (the approximation by tanh).
        gate: `[k, n]`, of the layout of `other`; or where `other` is `[k, 2 * n]` and holds both, "halves": the gate's columns
            come first, or "interleaved": they are columns 0, 2, 4, ... of a column-major `other`.
        residual: `[..., m, n]`, of the same type.
        out_scale: float32, one number, or one for each row of the result, `[..., m, 1]` or `[..., m]`: the result is divided by
            it and rounded to float8_e4m3fn; larger ones than 448 become 448.
        epilogue: `epilogue(acc, row, column, *arrays)`, a function of yours in the place of the activation, in cuTile's words:
            of a float32 tile of sums `[rows, columns]`, the numbers of its rows, int32 `[rows, 1]`, and of its columns,
            `[1, columns]`. It is compiled into the kernel; what is said of the functions of `tiledsched.flex` holds for it.
        arrays: contiguous tensors that `epilogue` reads with `ct.gather`, in this order.

    Returns:
        `[..., m, n]`, of the type of the inputs, or float8_e4m3fn. It is differentiable in all tensors that have its type, twice,
        unless there is an `out_scale` or an `epilogue`; the gradients recompute the sums that they need.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
        DeclarationError: `epilogue` cannot be compiled.
    """
    if bias is activation is gate is residual is out_scale is epilogue is None and not arrays:
        out: Tensor = operator("matmul")(input if input.ndim == 2 else flat_rows(input), other)
    else:
        if residual is not None:
            columns = other.shape[-1] // (1 + isinstance(gate, str))
            check_shape("residual", residual, "the result", (*input.shape[:-1], columns))
            residual = flat_rows(residual)
        out = multiply("matmul", (input, other), epilogue, arrays, bias, activation, gate, residual, out_scale)
    return out if input.ndim == 2 else out.reshape(*input.shape[:-1], out.shape[-1])


def _steps(given: dict[str, Tensor]) -> Steps:
    product = operator("matmul")
    return Steps(
        product,
        weights=lambda d, b: product(given["A"].t(), d),
        bias=lambda d: d.sum(0),
        biased=lambda x, b: multiply("matmul", (x, b), None, (), given["Bias"], None, None, None, None),
        finished=lambda found: found,
    )


differentiate(("matmul", "matmul_epilogue"), ("A", "B"), _steps)
