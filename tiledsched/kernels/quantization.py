"""How rows are rounded to 8-bit floats with scales: what kernels share on the host. Tile code is in `quantized_rows`.

A row's scale is its largest magnitude over 448, the largest float8_e4m3fn; or a scale is given, one for all rows. What is stored
is the row over its scale, rounded to nearest even; where a given scale is too small for an element, the largest number of its
sign is stored. NaN stays NaN, and a row with an infinity and a scale of its own becomes NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy

from tiledsched.core.arrays import Tolerance
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.row_schedules import RowKernel

LARGEST = 448.0
"""The largest float8_e4m3fn."""
LEAST_HIGHEST = 1e-12
"""The least that a row's largest magnitude counts as: it keeps rows of zeros from being divided by zero."""
ROUNDING_ERROR = 0.06
"""Largest relative error of rows over their scale: rounding to four significant bits costs at most 1/17 of a number. That holds
for each element, so for tiles of any size, and where an element lies between two numbers and is rounded either way.
"""
TEST_SCALE = 0.003
"""The scale given to tests: elements of more than 1.34 do not fit."""


class QuantizedRows(RowKernel):
    """What the declarations of kernels that quantise rows share; each is a :class:`Kernel`, too."""

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
        """A scale that is too small for some elements."""
        return {"Given": xp.full(1, TEST_SCALE, dtype=numpy.float32)}

    @staticmethod
    def tolerance(p: Problem, s: Schedule) -> Tolerance:
        """That of the types, and for 8-bit outputs that of one rounding, of numbers as exact as float32."""
        usual = Tolerance.of_types(["float32", str(p.dtype)], [p.dtype])
        return replace(usual, by_type=(*usual.by_type, ("float8_e4m3fn", ROUNDING_ERROR)))


def reference_quantized(xp: Any, rows: Any, Given: Any) -> tuple[Any, Any]:
    """(rows over their scale, before they are rounded; the scale of each row), by NumPy or CuPy."""
    scale = xp.maximum(xp.abs(rows).max(-1), LEAST_HIGHEST) / LARGEST if Given is None else Given + xp.zeros(len(rows))
    return xp.clip(rows / scale[:, None], -LARGEST, LARGEST), scale


def torch_quantized(rows: Any, Given: Any) -> tuple[Any, Any]:
    """(rows as float8_e4m3fn, the scale of each row), by torch's functions on float32 rows."""
    import torch

    scale = rows.abs().amax(-1).clamp(min=LEAST_HIGHEST) / LARGEST if Given is None else Given.expand(len(rows))
    return (rows * (1.0 / scale)[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale.contiguous()
