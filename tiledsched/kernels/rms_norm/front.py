"""Root-mean-square normalisation, as a function like torch's, with gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiledsched.ops.front import GRADIENTS, call_quantized, check_shape, flat_rows, operator, takes_tensors


@takes_tensors
def rms_norm(
    input: Tensor, weight: Tensor, eps: float = 1e-5, *, residual: Tensor | None = None, quantize: Any = None
) -> Any:
    """`x / sqrt(mean(x * x) + eps) * weight` over the last axis, where x is `input`, or `input + residual`.

    Args:
        input: `[..., columns]` CUDA tensor, float16 or bfloat16.
        weight: `[columns]`, of the same type.
        eps: added to the mean of squares.
        residual: of the shape of `input`.
        quantize: round to float8_e4m3fn with scales: `"row"` for a scale of each row, its largest magnitude over 448; or a CUDA
            tensor of one float32, the scale of all rows. Elements are divided by their scale and rounded to nearest even; those
            that do not fit become the largest number of their sign. There are no gradients.

    Returns:
        The normalised rows; with a residual, these and the sum `input + residual`. With `quantize` the scales come last: float32,
        `[..., 1]`, or the tensor that was given, as `scaled_matmul` takes them.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    rows = flat_rows(input)
    added = []
    if residual is not None:
        check_shape("residual", residual, "input", input.shape)
        added = [residual.reshape(rows.shape)]
    if quantize is not None:
        pinned = {"residual": residual is not None}
        return call_quantized("rms_norm_quantized", [rows, *added, weight], quantize, input, pinned, eps=eps)
    if residual is None:
        out = operator("rms_norm")(rows, weight, eps)
        return out if input.ndim == 2 else out.reshape(input.shape)
    out, total = operator("rms_norm", residual=True)(rows, *added, weight, eps)
    return out.reshape(input.shape), total.reshape(input.shape)


# With a residual the sum is what is normalised, and both its terms have one gradient.
GRADIENTS["rms_norm"] = lambda made, pinned: made.register_autograd(
    operator("rms_norm_backward"), names={"X": "Sum", "dR": "dX"} if pinned else None
)
