"""The rotation of pairs of elements, for NumPy, CuPy and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rotated(stack: Callable[..., Any], x: Any, cos: Any, sin: Any) -> Any:
    """`x` as the kernel has it, rotated, by the `stack` of NumPy, CuPy or torch."""
    shape = x.shape
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    if shape[-2] == 1:
        a, b = x[..., 0, 0::2], x[..., 0, 1::2]
        return stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(shape)
    a, b = x[..., 0, :], x[..., 1, :]
    return stack((a * cos - b * sin, b * cos + a * sin), -2)
