"""The product of 8-bit floats, as a function like torch's, with what a model does to its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tiledsched.core.errors import ProblemError
from tiledsched.kernels.epilogues import E4M3, columns_of_both
from tiledsched.kernels.scaled_matmul.declaration import BLOCK
from tiledsched.ops.front import check_shape, multiply, operator, takes_tensors


@takes_tensors
def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: Any = None,
    *,
    use_fast_accum: bool = False,
    activation: str | None = None,
    gate: str | Tensor | None = None,
    scale_gate: Tensor | None = None,
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    arrays: tuple[Tensor, ...] = (),
) -> Tensor:
    """`(a @ b) * scale_a * scale_b + bias` for 8-bit floats on the tuned schedule, in the conventions of `torch._scaled_mm`.

    What follows the product is computed from the scaled float32 sums in the same kernel, as in :func:`tiledsched.matmul`.

    Args:
        a: `[m, k]` CUDA tensor, row-major, float8_e4m3fn or float8_e5m2; k and n are multiples of 16.
        b: `[k, n]`, of the same type, column-major (a linear layer's weight is `weight.t()`).
        scale_a: one float32 number for all of a; or one for each row, `[m, 1]` or `[m]`; or one for 128 elements of a row,
            `[m, k / 128]`, rounded up.
        scale_b: one float32 number for all of b; or one for each column, `[1, n]` or `[n]`; or one for 128 x 128 elements,
            `[k / 128, n / 128]`, rounded up. Both are of one of the three kinds. Scales of blocks are copied first unless
            those of a lie with the rows of a next to each other, and those of b with k.
        bias: `[n]`, of the output's type; bfloat16 where the output has 8 bits.
        out_dtype: bfloat16, float16 or float32; the type of the bias or of the residual unless given, or else bfloat16. With an
            `out_scale` the output is float8_e4m3fn.
        use_fast_accum: whether sums may stay in the tensor cores of sm_90, which keep fewer bits than float32; otherwise sums of
            128 products are added in float32. It changes nothing on other GPUs, nor with scales of blocks.
        activation, out_scale, epilogue, arrays: see :func:`tiledsched.matmul`.
        gate: `[k, n]`, of the type and layout of `b`; or how `b`, `[k, 2 * n]`, and `scale_b` hold both, "halves" or
            "interleaved"; see :func:`tiledsched.matmul`. A block of 128 x 128 elements with a scale may not hold columns of both.
        scale_gate: the scales of a gate that is a tensor, of the shape of `scale_b`.
        residual: `[m, n]`, of the type of a bias.

    Returns:
        `[m, n]` of the type `out_dtype`, or float8_e4m3fn, without gradients.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    rows, columns, kind = a.shape[:1], b.shape[1:], "row"
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        kind = "tensor"
    elif a.ndim == b.ndim == 2 and (
        scale_a.shape not in ((*rows, 1), rows) or scale_b.shape not in ((1, *columns), columns)
    ):
        kind, use_fast_accum = "block", False
        _check_blocks(a, b, scale_a, scale_b)
    scales = _laid_out(scale_a, kind), _laid_out(scale_b, kind)
    added, eight = residual if bias is None else bias, out_scale is not None
    if out_dtype is not None and eight != (str(out_dtype).removeprefix("torch.") == E4M3):
        raise ProblemError(
            f"results are divided by out_scale if they are {E4M3}, and only then; {'leave out' if eight else 'give'} "
            f"{'out_dtype' if eight else 'out_scale'}, got out_dtype = {out_dtype}"
        )
    if not eight and bias is not None and out_dtype not in (None, bias.dtype):
        raise ProblemError(f"bias must be of the output's type, {out_dtype}, got {bias.dtype}; cast it")
    if activation is gate is scale_gate is residual is out_scale is epilogue is None and not arrays:
        typed = (
            str(out_dtype or "bfloat16").removeprefix("torch.") if bias is None else bias
        )  # which has the output's type
        out: Tensor = operator("scaled_matmul", bias=bias is not None)(a, b, *scales, typed, kind, use_fast_accum)
        return out
    gate, b, scales, gate_scales = _gated(gate, scale_gate, b, scale_b, scales, kind)
    kept = out_dtype or (added.dtype if added is not None and not eight else "bfloat16")
    return multiply(
        "scaled_matmul_epilogue",
        (a, b, *scales),
        epilogue,
        arrays,
        *(bias, activation, gate, residual, out_scale),
        gate_scales=gate_scales,
        out_dtype=E4M3 if eight else str(kept).removeprefix("torch."),
        scales=kind,
        fast_accum=use_fast_accum,
    )


def _laid_out(scale: Tensor, kind: str) -> Tensor:
    """A scale as the kernel takes it; those of columns lie along the first axis."""
    if kind != "block":
        return scale.reshape(-1)
    turned = scale.t()
    return turned if turned.stride(-1) == 1 else turned.contiguous()


def _gated(
    gate: Any, scale_gate: Tensor | None, b: Tensor, scale_b: Tensor, scales: tuple[Tensor, Tensor], kind: str
) -> tuple[Tensor | None, Tensor, tuple[Tensor, Tensor], list[Tensor]]:
    """The gate, the second operand, the scales of both operands, and those of the gate.

    Raises:
        ProblemError: the gate has no scales, or others than it should have.
    """
    if (scale_gate is None) == (gate is not None and not isinstance(gate, str)):
        raise ProblemError("scale_gate belongs to a gate that is a tensor; give both or neither")
    if scale_gate is not None:
        if scale_gate.numel() != 1 or kind != "tensor":
            check_shape("scale_gate", scale_gate, "scale_b", scale_b.shape)
        return gate, b, scales, [_laid_out(scale_gate, kind)]
    if gate is None:
        return gate, b, scales, []
    columns, of_columns, order = b.shape[-1] // 2, scales[1], gate
    gate, b = columns_of_both(b, order)
    if kind == "tensor":
        return gate, b, scales, [of_columns]
    if kind == "block" and (order == "interleaved" or columns % BLOCK):
        raise ProblemError(
            f"a scale of {BLOCK} x {BLOCK} elements would be that of columns of both; give the gate as a tensor, and scale_gate"
        )
    both = of_columns.chunk(2) if order == "halves" else (of_columns[::2].contiguous(), of_columns[1::2].contiguous())
    return gate, b, (scales[0], both[1]), [both[0]]


def _check_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    """Raise where the shapes of scales are of no kind."""
    steps, blocks = -(-a.shape[-1] // BLOCK), -(-b.shape[-1] // BLOCK)
    given, rows, columns = (tuple(scale_a.shape), tuple(scale_b.shape)), tuple(a.shape[:1]), tuple(b.shape[1:])
    if given != ((*rows, steps), (steps, blocks)):
        raise ProblemError(
            f"scale_a and scale_b must hold one number each; or one for each row of a, {(*rows, 1)}, and one for each column of "
            f"b, {(1, *columns)}; or one for {BLOCK} elements of a row of a, {(*rows, steps)}, and one for {BLOCK} x {BLOCK} of "
            f"b, {(steps, blocks)}; got {given[0]} and {given[1]}. Transpose or reshape them, or scale another way"
        )
