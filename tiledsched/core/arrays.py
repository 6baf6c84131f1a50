"""What a problem's arrays look like, and how exact the outputs of a schedule must be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiledsched.core.fields import ITEM_BYTES
from tiledsched.core.integers import Integers
from tiledsched.core.storage import shape_of_values

LARGEST_INT32 = 2**31 - 1
RELATIVE_ERRORS = {
    "float16": 4e-3,
    "bfloat16": 2e-2,
    "float32": 2e-3,
    "float64": 1e-6,
    "float8_e4m3fn": 1e-1,
    "float8_e5m2": 2e-1,
    "tfloat32": 2e-3,
    "float8_e8m0fnu": 6e-1,
    "float4_e2m1fn": 3e-1,
}
"""Largest relative error by output type: eight times the largest error of one rounding for float16, five times for bfloat16, 1.6
times for the 8-bit types with a sign, and about twice for float8_e8m0fnu and float4_e2m1fn. The bound of float32 leaves room for
matrix products in tf32.
"""


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
    absolute: float = 2e-3
    """Largest absolute error of outputs declared with `absolute=True`."""
    floor: float = 0.0
    """Tiles whose elements are on average (root mean square) smaller are judged as if they were that large: for outputs that may
    be the difference of sums, of which rounding leaves something where the right output is 0."""
    repeatable: bool = False
    """Whether the outputs must have the same bits in every launch on the same inputs."""
    except_kinds: tuple[str, ...] = ()
    """Kinds of inputs on which the outputs are not judged."""
