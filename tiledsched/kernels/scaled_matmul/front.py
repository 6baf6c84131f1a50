"""The product of 8-bit floats, as a function like torch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiledsched.core.errors import ProblemError
from tiledsched.kernels.scaled_matmul.declaration import BLOCK
from tiledsched.ops.front import operator, takes_tensors


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
) -> Tensor:
    """`(a @ b) * scale_a * scale_b + bias` for 8-bit floats on the tuned schedule, in the conventions of `torch._scaled_mm`.

    Args:
        a: `[m, k]` CUDA tensor, row-major, float8_e4m3fn or float8_e5m2; k and n are multiples of 16.
        b: `[k, n]`, of the same type, column-major (a linear layer's weight is `weight.t()`).
        scale_a: one float32 number for all of a; or one for each row, `[m, 1]` or `[m]`; or one for 128 elements of a row,
            `[m, k / 128]`, rounded up.
        scale_b: one float32 number for all of b; or one for each column, `[1, n]` or `[n]`; or one for 128 x 128 elements,
            `[k / 128, n / 128]`, rounded up. Both are of one of the three kinds. Scales of blocks are copied first unless
            those of a lie with the rows of a next to each other, and those of b with k.
        bias: `[n]`, of the output's type.
        out_dtype: bfloat16, float16 or float32; the type of the bias unless given, or else bfloat16.
        use_fast_accum: whether sums may stay in the tensor cores of sm_90, which keep fewer bits than float32; otherwise sums of
            128 products are added in float32. It changes nothing on other GPUs, nor with scales of blocks.

    Returns:
        `[m, n]` of the type `out_dtype`.

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
    scales = _block_scales(a, b, scale_a, scale_b) if kind == "block" else (scale_a.reshape(-1), scale_b.reshape(-1))
    if bias is not None and out_dtype not in (None, bias.dtype):
        raise ProblemError(f"bias must be of the output's type, {out_dtype}, got {bias.dtype}; cast it")
    typed = str(out_dtype or "bfloat16").removeprefix("torch.") if bias is None else bias  # which has the output's type
    out: Tensor = operator("scaled_matmul", bias=bias is not None)(a, b, *scales, typed, kind, use_fast_accum)
    return out


def _block_scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, ...]:
    """Scales of blocks as the kernel takes them; an error where the shapes are of no kind of scales."""
    steps, blocks = -(-a.shape[-1] // BLOCK), -(-b.shape[-1] // BLOCK)
    given, rows, columns = (tuple(scale_a.shape), tuple(scale_b.shape)), tuple(a.shape[:1]), tuple(b.shape[1:])
    if given != ((*rows, steps), (steps, blocks)):
        raise ProblemError(
            f"scale_a and scale_b must hold one number each; or one for each row of a, {(*rows, 1)}, and one for each column of "
            f"b, {(1, *columns)}; or one for {BLOCK} elements of a row of a, {(*rows, steps)}, and one for {BLOCK} x {BLOCK} of "
            f"b, {(steps, blocks)}; got {given[0]} and {given[1]}. Transpose or reshape them, or scale another way"
        )
    turned = scale_a.t(), scale_b.t()
    return tuple(each if each.stride(-1) == 1 else each.contiguous() for each in turned)
