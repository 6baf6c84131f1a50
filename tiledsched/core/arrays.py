"""What a problem's arrays look like, and how exact the outputs of a schedule must be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tiledsched.core.fields import ITEM_BYTES
from tiledsched.core.integers import Integers
from tiledsched.core.storage import shape_of_values

LARGEST_INT32 = 2**31 - 1
RELATIVE_ERRORS = {
    "float16": 4e-3,
    "bfloat16": 8e-3,
    "float32": 1e-3,
    "float64": 1e-6,
    "float8_e4m3fn": 1e-1,
    "float8_e5m2": 2e-1,
    "tfloat32": 1e-3,
    "float8_e8m0fnu": 6e-1,
    "float4_e2m1fn": 3e-1,
}
"""Largest relative error of a tile by output type: the largest error of one rounding, twice for bfloat16, eight times for float16
(whose small numbers have fewer bits), 1.6 times for the 8-bit types with a sign, and about twice for float8_e8m0fnu and
float4_e2m1fn. Of the shipped tables' winners with these limits, measured on an H200, none is above 3.8e-3 in bfloat16 and 3e-4 in
float16; sums in the output's own type are (docs/measuring.md). The bound of float32 is that of matrix products in tf32: twice the
largest error of one rounding to it.
"""
FLOAT32_SUMS = 1e-4
"""Largest relative error of float32 outputs of inputs with fewer bits, whose products float32 holds. A sum of n terms of one sign
loses n * 2**-24 at most where they are added in turn, 6e-5 for a thousand tiles, and one rounding to bfloat16 costs 2e-3."""
EXACT_PRODUCTS = ("float16", "bfloat16")
"""Types of inputs whose products float32 holds, and whose sums tensor cores keep in float32. Those of 8-bit floats are cut."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """An array of one problem."""

    name: str
    """Name of the field that declares the array."""
    role: str
    """in, out, inout or workspace."""
    dtype: str
    """Element type, by cuTile's name."""
    shapes: tuple[tuple[int, ...], ...]
    """Elements along each axis: one shape, or one for each array of a list."""
    column: bool = False
    """Whether the last two axes are swapped in memory."""
    listed: bool = False
    """Whether the field is a list of arrays."""
    aligned: bool = False
    """For scratch memory: whether the machine code counts on rows that start at multiples of 16 bytes."""
    zeroed: bool = False
    """Whether the array must hold zeros when the kernel starts. The kernel leaves zeros behind, so it is filled only once."""
    absolute: bool = False
    """For outputs: whether the gate bounds the absolute error instead of the relative one."""
    integers: Integers | None = None
    """For integer inputs: what is declared of their values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array; of a list of arrays, the shape of the first."""
        return self.shapes[0]

    @property
    def value_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of the numbers in each array: two of float4_e2m1fn share an element."""
        return tuple(shape_of_values(shape, self.dtype) for shape in self.shapes)

    @property
    def bytes(self) -> int:
        """Size of the array, or of all arrays of the list, in bytes."""
        return sum(math.prod(shape) for shape in self.shapes) * ITEM_BYTES[self.dtype]

    @property
    def wide(self) -> bool:
        """Whether some element lies beyond the reach of a 32-bit index."""
        return any(math.prod(shape) > LARGEST_INT32 for shape in self.shapes)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How exact the outputs of a schedule must be to pass the accuracy gate."""

    relative: float
    """Largest relative Frobenius error that a tile of an output may have."""
    by_type: tuple[tuple[str, float], ...] = ()
    """Output types with a limit other than `relative`, and the limit."""
    absolute: float = 2e-3
    """Largest absolute error of outputs declared with `absolute=True`."""
    floor: float = 0.0
    """Tiles whose elements are on average (root mean square) smaller are judged as if they were that large: for outputs that may
    be the difference of sums, of which rounding leaves something where the right output is 0."""
    repeatable: bool = False
    """Whether the outputs must have the same bits in every launch on the same inputs."""
    except_kinds: tuple[str, ...] = ()
    """Kinds of inputs on which the outputs are not judged."""

    @staticmethod
    def of_types(outputs: Iterable[str], inputs: Iterable[str]) -> Tolerance:
        """What the types of outputs and of floating-point inputs allow."""
        limits = {each: RELATIVE_ERRORS.get(each, 0.0) for each in outputs}
        if "float32" in limits and set(inputs) <= set(EXACT_PRODUCTS):
            limits["float32"] = FLOAT32_SUMS
        return Tolerance(relative=max(limits.values(), default=0.0), by_type=tuple(sorted(limits.items())))

    def relative_of(self, dtype: str) -> float:
        """Largest relative error of a tile of an output of that type."""
        return dict(self.by_type).get(dtype, self.relative)
