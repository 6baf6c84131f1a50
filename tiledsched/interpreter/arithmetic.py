"""Elementwise functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import numpy as np

from tiledsched.interpreter.registry import add, implements
from tiledsched.interpreter.values import (
    BOOL,
    CATEGORY,
    FLOAT,
    INTEGER,
    STORAGE,
    InterpreterError,
    Scalar,
    Tile,
    UnsupportedOperationError,
    cast,
    promote,
    type_of,
)

Operand = Tile | Scalar
Compute = Callable[[Any, Any], Any]
EXACT_ROUNDING = (None, ct.RoundingMode.RN, ct.RoundingMode.FULL, ct.RoundingMode.APPROX)
"""Rounding modes computed as round-to-nearest: what FULL and APPROX approximate."""
SMALLEST_NORMAL = np.finfo(np.float32).tiny


def check_numerics(name: str, dtype: Any, rounding_mode: Any, flush_to_zero: bool) -> None:
    """Refuse rounding and flushing that cuTile does not compile, or that is not imitated here."""
    if rounding_mode is None and not flush_to_zero:
        return
    if rounding_mode not in EXACT_ROUNDING:
        raise UnsupportedOperationError(
            f"ct.{name}: the interpreter does not imitate {rounding_mode}; leave it at nearest even",
            operation=f"ct.{name} with {rounding_mode}",
        )
    special = rounding_mode in (ct.RoundingMode.FULL, ct.RoundingMode.APPROX)
    if (flush_to_zero or special) and dtype != ct.float32:
        raise InterpreterError(f"ct.{name}: flush_to_zero and approximate rounding take float32 only, got {dtype}")


def flush(array: Any) -> Any:
    """`array` with subnormal numbers replaced by zero."""
    return array * (np.abs(array) >= SMALLEST_NORMAL)


def elementwise(
    name: str,
    x: Operand,
    y: Operand,
    compute: Compute,
    *,
    force_float: bool = False,
    rounding_mode: Any = None,
    flush_to_zero: bool = False,
) -> Any:
    """`compute` over two operands brought to their common type; plain Python where both are loose constants."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return compute(x, y)
    dtype = promote(x, y, force_float=force_float)
    if CATEGORY[dtype] not in (INTEGER, FLOAT):
        raise InterpreterError(f"ct.{name} does not take {dtype}; cast it with .astype")
    check_numerics(name, dtype, rounding_mode, flush_to_zero)
    first, second = cast(x, dtype), cast(y, dtype)
    if not flush_to_zero:
        return Tile(compute(first, second), dtype)
    return Tile(flush(compute(flush(first), flush(second))), dtype)


def floor_divide(x: Any, y: Any) -> Any:
    """x // y towards minus infinity; of floats, floor(x / y) as cuTile computes it."""
    refuse_zero_divisor(y)
    floats = isinstance(x, np.ndarray) and x.dtype.kind not in "iu"
    return np.floor(x / y) if floats else x // y


def modulo(x: Any, y: Any) -> Any:
    """X % y with the sign of y, as in Python."""
    refuse_zero_divisor(y)
    return x % y


def refuse_zero_divisor(y: Any) -> None:
    """Integer division by zero is undefined on the GPU."""
    divisor = np.asarray(y)
    if divisor.dtype.kind in "iu" and not divisor.all():
        raise InterpreterError("integer division by zero")


def smaller(x: Any, y: Any) -> Any:
    """Elementwise minimum that prefers a number to NaN, as the GPU's does."""
    return np.fmin(x, y) if isinstance(x, np.ndarray) else min(x, y)


def larger(x: Any, y: Any) -> Any:
    """Elementwise maximum that prefers a number to NaN, as the GPU's does."""
    return np.fmax(x, y) if isinstance(x, np.ndarray) else max(x, y)


def power(x: Any, y: Any) -> Any:
    """X ** y of floats; cuTile has none for integers."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu":
        raise InterpreterError("ct.pow takes floats; cast the base with .astype")
    return x**y


def _binary(name: str, compute: Compute, *, force_float: bool = False) -> None:
    def function(x: Operand, y: Operand, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        return elementwise(
            name, x, y, compute, force_float=force_float, rounding_mode=rounding_mode, flush_to_zero=flush_to_zero
        )

    add(name, function)


for _name, _compute in (
    ("add", operator.add),
    ("sub", operator.sub),
    ("mul", operator.mul),
    ("mod", modulo),
    ("floordiv", floor_divide),
    ("pow", power),
):
    _binary(_name, _compute)
_binary("truediv", operator.truediv, force_float=True)
_binary("atan2", lambda x, y: np.arctan2(x, y))
_binary("cdiv", lambda x, y: -floor_divide(-x, y))


def _choose(name: str, compute: Compute, propagating: Compute) -> None:
    def function(x: Operand, y: Operand, /, *, flush_to_zero: bool = False, propagate_nan: bool = False) -> Any:
        return elementwise(name, x, y, propagating if propagate_nan else compute, flush_to_zero=flush_to_zero)

    add(name, function)


_choose("minimum", smaller, np.minimum)
_choose("maximum", larger, np.maximum)


@implements("divmod")
def divide_and_remainder(x: Operand, y: Operand, /) -> Any:
    """Quotient and remainder of integers."""
    return elementwise("divmod", x, y, floor_divide), elementwise("divmod", x, y, modulo)


def _compare(name: str, compute: Compute) -> None:
    def function(x: Operand, y: Operand, /) -> Any:
        if not isinstance(x, Tile) and not isinstance(y, Tile):
            return compute(x, y)
        dtype = promote(x, y)
        return Tile(compute(cast(x, dtype), cast(y, dtype)), ct.bool_)

    add(name, function)


for _name, _compute in (
    ("greater", operator.gt),
    ("greater_equal", operator.ge),
    ("less", operator.lt),
    ("less_equal", operator.le),
    ("equal", operator.eq),
    ("not_equal", operator.ne),
):
    _compare(_name, _compute)


def _bitwise(name: str, compute: Compute, *, shift: bool = False) -> None:
    def function(x: Operand, y: Operand, /) -> Any:
        if not isinstance(x, Tile) and not isinstance(y, Tile):
            return compute(x, y)
        types = type_of(x), type_of(y)
        if any(CATEGORY[dtype] > INTEGER or (shift and CATEGORY[dtype] == BOOL) for dtype in types):
            raise InterpreterError(
                f"ct.{name} takes integers{'' if shift else ' or booleans'}, got {types[0]}, {types[1]}"
            )
        if not shift and isinstance(x, Tile) and isinstance(y, Tile) and types[0] != types[1]:
            raise InterpreterError(f"ct.{name} needs operands of one type, got {types[0]} and {types[1]}")
        dtype = promote(x, y)
        return Tile(compute(cast(x, dtype), cast(y, dtype)), dtype)

    add(name, function)


for _name, _compute in (("bitwise_and", operator.and_), ("bitwise_or", operator.or_), ("bitwise_xor", operator.xor)):
    _bitwise(_name, _compute)
_bitwise("bitwise_lshift", operator.lshift, shift=True)
_bitwise("bitwise_rshift", operator.rshift, shift=True)


def unary(
    name: str, x: Operand, compute: Callable[[Any], Any], *, rounding_mode: Any = None, flush_to_zero: bool = False
) -> Any:
    """A function of floats; integers become float32. The 8- and 16-bit floats are computed in float32 and rounded."""
    if not isinstance(x, Tile):
        return compute(np.float64(x)).item()
    dtype = x.dtype if CATEGORY[x.dtype] >= FLOAT else ct.float32
    check_numerics(name, dtype, rounding_mode, flush_to_zero)
    array = cast(x, dtype)
    if array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    if flush_to_zero:
        return Tile(flush(compute(flush(array))), dtype)
    return Tile(compute(array).astype(STORAGE[dtype], copy=False), dtype)


def _unary(name: str, compute: Callable[[Any], Any], *, floats_only: bool = False) -> None:
    def function(x: Operand, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        if floats_only and isinstance(x, Tile) and CATEGORY[x.dtype] < FLOAT:
            raise InterpreterError(f"ct.{name} takes floats, got {x.dtype}")
        return unary(name, x, compute, rounding_mode=rounding_mode, flush_to_zero=flush_to_zero)

    add(name, function)


for _name in ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh"):
    _unary(_name, getattr(np, _name))
_unary("rsqrt", lambda x: 1 / np.sqrt(x))
_unary("floor", np.floor, floats_only=True)
_unary("ceil", np.ceil, floats_only=True)


@implements("negative")
def negative(x: Operand, /) -> Any:
    """-x; of booleans, as int32."""
    if not isinstance(x, Tile):
        return -x
    dtype = ct.int32 if x.dtype == ct.bool_ else x.dtype
    return Tile(-cast(x, dtype), dtype)


@implements("abs")
def absolute(x: Operand, /) -> Any:
    """|x|."""
    return Tile(np.abs(x.array), x.dtype) if isinstance(x, Tile) else abs(x)


@implements("bitwise_not")
def bitwise_not(x: Operand, /) -> Any:
    """Every bit of integers turned over; of booleans, not x."""
    if not isinstance(x, Tile):
        return not x if isinstance(x, bool) else ~int(x)
    if CATEGORY[x.dtype] > INTEGER:
        raise InterpreterError(f"ct.bitwise_not takes integers or booleans, got {x.dtype}")
    return Tile(~x.array, x.dtype)


@implements("isnan")
def isnan(x: Operand, /) -> Any:
    """Whether each element is NaN."""
    return Tile(np.isnan(x.array), ct.bool_) if isinstance(x, Tile) else math.isnan(x)


@implements("where")
def where(condition: Operand, x: Operand, y: Operand, /) -> Tile:
    """X where the condition holds, y elsewhere."""
    dtype = promote(x, y)
    return Tile(np.where(cast(condition, ct.bool_), cast(x, dtype), cast(y, dtype)), dtype)
