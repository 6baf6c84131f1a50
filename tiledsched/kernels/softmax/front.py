"""Softmax, as a function like torch's, with gradients."""

from __future__ import annotations

from torch import Tensor

from tiledsched.ops.front import flat_rows, operator, takes_tensors


@takes_tensors
def softmax(input: Tensor) -> Tensor:
    """The softmax of `[..., columns]` over the last axis, of float16 or bfloat16 CUDA tensors.

    Raises:
        ProblemError, UnsupportedError: types that are not served, or no CUDA tensors.
    """
    out: Tensor = operator("softmax")(flat_rows(input))
    return out if input.ndim == 2 else out.reshape(input.shape)
