"""Tiles: NumPy arrays with cuTile's types, and cuTile's rules for mixing them.

The rules are those of cuTile's data model. A Python number in tile code is a *loose* constant: it takes the type of the
tile it meets unless its category (bool < integer < float) is higher. Everything else has a type of its own, scalars
that are only known at run time included: they are tiles of shape ().
"""

from __future__ import annotations

from typing import Any, TypeAlias

import cuda.tile as ct
import ml_dtypes
import numpy as np

from tiledsched.core.errors import TiledschedError


class InterpreterError(TiledschedError, RuntimeError):
    """Tile code did what cuTile forbids or leaves undefined, or used what the interpreter does not support."""

    def located(self, place: str, line: str = "") -> InterpreterError:
        """The error with `place` before its message, the function and the block, and behind it the line of the author's code."""
        return type(self)(_located(self, place, line))


class ShapeError(InterpreterError):
    """Sides of tiles do not fit: cuTile would refuse to compile."""


class OutsideError(InterpreterError):
    """An access lies outside of its array, which cuTile leaves undefined."""


class EndlessError(InterpreterError):
    """A run called more `ct.*` functions than it was allowed: a loop waits for what does not come."""


class UnsupportedOperationError(InterpreterError):
    """Tile code used an operation of cuTile that the interpreter lacks."""

    def __init__(self, message: str, *, operation: str) -> None:
        super().__init__(message)
        self.operation = operation
        """The operation as tile code names it, such as `ct.mma_scaled`."""

    def located(self, place: str, line: str = "") -> UnsupportedOperationError:
        """The error with `place` before its message, and behind it the line of the author's code."""
        return UnsupportedOperationError(_located(self, place, line), operation=self.operation)


def _located(error: InterpreterError, place: str, line: str) -> str:
    return f"{place}: {error}{f' ({line})' if line else ''}"


Scalar: TypeAlias = bool | int | float
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
RESTRICTED = ("tfloat32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn")
"""Floats that only casts, moves and matrix products take."""
BOOL, INTEGER, FLOAT, RESTRICTED_FLOAT = range(4)

STORAGE: dict[Any, np.dtype[Any]] = {ct.bool_: np.dtype(np.bool_)}
"""NumPy type that holds each cuTile type. tfloat32 lives in float32, rounded."""
CATEGORY: dict[Any, int] = {ct.bool_: BOOL}
for _names, _category in ((INTEGERS, INTEGER), (FLOATS, FLOAT), (RESTRICTED, RESTRICTED_FLOAT)):
    for _name in _names:
        _stored = "float32" if _name == "tfloat32" else _name
        _numpy = getattr(np, _stored, None) or getattr(ml_dtypes, _stored, None)
        if hasattr(ct, _name) and _numpy is not None:
            STORAGE[getattr(ct, _name)] = np.dtype(_numpy)
            CATEGORY[getattr(ct, _name)] = _category
TILE_TYPE = {numpy: dtype for dtype, numpy in STORAGE.items() if dtype is not ct.tfloat32}
"""The cuTile type of a NumPy array's elements."""
LIMITS = {
    dtype: (int(np.iinfo(numpy).min), int(np.iinfo(numpy).max))
    for dtype, numpy in STORAGE.items()
    if CATEGORY[dtype] == INTEGER
}
"""The smallest and the largest number of each integer type."""


class Tile(ct.Tile):
    """A tile's value. Its operators are cuTile's own: they call `ct.add` and the like, which dispatch back here."""

    def __init__(self, array: Any, dtype: Any) -> None:
        stored = STORAGE[dtype]
        self.array = array if type(array) is np.ndarray and array.dtype is stored else np.asarray(array, stored)
        self._dtype = dtype

    @property
    def dtype(self) -> Any:
        """The cuTile type of the elements."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Sides, all powers of two."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.array.ndim

    def item(self) -> Tile:
        """The tile's one element as a tile of shape ()."""
        return Tile(self.array.reshape(()) if self.array.size == 1 else self.scalar(), self._dtype)

    def scalar(self) -> Any:
        """The Python number in a tile of shape ()."""
        if self.array.ndim:
            raise InterpreterError(
                f"a tile of shape {self.shape} was used where one number is needed (an index, a range, an if); "
                "reduce it first, for example with ct.sum, or reshape it to (); for each element by itself, write &, | and ~ in "
                "place of and, or, not and chains such as a < b < c, and ct.where in place of if"
            )
        return self.array.item()

    def __index__(self) -> int:
        if CATEGORY[self._dtype] != INTEGER:
            raise InterpreterError(f"an index must be an integer, got {self!r}; cast it with .astype(ct.int32)")
        return int(self.scalar())

    def __int__(self) -> int:
        return int(self.scalar())

    def __float__(self) -> float:
        return float(self.scalar())

    def __bool__(self) -> bool:
        return bool(self.scalar())

    def __pos__(self) -> Tile:
        return self

    def __abs__(self) -> Any:
        return ct.abs(self)

    def __repr__(self) -> str:
        if self.array.ndim == 0:
            return f"<tile[{self._dtype}]: {self.array.item()}>"
        return f"<tile[{self._dtype}, {self.shape}]>"

    def __format__(self, spec: str) -> str:
        def nested(values: Any) -> str:
            return f"[{', '.join(map(nested, values))}]" if isinstance(values, list) else format(values, spec)

        return nested(self.array.tolist())


def scalar_dtype(value: Scalar) -> Any:
    """The type a loose constant has where it meets nothing else."""
    if isinstance(value, bool):
        return ct.bool_
    if isinstance(value, int):
        for dtype in (ct.int32, ct.int64, ct.uint64):
            if in_range(value, dtype):
                return dtype
        raise InterpreterError(f"the constant {value} fits no integer type")
    if isinstance(value, float):
        return ct.float32
    raise InterpreterError(f"expected a tile or a number, got {type(value).__name__}: {value!r}")


def in_range(value: int, dtype: Any) -> bool:
    """Whether the integer type `dtype` holds `value`."""
    lowest, highest = LIMITS[dtype]
    return lowest <= value <= highest


def type_of(value: Tile | Scalar) -> Any:
    """The cuTile type of a tile or of a loose constant."""
    return value.dtype if isinstance(value, Tile) else scalar_dtype(value)


def promote_dtypes(first: Any, second: Any) -> Any:
    """The common type of two typed values.

    Raises:
        InterpreterError: there is none; cuTile would refuse to compile.
    """
    if first == second:
        return first
    categories = CATEGORY[first], CATEGORY[second]
    if RESTRICTED_FLOAT in categories:
        raise InterpreterError(f"{first} and {second} do not mix; cast one of them with .astype")
    if categories[0] != categories[1]:
        return first if categories[0] > categories[1] else second
    widths = first.bitwidth, second.bitwidth
    mixed_signs = categories[0] == INTEGER and (STORAGE[first].kind != STORAGE[second].kind)
    if mixed_signs or widths[0] == widths[1]:
        raise InterpreterError(f"{first} and {second} have no common type; cast one of them with .astype")
    return first if widths[0] > widths[1] else second


def promote(x: Tile | Scalar, y: Tile | Scalar, *, force_float: bool = False) -> Any:
    """The type in which cuTile combines two operands, of which either may be a loose constant."""
    if isinstance(x, Tile) == isinstance(y, Tile):
        dtype = promote_dtypes(type_of(x), type_of(y))
    else:
        tile, constant = (x, y) if isinstance(x, Tile) else (y, x)
        dtype, loose = type_of(tile), type_of(constant)
        if CATEGORY[loose] > CATEGORY[dtype]:
            dtype = loose
        elif CATEGORY[loose] == CATEGORY[dtype] == INTEGER and not in_range(int(constant), dtype):
            raise InterpreterError(f"the constant {constant} does not fit {dtype}; cast the tile with .astype")
    return ct.float32 if force_float and CATEGORY[dtype] < FLOAT else dtype


def cast(value: Tile | Scalar, dtype: Any) -> np.ndarray[Any, Any]:
    """The elements of `value` as the NumPy type that stores `dtype`, rounded to nearest even.

    Raises:
        InterpreterError: a type the interpreter cannot hold.
    """
    if isinstance(value, Tile) and value._dtype is dtype:
        return value.array
    if dtype not in STORAGE:
        raise UnsupportedOperationError(
            f"the interpreter cannot hold {dtype}; it knows {', '.join(str(known) for known in STORAGE)}",
            operation=f"ct.{dtype}",
        )
    if not isinstance(value, Tile):
        return np.asarray(value).astype(STORAGE[dtype])
    if value.dtype == dtype:
        return value.array
    array = value.array
    if dtype == ct.bool_:
        return array != 0
    if CATEGORY[dtype] == INTEGER and CATEGORY[value.dtype] >= FLOAT:
        array = np.trunc(array.astype(np.float64))
    return round_tfloat32(array.astype(np.float32)) if dtype == ct.tfloat32 else array.astype(STORAGE[dtype])


def round_tfloat32(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`array` (float32) with 10 mantissa bits left, rounded to nearest even."""
    bits = array.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(array), rounded, array)


def implicit_cast(value: Tile | Scalar, dtype: Any, what: str) -> np.ndarray[Any, Any]:
    """`value` as `dtype`, where cuTile casts by itself: only when nothing is lost by type.

    Raises:
        InterpreterError: the cast needs an explicit .astype; cuTile would refuse to compile.
    """
    if isinstance(value, Tile):
        try:
            allowed = promote_dtypes(value.dtype, dtype) == dtype
        except InterpreterError:
            allowed = False
    else:
        loose, category = type_of(value), CATEGORY[dtype]
        allowed = CATEGORY[loose] <= category and (category != INTEGER or in_range(int(value), dtype))
        allowed = value in (0, 1) if category == BOOL and CATEGORY[loose] < FLOAT else allowed
    if not allowed:
        raise InterpreterError(f"{what}: {type_of(value)} is not cast to {dtype} implicitly; use .astype({dtype})")
    return cast(value, dtype)


def constant_shape(shape: Any) -> tuple[int, ...]:
    """A tile shape, given as one integer or a tuple of compile-time integers.

    Raises:
        InterpreterError: a run-time value in it, or a side that is not a power of two.
    """
    sides = shape if isinstance(shape, (tuple, list)) else (shape,)
    for side in sides:
        if isinstance(side, Tile):
            raise InterpreterError(f"a tile shape must be known at compile time, got {side!r}; annotate it ct.Constant")
        if not isinstance(side, int) or side < 1 or side & (side - 1):
            raise ShapeError(f"the sides of a tile must be powers of two, got {tuple(sides)}")
    return tuple(sides)


def constant_int(value: Any, what: str) -> int:
    """A compile-time integer, for example an axis.

    Raises:
        InterpreterError: anything else.
    """
    if not isinstance(value, int):
        raise InterpreterError(f"{what} must be an integer known at compile time, got {value!r}")
    return int(value)
