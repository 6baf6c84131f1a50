"""The declaration of the gradient of softmax. What runs on the GPU is in `tiles` beside it and `kernels.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.kernels.row_schedules import RowKernel, RowSimilarity, WholeRowCost
from tiledsched.kernels.softmax import Softmax
from tiledsched.kernels.softmax_backward.rivals import in_torch


class SoftmaxBackward(RowKernel, Kernel):
    """dX = Out * (dOut - sum(dOut * Out)) by rows: the gradient of X where Out = softmax(X)."""

    name = "softmax_backward"
    dOut = ts.array("rows columns")
    Out = ts.array("rows columns")
    dX = ts.out("rows columns")

    axes = Softmax.axes
    suites = Softmax.suites

    cost = WholeRowCost(arrays=2, instructions=8.0)
    """Conversions, products and a sum; in registers are Out and dOut in 16 bits, and a value on its way."""
    similarity = RowSimilarity()

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
        """An output of softmax: shares that add up to 1 by rows, before they are rounded."""
        return {"Out": Softmax.reference(xp, rng.standard_normal((p.rows, p.columns), dtype="float32"))}

    @staticmethod
    def reference(xp: Any, dOut: Any, Out: Any) -> Any:
        """The gradient of each row."""
        return Out * (dOut - (dOut * Out).sum(-1, keepdims=True))

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, narrow and wide."""
        return [SoftmaxBackward.problem(**dict(p.values)) for p in Softmax.small()]
