"""What the integers of an input may be, and inputs made of them: random ones, and those at the limits.

The code runs with NumPy and with CuPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy

from tiledsched.core.errors import ProblemError

INTEGER_KINDS = ("smallest", "largest", "sentinel")
"""Kinds of inputs in which every integer is the smallest that is allowed, the largest, or a sentinel."""
SENTINEL_SHARE = 1 / 8
"""The share of random integers that are sentinels."""


@dataclass(frozen=True, kw_only=True)
class Integers:
    """The values of an integer input; see :func:`tiledsched.array`."""

    least: int = 0
    """The smallest value, sentinels apart."""
    below: int = 2
    """Values are less than this number, sentinels apart."""
    sentinels: tuple[int, ...] = ()
    """Values with a meaning of their own, such as -100 for a label to ignore."""
    sorted: bool = False
    """Whether values do not fall along the last axis."""
    distinct: bool = False
    """Whether no value occurs twice, sentinels apart."""
    first: int | None = None
    """The first value along the last axis."""
    last: int | None = None
    """The last value along the last axis."""

    def random(self, xp: Any, rng: Any, shape: tuple[int, ...]) -> Any:
        """Uniformly distributed values; one in eight is a sentinel, the last one among them.

        Args:
            xp: numpy or cupy.
            rng: a Generator of that module.
            shape: of the array.
        """
        count = math.prod(shape)
        span = self.below - self.least
        if self.distinct:
            step = max(1, span // max(1, count))
            spread = xp.arange(count) * step + rng.integers(0, step, size=count)
            values = self.least + spread[xp.argsort(rng.random(count))].reshape(shape)
        else:
            values = rng.integers(self.least, max(self.below, self.least + 1), size=shape)
        if self.sorted:
            values = xp.sort(values, axis=-1)
        self._set_ends(values)
        if self.sentinels and count > 1:
            chosen = rng.random(shape) < SENTINEL_SHARE
            chosen.reshape(-1)[-1] = True
            which = xp.asarray(self.sentinels)[rng.integers(0, len(self.sentinels), size=shape)]
            values = xp.where(chosen, which, values)
        return values

    def extreme(self, xp: Any, kind: str, shape: tuple[int, ...]) -> Any:
        """Values of one of :data:`INTEGER_KINDS`; None for `sentinel` where there is none."""
        count = math.prod(shape)
        if kind == "sentinel":
            return xp.full(shape, self.sentinels[0], dtype=numpy.int64) if self.sentinels else None
        smallest = self.least if kind == "smallest" else self.below - (count if self.distinct else 1)
        values = xp.full(shape, smallest, dtype=numpy.int64)
        if self.distinct:
            values += xp.arange(count).reshape(shape)
        self._set_ends(values)
        return values

    def check(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise where an array of this shape and type cannot hold such values.

        Raises:
            ProblemError: there are too few distinct values, none at all, or some that the type does not hold.
        """
        values = self.below - self.least
        if values < 1:
            raise ProblemError(f"{name}: no value is at least {self.least} and below {self.below}")
        if self.distinct and math.prod(shape) > values:
            raise ProblemError(
                f"{name}: {math.prod(shape)} elements cannot be distinct where {values} values are allowed"
            )
        limits = numpy.iinfo(dtype) if dtype != "bool_" else None
        lowest, highest = (0, 1) if limits is None else (int(limits.min), int(limits.max))
        named = [self.least, self.below - 1, *self.sentinels]
        wrong = [each for each in named if not lowest <= each <= highest]
        if wrong:
            raise ProblemError(f"{name}: {dtype} does not hold {wrong[0]}; declare a wider type")

    def _set_ends(self, values: Any) -> None:
        if values.size:
            for place, value in ((0, self.first), (-1, self.last)):
                if value is not None:
                    values[..., place] = value
