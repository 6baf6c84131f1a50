"""The `ct.*` functions that touch memory: loads, stores, gathers, scatters and atomics."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import numpy as np

from tiledsched.interpreter.arrays import Array, NumpyArray, padding_value, poison, read, write
from tiledsched.interpreter.registry import add, implements
from tiledsched.interpreter.values import (
    CATEGORY,
    INTEGER,
    InterpreterError,
    OutsideError,
    Scalar,
    Tile,
    constant_shape,
    implicit_cast,
    type_of,
)

UNDETERMINED = ct.PaddingMode.UNDETERMINED


@implements("load")
def load(
    array: Array,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: Any = UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    **others: Any,
) -> Tile:
    """The tile of `shape` at `index`, counted in tiles."""
    return read(array, index, constant_shape(shape), order, padding_mode, check_bounds)


@implements("store")
def store(
    array: Array,
    /,
    index: Any,
    tile: Tile | Scalar,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: int | None = None,
    **others: Any,
) -> None:
    """Write `tile` at `index`, counted in tiles of its shape."""
    write(array, index, implicit_cast(tile, array.dtype, f"ct.store to {array.name}"), order, check_bounds)


@implements("num_tiles")
def num_tiles(array: Array, /, axis: int, shape: Any, order: Any = "C") -> Tile:
    """Tiles of `shape` along `axis`."""
    sides = constant_shape(shape) or (1,) * array.ndim
    axes = range(array.ndim) if order == "C" else range(array.ndim)[::-1] if order == "F" else order
    return Tile(-(-array.data.shape[axes[axis]] // sides[axis]), ct.int32)


def locate(array: Array, indices: Any, mask: Any, check_bounds: bool) -> tuple[list[NumpyArray], NumpyArray]:
    """Index arrays of a gather or scatter, broadcast and clamped, and which of them to follow."""
    items = indices if isinstance(indices, tuple) else (indices,)
    if len(items) != array.ndim:
        raise InterpreterError(f"{array.name} has {array.ndim} axes; got {len(items)} indices")
    for item in items:
        if CATEGORY[type_of(item)] != INTEGER:
            raise InterpreterError(f"indices into {array.name} must be integers, got {type_of(item)}")
    where = np.broadcast_arrays(*(np.asarray(i.array if isinstance(i, Tile) else i, np.int64) for i in items))
    if array.launch.uses is not None:
        _note(array, items)
    inside = np.ones(where[0].shape, bool)
    for positions, size in zip(where, array.data.shape, strict=True):
        inside &= (positions >= 0) & (positions < size)
    wanted = np.ones(inside.shape, bool)
    if mask is not None:
        if type_of(mask) != ct.bool_:
            raise InterpreterError(f"a mask must be boolean, got {type_of(mask)}")
        wanted = np.broadcast_to(mask.array if isinstance(mask, Tile) else mask, inside.shape)
    if not check_bounds and np.any(wanted & ~inside):
        raise OutsideError(f"{array.name}: check_bounds=False, but an index lies outside the shape {array.data.shape}")
    followed = wanted & inside
    return [np.where(followed, positions, 0) for positions in where], followed


def _note(array: Array, items: tuple[Any, ...]) -> None:
    """Note the tiles that the indices of a gather or scatter stand for: as long as they are many, or lie close together."""
    for axis, (item, size) in enumerate(zip(items, array.data.shape, strict=True)):
        positions = np.asarray(item.array if isinstance(item, Tile) else item)
        if positions.size and size:
            first, last = int(positions.min()), int(positions.max())
            side = min(positions.size, last - first + 1)
            array.launch.uses.note(array.name, axis, side, min(max(first, 0), size - 1) // side)


@implements("gather")
def gather(
    array: Array,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:
    """The elements at `indices`; `padding_value` where masked or out of bounds."""
    where, followed = locate(array, indices, mask, check_bounds)
    padding = implicit_cast(padding_value, array.dtype, "the padding value of ct.gather")
    return Tile(np.where(followed, array.data[tuple(where)], padding).astype(array.data.dtype), array.dtype)


@implements("scatter")
def scatter(
    array: Array,
    indices: Any,
    value: Tile | Scalar,
    /,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    latency: int | None = None,
) -> None:
    """Write the elements at `indices`; nothing where masked or out of bounds."""
    where, followed = locate(array, indices, mask, check_bounds)
    values = np.broadcast_to(implicit_cast(value, array.dtype, f"ct.scatter to {array.name}"), followed.shape)
    chosen = tuple(positions[followed] for positions in where)
    array.claim(chosen, array.writers)
    array.data[chosen] = values[followed]


def dense_indices(indices: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tile of indices and the slices of advanced indexing as index tiles that broadcast together."""
    spread = []
    for axis, item in enumerate(indices):
        line = item.array if isinstance(item, Tile) else int(item.start) + np.arange(constant_shape(item.length)[0])
        sides = [-1 if other == axis else 1 for other in range(len(indices))]
        spread.append(Tile(line.reshape(sides), ct.int64))
    return tuple(spread)


@implements("Slice.__init__")
def make_slice(self: Any, start: Any, length: int, /) -> None:
    """`length` elements from `start`."""
    self.start, self.length = start, length


@implements("load_advanced_indexing")
def load_advanced_indexing(
    array: Array,
    indices: tuple[Any, ...],
    /,
    *,
    padding_mode: Any = UNDETERMINED,
    latency: int | None = None,
    allow_tma: Any = None,
) -> Tile:
    """Rows chosen by a tile of indices, crossed with slices."""
    where, followed = locate(array, dense_indices(indices), None, True)
    value = np.asarray(padding_value(array, padding_mode)).astype(array.data.dtype)
    return Tile(np.where(followed, array.data[tuple(where)], value), array.dtype)


@implements("store_advanced_indexing")
def store_advanced_indexing(
    array: Array, indices: tuple[Any, ...], tile: Tile | Scalar, /, *, latency: int | None = None, allow_tma: Any = None
) -> None:
    """Write rows chosen by a tile of indices, crossed with slices."""
    scatter(array, dense_indices(indices), tile, latency=latency)


def _atomic(name: str, change: Callable[[Any, Any], Any]) -> None:
    def function(
        array: Array, indices: Any, update: Tile | Scalar, /, *, check_bounds: bool = True, **others: Any
    ) -> Tile:
        return atomically(array, indices, (update,), change, check_bounds, name)

    add(name, function)


def atomically(
    array: Array, indices: Any, operands: tuple[Any, ...], change: Callable[..., Any], check_bounds: bool, name: str
) -> Tile:
    """Replace the elements at `indices` one after another; the result is what was there before each."""
    where, followed = locate(array, indices, None, check_bounds)
    values = [
        np.broadcast_to(implicit_cast(operand, array.dtype, f"ct.{name}"), followed.shape) for operand in operands
    ]
    old = np.full(followed.shape, poison(array.dtype), array.data.dtype)
    chosen = tuple(positions[followed] for positions in where)
    if array.ndim and np.unique(np.ravel_multi_index(chosen, array.data.shape)).size == chosen[0].size:
        old[followed] = array.data[chosen]  # no element is meant twice, so that their order does not matter
        array.data[chosen] = change(old[followed], *(value[followed] for value in values))
        return Tile(old, array.dtype)
    for position in np.argwhere(followed):
        one = tuple(position)
        element = tuple(positions[one] for positions in where)
        old[one] = array.data[element]
        array.data[element] = change(array.data[element], *(value[one] for value in values))
    return Tile(old, array.dtype)


for _name, _change in (
    ("add", operator.add),
    ("xchg", lambda old, new: new),
    ("max", np.fmax),
    ("min", np.fmin),
    ("and", operator.and_),
    ("or", operator.or_),
    ("xor", operator.xor),
):
    _atomic(f"atomic_{_name}", _change)


@implements("atomic_cas")
def atomic_cas(
    array: Array, indices: Any, expected: Any, desired: Any, /, *, check_bounds: bool = True, **others: Any
) -> Tile:
    """Replace elements that equal `expected`; out of bounds, `expected` is returned."""
    found = atomically(
        array,
        indices,
        (expected, desired),
        lambda old, want, new: np.where(old == want, new, old),
        check_bounds,
        "atomic_cas",
    )
    _, followed = locate(array, indices, None, check_bounds)
    return Tile(np.where(followed, found.array, implicit_cast(expected, array.dtype, "ct.atomic_cas")), array.dtype)
