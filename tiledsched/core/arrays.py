"""What a problem's arrays look like and how exact outputs must be; and how arrays lie in memory, for NumPy and CuPy alike.

Neither has bfloat16, and CuPy has no 8-bit floats. Such arrays are stored as bits, in unsigned integers of the same size. Two
numbers of 4 bits share a byte, the first in its low half. Numbers of tfloat32 lie in float32, rounded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from tiledsched.core.fields import ITEM_BYTES
from tiledsched.core.integers import Integers

ALIGNMENT = 16
"""Bytes of which addresses and strides must be multiples for the TMA unit."""
BITS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
    "float4_e2m1fn": "uint8",
}
"""Type that is stored as bits -> the integer type that holds the bits."""
LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.38e38,
    "float32": 3.4e38,
    "float64": 1.7e308,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "tfloat32": 3.4e38,
    "float8_e8m0fnu": 2.0**127,
    "float4_e2m1fn": 6.0,
}
"""Type -> its largest finite value."""
POWERS_OF_TWO = "float8_e8m0fnu"
"""The type whose numbers are the powers of two, without a sign and without 0: scales of blocks."""
PACKED = "float4_e2m1fn"
"""The type of which two numbers share a byte."""
TILE_TYPES = {"tfloat32": "float32", PACKED: "uint8"}
"""Type -> the type that an array has in tile code and in torch, where that is another."""
POISON = {
    "float16": 0x7FA5,
    "bfloat16": 0x7FE5,
    "float32": 0x7FE5E5E5,
    "float64": 0x7FFDE5E5E5E5E5E5,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7F,
    "tfloat32": 0x7FE5E000,
    "float8_e8m0fnu": 0xFF,
}
"""Type -> the bits of the NaN that unwritten elements hold. No arithmetic makes these bits, except in the 8-bit types, which have
too few NaNs.
"""
SMALLEST = {"float16": 2.0**-24, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}
"""Type -> the smallest step between its values, where that is not negligible."""
MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
"""8-bit type -> the bits of its mantissa."""


def is_float(dtype: str) -> bool:
    """Whether a type holds floating-point numbers."""
    return dtype in LARGEST


def storage_type(dtype: str) -> str:
    """The type of the array that holds elements of `dtype`."""
    return BITS.get(dtype, "bool" if dtype == "bool_" else tile_type(dtype))


def tile_type(dtype: str) -> str:
    """cuTile's type of the elements of an array in tile code."""
    return TILE_TYPES.get(dtype, dtype)


def shape_of_values(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The shape of the numbers in an array of this shape."""
    return (*shape[:-1], 2 * shape[-1]) if dtype == PACKED else tuple(shape)


def strides_of(shape: Sequence[int], column: bool) -> tuple[int, ...]:
    """Strides in elements of a contiguous array, or of one whose last two axes are swapped in memory."""
    order = list(range(len(shape)))
    if column and len(order) > 1:
        order[-1], order[-2] = order[-2], order[-1]
    strides = [1] * len(shape)
    for outer, inner in reversed(list(itertools.pairwise(order))):
        strides[outer] = strides[inner] * shape[inner]
    return tuple(strides)


def to_storage(xp: Any, values: Any, dtype: str) -> Any:
    """`values`, of any type, rounded to nearest even as `dtype`, as it is stored. Types without a sign take the magnitude."""
    if dtype == "bfloat16":
        bits = values.astype(numpy.float32).view(numpy.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
    if dtype in MANTISSA_BITS:
        return _eight_bits(xp, values, dtype)
    if dtype == "tfloat32":
        bits = values.astype(numpy.float32).view(numpy.uint32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).astype(numpy.uint32).view(numpy.float32)
    if dtype in BITS:
        import ml_dtypes

        largest = LARGEST[dtype]
        on_host = to_host(values).astype(numpy.float32)
        if dtype == POWERS_OF_TWO:
            on_host = numpy.abs(on_host).clip(1 / largest)
        codes = on_host.clip(-largest, largest).astype(getattr(ml_dtypes, dtype)).view(numpy.uint8)
        return xp.asarray(codes[..., ::2] & 15 | codes[..., 1::2] << 4 if dtype == PACKED else codes)
    return values.astype(storage_type(dtype))


def _eight_bits(xp: Any, values: Any, dtype: str) -> Any:
    """Values rounded to an 8-bit float, as bits, where they are: millions of them would take seconds on the host."""
    largest, mantissa = LARGEST[dtype], MANTISSA_BITS[dtype]
    values = values.astype(numpy.float32).clip(-largest, largest)
    bits, dropped = values.view(numpy.uint32), 23 - mantissa
    sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    rounded = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped
    bias = 127 - (1 << (6 - mantissa)) + 1  # float32's less the type's own, whose exponent has 7 - mantissa bits
    unknown, normal = xp.isnan(values), 1 << mantissa
    steps = xp.rint(xp.abs(xp.where(unknown, 0.0, values)) / SMALLEST[dtype])  # exact up to the first normal number
    code = xp.where(steps <= normal, steps.clip(0, normal).astype(numpy.uint32), rounded - (bias << mantissa))
    return xp.where(unknown, POISON[dtype], code | sign).astype(numpy.uint8)


def codes_of(xp: Any, stored: Any, dtype: str) -> Any:
    """The bits of each number of an array: the array itself, unless numbers share bytes."""
    if dtype != PACKED:
        return stored
    return xp.stack([stored & 15, stored >> 4], -1).reshape(shape_of_values(stored.shape, dtype))


def to_float(xp: Any, stored: Any, dtype: str, precision: str = "float32") -> Any:
    """An array that is stored as `dtype`, as floating-point numbers of `precision`; integers as they are."""
    return decoded(xp, codes_of(xp, stored, dtype), dtype, precision)


def decoded(xp: Any, codes: Any, dtype: str, precision: str = "float32") -> Any:
    """What :func:`codes_of` made of an array, as floating-point numbers of `precision`; integers as they are."""
    if dtype == "bfloat16":
        return (codes.astype(numpy.uint32) << 16).view(numpy.float32).astype(precision, copy=False)
    if dtype in BITS:
        import ml_dtypes

        bits = numpy.arange(16 if dtype == PACKED else 256, dtype=numpy.uint8)
        return xp.asarray(bits.view(getattr(ml_dtypes, dtype)).astype(precision))[codes]
    return codes.astype(precision, copy=False) if is_float(dtype) else codes


def poison(stored: Any, dtype: str) -> None:
    """Fill an array with the NaN of `POISON`, or with the largest value if its type has no NaN."""
    if stored.size == 0:
        return
    if dtype in POISON:
        stored.view(f"u{stored.dtype.itemsize}")[...] = POISON[dtype]
    else:
        stored[...] = True if stored.dtype == bool else numpy.iinfo(str(stored.dtype)).max


def unwritten(stored: Any, dtype: str) -> Any:
    """Where a floating-point array still holds what :func:`poison` put there; nowhere for the 8-bit types."""
    return (stored.view(f"u{stored.dtype.itemsize}") == POISON.get(dtype, 0)) & (stored.dtype.itemsize > 1)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two arrays of the same type and shape hold the same bits, also where they are NaN."""
    kind = f"u{one.dtype.itemsize}"
    return bool((one.view(kind) == other.view(kind)).all()) if one.dtype.kind == "f" else bool((one == other).all())


def to_host(values: Any) -> Any:
    """An array as NumPy's, copied from the device if it is CuPy's."""
    return values.get() if hasattr(values, "get") else values


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
