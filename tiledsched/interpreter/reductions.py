"""Matrix products, reductions and scans."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import numpy as np

from tiledsched.interpreter import arithmetic  # noqa: F401
from tiledsched.interpreter.registry import IMPLEMENTATIONS, add, implements, innermost
from tiledsched.interpreter.values import (
    CATEGORY,
    FLOAT,
    INTEGER,
    STORAGE,
    InterpreterError,
    Tile,
    cast,
    constant_int,
    promote_dtypes,
)

MMA_ACCUMULATORS = {
    "float16": ("float16", "float32"),
    "bfloat16": ("float32",),
    "float32": ("float32",),
    "tfloat32": ("float32",),
    "float64": ("float64",),
    "int8": ("int32",),
    "uint8": ("int32",),
    "float8_e4m3fn": ("float16", "float32"),
    "float8_e5m2": ("float16", "float32"),
}
"""Accumulator types `ct.mma` allows for each input type."""
SCALE_BLOCKS: dict[str, dict[str, tuple[int, ...]]] = {
    "float8_e4m3fn": {"float8_e8m0fnu": (32,)},
    "float8_e5m2": {"float8_e8m0fnu": (32,)},
    "float4_e2m1fn": {"float8_e8m0fnu": (16, 32), "float8_e4m3fn": (16,)},
}
"""Elements of the inner side that share a scale, by input type and scale type, as `ct.mma_scaled` allows them."""


@implements("mma")
def mma(x: Tile, y: Tile, /, acc: Tile, *, use_fast_acc: bool = False) -> Tile:
    """x @ y + acc in the accumulator's type.

    Products are summed in float32 (float64 for float64) and rounded once to a float16 accumulator; a tensor core may
    round in between, and in another order.
    """
    check_product_types(x, y)
    if str(acc.dtype) not in MMA_ACCUMULATORS[str(x.dtype)]:
        raise InterpreterError(f"ct.mma of {x.dtype} accumulates in {MMA_ACCUMULATORS[str(x.dtype)]}, not {acc.dtype}")
    if x.ndim < 2 or y.ndim < 2:
        raise InterpreterError(f"ct.mma takes tiles of two or three axes, got {x.shape} and {y.shape}")
    return mma_wide(*widened(x, y), acc)


def mma_wide(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], acc: Tile) -> Tile:
    """x @ y + acc in the type of x and y, rounded once to the accumulator's."""
    product = np.asarray(np.matmul(x, y))
    if product.shape != acc.shape:
        raise InterpreterError(
            f"a product of {x.shape} and {y.shape} needs an accumulator {product.shape}, got {acc.shape}"
        )
    total = product + acc.array.astype(product.dtype, copy=False)
    return Tile(total.astype(STORAGE[acc.dtype], copy=False), acc.dtype)


@implements("mma_scaled")
def mma_scaled(x: Tile, x_scale: Tile, y: Tile, y_scale: Tile, /, acc: Tile) -> Tile:
    """(x * x_scale) @ (y * y_scale) + acc in float32, where each block along the inner side shares one scale."""
    types = str(x.dtype), str(x_scale.dtype)
    if x.dtype != y.dtype or x_scale.dtype != y_scale.dtype or types[1] not in SCALE_BLOCKS.get(types[0], {}):
        raise InterpreterError(
            f"ct.mma_scaled does not take {x.dtype} scaled by {x_scale.dtype} times {y.dtype} scaled by {y_scale.dtype}"
        )
    if acc.dtype != ct.float32:
        raise InterpreterError(f"ct.mma_scaled accumulates in float32, not {acc.dtype}")
    wide = scaled(x, x_scale, -1), scaled(y, y_scale, -2)
    return mma_wide(wide[0], wide[1], acc)


def scaled(x: Tile, scale: Tile, axis: int) -> np.ndarray[Any, Any]:
    """The elements of `x` times their block's scale, in float32."""
    sides = list(x.shape)
    block, rest = divmod(sides[axis], scale.shape[axis])
    sides[axis] = scale.shape[axis]
    allowed = SCALE_BLOCKS[str(x.dtype)][str(scale.dtype)]
    if scale.shape != tuple(sides) or rest or block not in allowed:
        raise InterpreterError(
            f"ct.mma_scaled: scales of shape {scale.shape} do not fit a tile of shape {x.shape}; blocks of {allowed} "
            "elements along the inner side share a scale"
        )
    return x.array.astype(np.float32) * np.repeat(scale.array.astype(np.float32), block, axis)


@implements("matmul")
def matmul(x: Tile, y: Tile, /) -> Tile:
    """x @ y in the operands' common type."""
    dtype = promote_dtypes(x.dtype, y.dtype)
    x, y = Tile(cast(x, dtype), dtype), Tile(cast(y, dtype), dtype)
    check_product_types(x, y)
    return Tile(np.asarray(np.matmul(*widened(x, y))).astype(STORAGE[dtype]), dtype)


def check_product_types(x: Tile, y: Tile) -> None:
    """Both operands of one type that tensor cores take, or any of int8 and uint8."""
    bytes_only = {str(x.dtype), str(y.dtype)} <= {"int8", "uint8"}
    if (x.dtype != y.dtype and not bytes_only) or str(x.dtype) not in MMA_ACCUMULATORS:
        raise InterpreterError(
            f"matrix products take two tiles of one type of {tuple(MMA_ACCUMULATORS)}, got {x.dtype} and {y.dtype}"
        )


def widened(x: Tile, y: Tile) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Both operands in the type that their products are summed in: float32, float64 or int32."""
    wide = np.int32 if CATEGORY[x.dtype] == INTEGER else np.float64 if x.dtype == ct.float64 else np.float32
    return x.array.astype(wide, copy=False), y.array.astype(wide, copy=False)


def reduce_tree(tiles: tuple[Tile, ...], axis: int, combine: Callable[..., Any]) -> tuple[Tile, ...]:
    """Fold tiles along `axis` by halves until one element is left; every partial result is rounded to its type."""
    while tiles[0].shape[axis] > 1:
        before, half = (slice(None),) * axis, tiles[0].shape[axis] // 2
        first, second = (*before, slice(half)), (*before, slice(half, None))
        low = [Tile(tile.array[first], tile.dtype) for tile in tiles]
        high = [Tile(tile.array[second], tile.dtype) for tile in tiles]
        result = combine(*low, *high)
        tiles = result if isinstance(result, tuple) else (result,)
    return tiles


def reduced(tiles: tuple[Tile, ...], axis: Any, keepdims: bool, combine: Callable[..., Any]) -> tuple[Tile, ...]:
    """`reduce_tree` over one axis, several, or all (None)."""
    rank = tiles[0].ndim
    given = range(rank) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(constant_int(a, "a reduction axis") % rank if -rank <= a < rank else rank for a in given)
    if len(set(axes)) != len(axes) or rank in axes:
        raise InterpreterError(f"reduction axes {axis} do not fit a tile of shape {tiles[0].shape}")
    for one in axes:
        tiles = reduce_tree(tiles, one, combine)
    return tiles if keepdims else tuple(Tile(np.squeeze(tile.array, axes), tile.dtype) for tile in tiles)


def _reduction(name: str, pairwise: Any) -> None:
    pairwise = IMPLEMENTATIONS[innermost(pairwise)]

    def function(x: Tile, /, axis: Any = None, *, keepdims: bool = False, **numerics: Any) -> Tile:
        x = Tile(cast(x, ct.int32), ct.int32) if x.dtype == ct.bool_ else x
        return reduced((x,), axis, keepdims, lambda low, high: pairwise(low, high, **numerics))[0]

    add(name, function)


for _name, _pairwise in (("sum", ct.add), ("prod", ct.mul), ("max", ct.maximum), ("min", ct.minimum)):
    _reduction(_name, _pairwise)


@implements("reduce")
def reduce(x: Any, /, axis: int, func: Callable[..., Any], identity: Any, *, keepdims: bool = False) -> Any:
    """A reduction by the caller's function, which sees whole tiles here."""
    tiles = tuple(x) if isinstance(x, tuple) else (x,)
    shape = np.broadcast_shapes(*(tile.shape for tile in tiles))
    tiles = tuple(Tile(np.broadcast_to(tile.array, shape), tile.dtype) for tile in tiles)
    result = reduced(tiles, axis, keepdims, func)
    return result if isinstance(x, tuple) else result[0]


def _arg_reduction(name: str, find: Callable[..., Any], worst: float) -> None:
    def function(x: Tile, /, axis: Any = None, *, keepdims: bool = False, propagate_nan: bool = False) -> Tile:
        array = x.array
        if CATEGORY[x.dtype] == FLOAT and not propagate_nan:
            array = np.where(np.isnan(array), np.asarray(worst, array.dtype), array)
        return Tile(
            find(array.astype(np.float64) if array.dtype.itemsize < 4 else array, axis, keepdims=keepdims), ct.int32
        )

    add(name, function)


_arg_reduction("argmax", np.argmax, -math.inf)
_arg_reduction("argmin", np.argmin, math.inf)


@implements("scan")
def scan(x: Any, /, axis: int, func: Callable[..., Any], identity: Any, *, reverse: bool = False) -> Any:
    """Inclusive scan along `axis` by the caller's function, one element after another."""
    tiles = tuple(x) if isinstance(x, tuple) else (x,)
    columns = [[Tile(part, tile.dtype) for part in np.moveaxis(tile.array, axis, 0)] for tile in tiles]
    order = range(len(columns[0]))[:: -1 if reverse else 1]
    state = tuple(column[order[0]] for column in columns)
    for position in order[1:]:
        result = func(*state, *(column[position] for column in columns))
        state = result if isinstance(result, tuple) else (result,)
        for column, value in zip(columns, state, strict=True):
            column[position] = value
    done = tuple(Tile(np.stack([part.array for part in column], axis), column[0].dtype) for column in columns)
    return done if isinstance(x, tuple) else done[0]


def _running(name: str, pairwise: Any) -> None:
    def function(x: Tile, /, axis: int = 0, *, reverse: bool = False, **numerics: Any) -> Any:
        x = Tile(cast(x, ct.int32), ct.int32) if x.dtype == ct.bool_ else x
        return scan(x, axis, lambda low, high: pairwise(low, high, **numerics), None, reverse=reverse)

    add(name, function)


_running("cumsum", ct.add)
_running("cumprod", ct.mul)
