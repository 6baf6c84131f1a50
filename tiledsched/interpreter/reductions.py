"""Reductions and scans."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import numpy as np

from tiledsched.interpreter import arithmetic  # noqa: F401
from tiledsched.interpreter.registry import IMPLEMENTATIONS, add, implements, innermost
from tiledsched.interpreter.values import CATEGORY, FLOAT, InterpreterError, Tile, cast, constant_int


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


_reduction("sum", ct.add)
_reduction("prod", ct.mul)
_reduction("max", ct.maximum)
_reduction("min", ct.minimum)


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
