"""How far outputs are from float64, and from when on an output is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiledsched.core.arrays import RELATIVE_ERRORS

BEYOND = 2.5
"""An output is wrong, and not merely inaccurate, where its error is this many times what our own kernels may have."""


@dataclass(frozen=True, kw_only=True)
class Error:
    """One method's error, over the part of the output that is compared."""

    max_abs: float
    """Largest absolute difference; infinite where any element of the output is not finite."""
    relative: float
    """Frobenius norm of the difference over that of the reference; for several outputs, the largest."""
    by_output: str = ""
    """The relative error of each of several outputs, such as `dQ=0.0021 dK=0.0022`; empty for one output."""

    @classmethod
    def of_outputs(cls, found: Mapping[str, Error]) -> Error:
        """The error of all outputs of a kernel, given each one's by name."""
        apart = " ".join(f"{name}={each.relative:.3g}" for name, each in found.items())
        return cls(
            max_abs=max(each.max_abs for each in found.values()),
            relative=max(each.relative for each in found.values()),
            by_output=apart if len(found) > 1 else "",
        )

    def verdict(self, dtype: str) -> str:
        """Why an output of this type is wrong; empty where it is right."""
        if not math.isfinite(self.max_abs):
            return "wrong result: not every element is finite"
        if self.relative > BEYOND * RELATIVE_ERRORS.get(dtype, 0.0):
            return f"wrong result: relative error {self.relative:.2g}"
        return ""


NOT_FINITE = Error(max_abs=math.inf, relative=math.inf)
"""The error of an output with an element that is not finite."""


def error_of(xp: Any, arrays: Iterable[tuple[Any, Any]]) -> Error:
    """The error over several arrays together.

    Args:
        xp: numpy or cupy.
        arrays: pairs of an output and its reference, both float64 and of one shape.
    """
    largest, squares, norm = 0.0, 0.0, 0.0
    for output, reference in arrays:
        difference = output - reference
        largest = max(largest, float(xp.abs(difference).max()) if difference.size else 0.0)
        squares += float((difference * difference).sum())
        norm += float((reference * reference).sum())
    return Error(max_abs=largest, relative=math.sqrt(squares / norm) if norm else math.sqrt(squares))
