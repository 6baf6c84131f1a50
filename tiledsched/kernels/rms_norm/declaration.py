"""The declarations of root-mean-square normalisation: rounded to the type of its input, and to 8-bit floats with scales. What
runs on the GPU is in `tiles` beside it and `kernels.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.rms_norm.rivals import in_torch
from tiledsched.kernels.row_schedules import (
    ELEMENTS,
    FP32_PER_ELEMENT,
    WIDTHS,
    QuantizedRows,
    RowCost,
    RowKernel,
    RowSimilarity,
    WholeRowCost,
    reference_quantized,
)


class RmsNorm(RowKernel, Kernel):
    """Out = X / sqrt(mean(X * X) + eps) * W by rows; with `residual`, X + R takes the place of X and is an output, Sum."""

    name = "rms_norm"
    residual = ts.flag()
    X = ts.array("rows columns")
    R = ts.array("rows columns", when="residual")
    W = ts.array("columns")
    Out = ts.out("rows columns")
    Sum = ts.out("rows columns", when="residual", aligned=True)
    eps = ts.scalar(1e-5)

    axes = ("columns", "rows", "residual", "dtype")
    suites = {
        "widths": [
            {"rows": ELEMENTS // columns, "columns": columns, "residual": residual}
            for residual in (False, True)
            for columns in WIDTHS
        ],
        "models": [
            {"rows": tokens, "columns": columns, "residual": residual}
            for residual in (False, True)
            for columns in (3584, 4096, 8192)
            for tokens in (16, 512, 4096, 16384)
        ],
    }

    cost = RowCost()

    @staticmethod
    def entry(p: Problem, s: Schedule) -> Callable[..., None]:
        """One of two, which differ in their arrays."""
        from tiledsched.kernels.rms_norm import tiles

        return tiles.rms_norm_residual if p.residual else tiles.rms_norm

    @staticmethod
    def reference(xp: Any, X: Any, R: Any, W: Any, eps: float) -> Any:
        """The normalised rows and, with a residual, the sums."""
        x = X if R is None else X + R
        out = x / xp.sqrt((x * x).mean(-1, keepdims=True) + eps) * W
        return out if R is None else (out, x)

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, narrow and wide."""
        return [
            RmsNorm.problem(rows=rows, columns=columns, residual=residual, dtype=dtype)
            for dtype in ("bfloat16", "float16")
            for residual in (False, True)
            for rows, columns in ((5, 1000), (7, 512), (3, 5120), (1, 24))
        ]


class RmsNormQuantized(QuantizedRows, RmsNorm):
    """Out * Scale = the rows as `RmsNorm` normalises them, where Out is float8_e4m3fn and each row has a scale. With `static`,
    all rows have the scale `Given`.
    """

    name = "rms_norm_quantized"
    axes = ("columns", "rows", "residual", "static", "dtype")  # type: ignore[assignment]
    suites = {"models": [{**each, "static": static} for static in (False, True) for each in RmsNorm.suites["models"]]}
    cost = WholeRowCost(arrays=1, instructions=FP32_PER_ELEMENT, live=0.9)  # type: ignore[assignment]
    similarity = RowSimilarity()

    @staticmethod
    def entry(p: Problem, s: Schedule) -> Callable[..., None]:
        """One function for all of its problems."""
        from tiledsched.kernels.rms_norm import tiles

        return tiles.rms_norm_quantized

    @staticmethod
    def reference(xp: Any, X: Any, R: Any, W: Any, Given: Any, eps: float) -> Any:  # type: ignore[override]
        """The normalised rows over their scales, with a residual the sums, and the scales."""
        made = RmsNorm.reference(xp, X, R, W, eps)
        out, *total = made if isinstance(made, tuple) else (made,)
        out, scale = reference_quantized(xp, out, Given)
        return out, *total, scale
