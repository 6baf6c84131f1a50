"""The matrix product, as a function like torch's, with what a model does to its result, and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tiledsched.core.errors import UnsupportedError
from tiledsched.kernels.epilogues import ACTIVATIONS, ARRAYS, E4M3
from tiledsched.ops.front import GRADIENTS, check_shape, flat_rows, multiply, operator, takes_tensors


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
        `[..., m, n]`, of the type of the inputs, or float8_e4m3fn. It is differentiable in all tensors that have its type, once,
        unless there is an `out_scale` or an `epilogue`; the gradients recompute the sums that they need.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
        DeclarationError: `epilogue` cannot be compiled.
    """
    if residual is not None:
        columns = other.shape[-1] // (1 + isinstance(gate, str))
        check_shape("residual", residual, "the result", (*input.shape[:-1], columns))
        residual = flat_rows(residual)
    out = multiply("matmul", (input, other), epilogue, arrays, bias, activation, gate, residual, out_scale)
    return out if input.ndim == 2 else out.reshape(*input.shape[:-1], out.shape[-1])


def _gradients(pinned: Mapping[str, Any], ctx: Any, d: Tensor) -> tuple[Any, ...]:
    """The gradients of A, B and the arrays of the epilogue, in the order in which the operator takes them. The sums are computed
    anew, and torch's formulae applied to them."""
    if pinned.get("out_dtype") == E4M3:
        raise UnsupportedError("a result of 8 bits has no gradients; leave out out_scale where gradients are required")
    names = ["A", "B", *(name for name in ARRAYS if pinned.get(name.lower()))]
    given = dict(zip(names, ctx.saved_tensors, strict=False))
    wanted = dict(zip(names, ctx.needs_input_grad, strict=False))
    product, activation = operator("matmul"), ACTIVATIONS[pinned.get("activation", "none")]
    aten, found, factors = torch.ops.aten, {"Residual": d}, {}

    def sums() -> Tensor:
        made: Tensor = product(given["A"], given["B"])
        return made + given["Bias"] if "Bias" in given else made

    if "Gate" in given:
        gate = product(given["A"], given["Gate"])
        factors["Gate"] = activation.slope(aten, d * sums(), gate)
        d = d * activation.torch(torch.nn.functional, gate)
    elif pinned.get("activation", "none") != "none":
        d = activation.slope(aten, d, sums())
    if wanted.get("Bias"):
        found["Bias"] = d.sum(0)
    factors["B"] = d
    found |= {name: product(given["A"].t(), each) for name, each in factors.items() if wanted[name]}
    if wanted["A"]:
        found["A"] = functools.reduce(torch.add, [product(each, given[name].t()) for name, each in factors.items()])
    return tuple([found.get(name) if wanted[name] else None for name in names])


def _save(pinned: Mapping[str, Any], ctx: Any, inputs: Any, output: Any) -> None:
    """Save what the gradients read: all before the residual, which may be changed in place."""
    ctx.save_for_backward(*inputs[: 2 + pinned.get("bias", False) + pinned.get("gate", False)])


GRADIENTS |= dict.fromkeys(
    ("matmul", "matmul_epilogue"),
    lambda made, pinned: made.register_autograd(
        functools.partial(_gradients, pinned), setup_context=functools.partial(_save, pinned)
    ),
)
