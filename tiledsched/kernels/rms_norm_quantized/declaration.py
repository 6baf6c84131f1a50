"""The declaration of root-mean-square normalisation to 8-bit floats. What runs on the GPU is in `tiles` beside it."""

from __future__ import annotations

from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.kernels.quantization import QuantizedRows, reference_quantized
from tiledsched.kernels.rms_norm import RmsNorm
from tiledsched.kernels.rms_norm_quantized.rivals import in_torch
from tiledsched.kernels.row_schedules import RowCost


class RmsNormQuantized(QuantizedRows, Kernel):
    """Out * Scale = X / sqrt(mean(X * X) + eps) * W by rows, Out in float8_e4m3fn with a scale for each row; with `residual`,
    X + R takes the place of X and is an output, Sum. With `static`, all rows have the scale `Given`.
    """

    name = "rms_norm_quantized"
    residual = ts.flag()
    static = ts.flag()
    X = ts.array("rows columns")
    R = ts.array("rows columns", when="residual")
    W = ts.array("columns")
    Given = ts.array("1", dtype="float32", when="static")
    Out = ts.out("rows columns", dtype="float8_e4m3fn")
    Scale = ts.out("rows", dtype="float32")
    Sum = ts.out("rows columns", when="residual", aligned=True)
    eps = ts.scalar(1e-5)

    axes = ("columns", "rows", "residual", "static", "dtype")
    suites = {"models": [{**each, "static": static} for static in (False, True) for each in RmsNorm.suites["models"]]}
    cost = RowCost()

    @staticmethod
    def reference(xp: Any, X: Any, R: Any, W: Any, Given: Any, eps: float) -> Any:
        """The normalised rows over their scales, the scales and, with a residual, the sums."""
        made = RmsNorm.reference(xp, X, R, W, eps)
        out, *total = made if isinstance(made, tuple) else (made,)
        return (*reference_quantized(xp, out, Given), *total)

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, narrow and wide, with scales of their own and a given one."""
        return [
            RmsNormQuantized.problem(rows=rows, columns=columns, residual=residual, static=static, dtype=dtype)
            for dtype, residual, static in (
                ("bfloat16", False, False),
                ("float16", True, False),
                ("bfloat16", True, True),
            )
            for rows, columns in ((5, 1000), (7, 512), (3, 5120), (1, 24))
        ]
