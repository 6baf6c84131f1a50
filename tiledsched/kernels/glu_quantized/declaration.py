"""The declaration of gated linear units to 8-bit floats. What runs on the GPU is in `tiles` beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.glu import Glu
from tiledsched.kernels.glu_quantized.rivals import in_torch
from tiledsched.kernels.quantization import QuantizedRows, reference_quantized
from tiledsched.kernels.row_schedules import RowCost


class GluQuantized(QuantizedRows, Kernel):
    """Out * Scale = activation(Gate) * Up, Out in float8_e4m3fn with a scale for each row. With `static`, all rows have the scale
    `Given`.
    """

    name = "glu_quantized"
    activation = Glu.fields["activation"]
    static = ts.flag()
    Gate = ts.array("rows columns")
    Up = ts.array("rows columns")
    Given = ts.array("1", dtype="float32", when="static")
    Out = ts.out("rows columns", dtype="float8_e4m3fn")
    Scale = ts.out("rows", dtype="float32")

    axes = ("columns", "rows", "activation", "static", "dtype")
    suites = {"models": [{**each, "static": static} for static in (False, True) for each in Glu.suites["models"]]}
    cost = RowCost()

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Parameters that are called like no knob: those of the unit that does not quantise."""
        return Glu.constants(p, s)

    @staticmethod
    def reference(xp: Any, Gate: Any, Up: Any, Given: Any, activation: str) -> Any:
        """The gated rows over their scales, and the scales."""
        return reference_quantized(xp, Glu.reference(xp, Gate, Up, activation), Given)

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, narrow and wide, with every activation, scales of their own and a given one."""
        return [
            GluQuantized.problem(rows=rows, columns=columns, activation=activation, static=static, dtype=dtype)
            for dtype, activation, static in (
                ("bfloat16", "silu", False),
                ("float16", "gelu", True),
                ("float16", "gelu_tanh", False),
            )
            for rows, columns in ((5, 1000), (7, 512), (3, 5120), (1, 24))
        ]
