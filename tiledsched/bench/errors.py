"""How far an output is from float64, and from when on it is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiledsched.core.arrays import RELATIVE_ERRORS

BEYOND = 2.5
"""An output is wrong, not inaccurate, where its relative Frobenius error is this many times what our own may have."""


@dataclass(frozen=True, kw_only=True)
class Error:
    """One method's error over what is compared."""

    max_abs: float
    """Largest absolute difference; infinite where any element of the whole output is not finite."""
    relative: float
    """Frobenius norm of the difference over that of the reference; of several outputs the largest."""

    def verdict(self, dtype: str) -> str:
        """Empty, or why the output, of this type, is wrong."""
        if not math.isfinite(self.max_abs):
            return "wrong result: not every element is finite"
        if self.relative > BEYOND * RELATIVE_ERRORS.get(dtype, 0.0):
            return f"wrong result: relative error {self.relative:.2g}"
        return ""
