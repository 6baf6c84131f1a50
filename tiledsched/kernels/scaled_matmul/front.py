"""The product of 8-bit floats, as a function like torch's, with what a model does to its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from tiledsched.core.errors import ProblemError
from tiledsched.kernels.epilogues import E4M3, columns_of_both, has_shape
from tiledsched.kernels.scaled_matmul.declaration import BLOCK
from tiledsched.ops.front import check_shape, multiply, operator, takes_tensors

OUT_TYPES = ("bfloat16", "float16", "float32")
"""Types of results that are not rounded to 8 bits."""


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
    if isinstance(gate, str) and scale_gate is None:  # else the latter is refused
        gate, b, scale_gate, scale_b = _columns_of_both(b, scale_b, gate)
    rows, columns, kind = a.shape[:1], b.shape[1:], "row"
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        kind = "tensor"
    elif a.ndim == b.ndim == 2 and not (
        has_shape(scale_a, (*rows, 1), rows) and has_shape(scale_b, (1, *columns), columns)
    ):
        kind, use_fast_accum = "block", False
        _check_blocks(a, b, scale_a, scale_b)
    eight = out_scale is not None
    like = None if eight else residual if bias is None else bias
    wanted = str(out_dtype or (E4M3 if eight else "bfloat16" if like is None else like.dtype)).removeprefix("torch.")
    if wanted not in (*OUT_TYPES, E4M3):
        raise ProblemError(f"out_dtype must be torch.bfloat16, torch.float16 or torch.float32, got {out_dtype!r}")
    if (wanted == E4M3) != eight:
        raise ProblemError(
            f"results of {E4M3} are divided by out_scale, and no others are; got out_dtype = {out_dtype}. "
            f"{'Leave it out' if eight else 'Give out_scale, too'}"
        )
    if bias is not None and not eight and wanted != str(bias.dtype).removeprefix("torch."):
        raise ProblemError(f"bias must be of the output's type, {wanted}, got {bias.dtype}; cast it")
    operands = a, b, *(_laid_out(each, kind) for each in (scale_a, scale_b))
    if activation is gate is scale_gate is residual is out_scale is epilogue is None and not arrays:
        found = operator("scaled_matmul", bias=bias is not None)
        # The bias has the output's type.
        return cast(Tensor, found(*operands, wanted if bias is None else bias, kind, use_fast_accum))
    if (gate is None) != (scale_gate is None) or isinstance(gate, str):
        raise ProblemError("scale_gate belongs to a gate that is a tensor; give both or neither")
    if scale_gate is not None:
        check_shape("scale_gate", scale_gate, "scale_b", scale_b.shape)
    return multiply(
        "scaled_matmul",
        operands,
        epilogue,
        arrays,
        *(bias, activation, gate, residual, out_scale),
        gate_scales=() if scale_gate is None else [_laid_out(scale_gate, kind)],
        out_dtype=wanted,
        scales=kind,
        fast_accum=use_fast_accum,
    )


def _laid_out(scale: Tensor, kind: str) -> Tensor:
    """A scale as the kernel takes it."""
    turned = scale.t() if kind == "block" else scale.reshape(-1)
    return turned if turned.stride(-1) == 1 else turned.contiguous()


def _columns_of_both(b: Tensor, scale_b: Tensor, order: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gate's columns and the others of a matrix that holds both, and the scales of either.

    Raises:
        ProblemError: columns of both have one scale, though others have another.
    """
    gate, other = columns_of_both(b, order)
    if scale_b.numel() == 1:
        return gate, other, scale_b, scale_b
    k, columns = b.shape[-2:]
    known = (columns,), (1, columns), (-(-k // BLOCK), -(-columns // BLOCK))
    if not has_shape(scale_b, *known):
        raise ProblemError(
            f"where b {tuple(b.shape)} holds both matrices, so does scale_b: one number, {known[1]} for columns, or {known[2]} "
            f"for {BLOCK} x {BLOCK} elements; got {tuple(scale_b.shape)}. Reshape it"
        )
    if scale_b.shape[-1] != b.shape[-1] and (order == "interleaved" or other.shape[-1] % BLOCK):
        raise ProblemError(
            f"a scale of {BLOCK} x {BLOCK} elements would be that of columns of both; give the gate as a tensor, and scale_gate"
        )
    parts = scale_b.chunk(2, -1) if order == "halves" else (scale_b[..., ::2], scale_b[..., 1::2])
    return gate, other, *parts


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
