"""The declaration of the gradient of softmax. What runs on the GPU is in `tiles` beside it and `kernels.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.row_schedules import RowKernel, RowSimilarity, StreamingCost, TileDemand, row_coverage
from tiledsched.kernels.softmax import Softmax
from tiledsched.kernels.softmax_backward.rivals import in_torch

FP32_PER_ELEMENT = 8.0
"""Instructions per element: conversions, products, a sum."""
LIVE_PER_ELEMENT = 2.0
"""Float32 values in registers for each element of a row: Out and dOut in 16 bits, and one on its way."""


class SoftmaxBackwardCost(StreamingCost):
    """The time of a kernel that reads rows of two arrays, once or twice, and writes rows."""

    def work(self, p: Problem, s: Schedule) -> TileDemand:
        """A row that is not held is read again, from the L2 cache for the most part."""
        rows, tile = s.number("TILE_ROWS"), s.number("TILE_COLUMNS")
        covered, held = row_coverage(p, s)
        return TileDemand(
            count=-(-p.rows // rows),
            bytes=4.0 * rows * min(covered if held else tile, p.columns),
            instructions=rows * covered * FP32_PER_ELEMENT * (1.0 if held else 1.6),
            live=rows * (covered if held else tile) * LIVE_PER_ELEMENT,
            again=0.0 if held else 1.0 * p.rows * p.columns,
        )


class SoftmaxBackward(RowKernel, Kernel):
    """dX = Out * (dOut - sum(dOut * Out)) by rows: the gradient of X where Out = softmax(X)."""

    name = "softmax_backward"
    rows = ts.dim()
    columns = ts.dim(constant=True, most=65536)
    dtype = ts.dtype("bfloat16", "float16")
    dOut = ts.array("rows columns")
    Out = ts.array("rows columns")
    dX = ts.out("rows columns")

    axes = Softmax.axes
    suites = Softmax.suites

    cost = SoftmaxBackwardCost()
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
