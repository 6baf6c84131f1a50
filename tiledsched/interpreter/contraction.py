"""Arithmetic as a GPU's compiler may choose it: a product and a sum as one operation, and numbers near zero as zero.

cuTile's compiler makes one fused multiply-add of a product that is then added or subtracted, so that the product is not rounded.
tests/test_interpreter_arithmetic.py reads from PTX which products those are; docs/check.md tells it to users.
"""

from __future__ import annotations

import functools
import operator
import typing
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import numpy as np

from tiledsched.interpreter.arithmetic import Operand, elementwise, flush
from tiledsched.interpreter.registry import IMPLEMENTATIONS, innermost
from tiledsched.interpreter.values import InterpreterError, Tile, cast

Arithmetic = typing.Literal["rounded", "fused", "fused right", "flushed"]
"""How numbers are computed. A right kernel is right in each:

- `"rounded"`: every operation is rounded.
- `"fused"`: a product that is added or subtracted is not rounded. Of a sum of two products, the left one is not rounded.
- `"fused right"`: the same, but of a sum of two products, the right one is not rounded.
- `"flushed"`: as `"fused"`, and float32 numbers below the smallest normal one are zero wherever they enter or leave a function.
"""
FUSED = (ct.float16, ct.bfloat16, ct.float32)
"""Types of products that are fused."""
FLUSHED = ("add", "sub", "mul", "truediv", "pow", "minimum", "maximum", "exp", "exp2", "log", "log2", "sqrt", "rsqrt")
"""Functions that take zero for float32 numbers below the smallest normal one, and give zero."""


class ProductTile(Tile):
    """A rounded product that knows its factors, of its own type, and whether numbers near zero were taken for zero."""

    factors: tuple[Any, ...]
    flush_to_zero: bool

    def may_fuse(self, first: Any, second: Any, flush_to_zero: bool) -> bool:
        """Whether the compiler makes one operation of this product and the sum of two arrays, of which it is one: the sum must be
        of the same type and shape, and treat numbers near zero alike."""
        alike = self.array.dtype == first.dtype and self.flush_to_zero == flush_to_zero
        return alike and self.shape == np.broadcast_shapes(first.shape, second.shape)


@functools.cache
def implementations(arithmetic: Arithmetic) -> dict[Any, Callable[..., Any]]:
    """The functions that an arithmetic other than `"rounded"` computes in another way, as `IMPLEMENTATIONS` has them."""
    if arithmetic not in typing.get_args(Arithmetic):
        raise InterpreterError(
            f"arithmetic is one of {', '.join(map(repr, typing.get_args(Arithmetic)))}, got {arithmetic!r}"
        )
    if arithmetic == "rounded":
        return {}
    order = (1, 0) if arithmetic == "fused right" else (0, 1)
    found = {"mul": multiply, "add": _sum("add", operator.add, order), "sub": _sum("sub", operator.sub, order)}
    if arithmetic == "flushed":
        found = {name: _flushing(found.get(name) or IMPLEMENTATIONS[innermost(getattr(ct, name))]) for name in FLUSHED}
    return {innermost(getattr(ct, name)): function for name, function in found.items()}


def multiply(x: Operand, y: Operand, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
    """The rounded product, which knows its factors."""
    result = elementwise("mul", x, y, operator.mul, rounding_mode=rounding_mode, flush_to_zero=flush_to_zero)
    if not isinstance(result, Tile) or result.dtype not in FUSED:
        return result
    product = ProductTile(result.array, result.dtype)
    factors = cast(x, result.dtype), cast(y, result.dtype)
    product.factors = tuple(map(flush, factors)) if flush_to_zero else factors
    product.flush_to_zero = flush_to_zero
    return product


def _sum(name: str, compute: Callable[[Any, Any], Any], order: tuple[int, int]) -> Callable[..., Any]:
    """The sum or difference, rounded once where an operand is a product; the operands are tried in this order."""

    def function(x: Operand, y: Operand, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        def fused(first: Any, second: Any) -> Any:
            for place in order if x is not y else ():
                product = (x, y)[place]
                if isinstance(product, ProductTile) and product.may_fuse(first, second, flush_to_zero):
                    exact = np.multiply(*product.factors, dtype=np.float64)
                    return (compute(first, exact) if place else compute(exact, second)).astype(first.dtype)
            return compute(first, second)

        return elementwise(name, x, y, fused, rounding_mode=rounding_mode, flush_to_zero=flush_to_zero)

    return function


def _flushing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of tiles whose numbers near zero are zero, and so are those of its result."""

    def flushed(*operands: Any, **options: Any) -> Any:
        return _flushed(function(*map(_flushed, operands), **options))

    return flushed


def _flushed(value: Any) -> Any:
    """An object of the same class, so that a product stays one, without numbers near zero."""
    if isinstance(value, Tile) and value.dtype == ct.float32:
        value.array = np.asarray(flush(value.array))
    return value
