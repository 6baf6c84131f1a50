"""The declaration of softmax. What runs on the GPU is in `tiles` beside it and `kernels.rows`."""

from __future__ import annotations

from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.kernels.row_schedules import ELEMENTS, WIDTHS, RowCost, RowKernel
from tiledsched.kernels.softmax.rivals import in_torch


class Softmax(RowKernel, Kernel):
    """Out = exp(X) / sum(exp(X)) by rows, computed without overflow."""

    name = "softmax"
    X = ts.array("rows columns")
    Out = ts.out("rows columns")

    axes = ("columns", "rows", "dtype")
    suites = {"widths": [{"rows": ELEMENTS // columns, "columns": columns} for columns in WIDTHS]}

    cost = RowCost()

    @staticmethod
    def reference(xp: Any, X: Any) -> Any:
        """Softmax of each row."""
        powers = xp.exp(X - X.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, narrow and wide."""
        return [
            Softmax.problem(rows=rows, columns=columns, dtype=dtype)
            for dtype in ("bfloat16", "float16")
            for rows, columns in ((5, 1000), (7, 512), (3, 5120), (1, 24))
        ]
