"""Global arrays, and reading and writing tiles of them with every access checked."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import numpy as np

from tiledsched.interpreter.registry import implements
from tiledsched.interpreter.values import (
    BOOL,
    CATEGORY,
    FLOAT,
    INTEGER,
    STORAGE,
    TILE_TYPE,
    InterpreterError,
    OutsideError,
    Scalar,
    Tile,
    cast,
    constant_int,
    constant_shape,
    implicit_cast,
    type_of,
)

NumpyArray = np.ndarray[Any, Any]
Region = tuple[slice, ...]
PADDING = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: np.nan,
    ct.PaddingMode.POS_INF: np.inf,
    ct.PaddingMode.NEG_INF: -np.inf,
}


SMALLEST_SCALE = 2.0**-127
"""What bits of zero are in float8_e8m0fnu, which has no 0."""


class Array(ct.Array):
    """A global array: a view of the caller's NumPy array, and who wrote each of its elements."""

    def __init__(
        self,
        name: str,
        data: NumpyArray,
        writers: NumpyArray,
        launch: Any,
        *,
        index_dtype: Any = ct.int32,
        static_dims: tuple[int, ...] = (),
    ) -> None:
        if data.dtype not in TILE_TYPE:
            raise InterpreterError(f"{name}: cuTile has no type for NumPy's {data.dtype}; use one such as float16")
        self.name = name
        self.data = data
        self.writers = writers
        self.launch = launch
        self.index_dtype = index_dtype
        self.static_dims = static_dims

    @property
    def dtype(self) -> Any:
        """The cuTile type of the elements."""
        return TILE_TYPE[self.data.dtype]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Elements along each axis: run-time scalars, except where the kernel declares them static."""
        return tuple(
            size if axis in self.static_dims else Tile(size, self.index_dtype)
            for axis, size in enumerate(self.data.shape)
        )

    @property
    def strides(self) -> tuple[Any, ...]:
        """Elements to step along each axis."""
        return tuple(Tile(stride // self.data.itemsize, self.index_dtype) for stride in self.data.strides)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.data.ndim

    def slice(self, axis: int, start: Any, stop: Any) -> Array:
        """A view restricted to start..stop along `axis`."""
        axis, first, last = constant_int(axis, "an axis") % self.ndim, int(start), int(stop)
        if not (0 <= first <= last <= self.data.shape[axis]):
            raise InterpreterError(f"{self.name}.slice({axis}, {first}, {last}) leaves the array, {self.data.shape}")
        part = (slice(None),) * axis + (slice(first, last),)
        return Array(self.name, self.data[part], self.writers[part], self.launch, index_dtype=self.index_dtype)

    @property
    def foreign_pointer(self) -> Any:
        """The address of the first element, from which `ct.Array.from_foreign` makes another view."""
        return self

    def tiled_view(
        self, tile_shape: Any, *, padding_mode: Any = ct.PaddingMode.UNDETERMINED, traversal_steps: Any = None
    ) -> TiledView:
        """Tiles of one shape, `traversal_steps` elements apart."""
        return TiledView(self, constant_shape(tile_shape), padding_mode, traversal_steps)

    def __getitem__(self, index: Any) -> Any:
        raise InterpreterError(f"{self.name} cannot be indexed in tile code; use ct.load or ct.gather")

    def claim(self, region: Any, view: NumpyArray) -> None:
        """Note that the current block writes `view[region]`, a part of the writers' array.

        Raises:
            InterpreterError: another block wrote one of these elements.
        """
        if not self.launch.check_overlap:
            return
        writers = view[region]
        others = (writers != 0) & (writers != self.launch.serial)
        if np.any(others):
            raise InterpreterError(
                f"overlapping stores: an element of {self.name} was already written by block number "
                f"{int(writers[others].flat[0]) - 1}; which value stays depends on timing"
            )
        view[region] = self.launch.serial


@implements("Array.from_foreign")
def from_foreign(pointer: Array, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Array:
    """A view of the memory of the array whose `foreign_pointer` is given. The tiles taken of it are not noted as that array's."""
    sizes, steps = ([int(each) for each in some] for some in (shape, strides))
    data, writers = pointer.data, pointer.writers
    held = 1 + sum((size - 1) * stride // data.itemsize for size, stride in zip(data.shape, data.strides, strict=True))
    if min(sizes) > 0 and 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) > held:
        raise OutsideError(
            f"{pointer.name}: a view of shape {sizes} and strides {steps} reaches beyond its {held} elements"
        )
    seen, noted = (
        np.lib.stride_tricks.as_strided(each, sizes, [each.itemsize * step for step in steps])
        for each in (data, writers)
    )
    name = f"{pointer.name} from its first element on"
    return Array(name, seen, noted, pointer.launch, index_dtype=pointer.index_dtype)


class TiledView(ct.TiledView):
    """Tiles of one shape over an array."""

    def __init__(self, array: Array, tile_shape: tuple[int, ...], padding_mode: Any, steps: Any) -> None:
        self._array, self._shape, self._padding = array, tile_shape, padding_mode
        sides = tile_shape or (1,) * array.ndim
        self._steps = sides if steps is None else steps if isinstance(steps, tuple) else (steps,)

    @property
    def dtype(self) -> Any:
        """The cuTile type of the elements."""
        return self._array.dtype

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of each tile."""
        return self._shape

    @property
    def traversal_steps(self) -> tuple[int, ...]:
        """Elements between neighbouring tiles' first elements."""
        return self._steps

    def num_tiles(self, axis: int) -> Tile:
        """Tiles along `axis`."""
        return Tile(-(-self._array.data.shape[axis] // self._steps[axis]), ct.int32)

    def load(self, index: Any, *, check_bounds: bool = True, latency: int | None = None, allow_tma: Any = None) -> Tile:
        """The tile at `index`."""
        check_hints(latency)
        return read(self._array, index, self._shape, "C", self._padding, check_bounds, self._steps)

    def store(
        self,
        index: Any,
        tile: Tile | Scalar,
        *,
        check_bounds: bool = True,
        latency: int | None = None,
        allow_tma: Any = None,
    ) -> None:
        """Write the tile at `index`."""
        check_hints(latency)
        value = np.broadcast_to(implicit_cast(tile, self.dtype, "ct.TiledView.store"), self._shape)
        write(self._array, index, value, "C", check_bounds, self._steps)


def _atomic_store(name: str, change: Any, *, bits: bool = False) -> None:
    """Give views the method that replaces a tile's elements by `change` of what they are and of an update."""

    def method(self: TiledView, index: Any, update: Tile | Scalar, /) -> None:
        if bits and type_of(update) != self.dtype:
            raise InterpreterError(f"ct.TiledView.{name} needs an update of {self.dtype}, got {type_of(update)}")
        array = self._array
        value = np.broadcast_to(cast(update, self.dtype), self._shape or (1,) * array.ndim)
        axes, outer, inner, _ = place(array, index, value.shape, "C", True, self._steps)
        part = array.data.transpose(axes)[outer]
        part[...] = change(part, value[inner])

    setattr(TiledView, name, method)


_atomic_store("atomic_store_add", np.add)
_atomic_store("atomic_store_max", np.fmax)
_atomic_store("atomic_store_min", np.fmin)
_atomic_store("atomic_store_and", np.bitwise_and, bits=True)
_atomic_store("atomic_store_or", np.bitwise_or, bits=True)
_atomic_store("atomic_store_xor", np.bitwise_xor, bits=True)


def check_hints(latency: int | None) -> None:
    """Refuse the latency hints that cuTile refuses."""
    if latency is not None and not 1 <= latency <= 10:
        raise InterpreterError(f"a latency hint must be between 1 and 10, or None, got {latency}")


def poison(dtype: Any) -> Any:
    """What undetermined elements hold: NaN, or the largest value of a type without one."""
    if CATEGORY[dtype] == INTEGER:
        return np.iinfo(STORAGE[dtype]).max
    if CATEGORY[dtype] == BOOL:
        return True
    nan = np.asarray(np.nan, np.float32).astype(STORAGE[dtype])
    return nan if np.isnan(nan) else np.asarray(np.inf, np.float32).astype(STORAGE[dtype])


def padding_value(array: Array, padding_mode: Any) -> Any:
    """What the elements of a tile beyond the array's edge hold."""
    if padding_mode == ct.PaddingMode.UNDETERMINED:
        return poison(array.dtype) if array.launch.undetermined == "nan" else 0
    if CATEGORY[array.dtype] < FLOAT and padding_mode != ct.PaddingMode.ZERO:
        raise InterpreterError(f"{array.name}: {padding_mode} needs a float array, got {array.dtype}")
    if array.dtype == ct.float8_e8m0fnu and padding_mode in (ct.PaddingMode.ZERO, ct.PaddingMode.NEG_ZERO):
        return SMALLEST_SCALE
    return PADDING[padding_mode]


def place(
    array: Array, index: Any, shape: tuple[int, ...], order: Any, check_bounds: bool, steps: tuple[int, ...] | None
) -> tuple[tuple[int, ...], Region, Region, bool]:
    """Where a tile lies: axis order, part of the array, that part within the tile, whether it is all of it."""
    rank = array.ndim
    items = index if isinstance(index, tuple) else (index,)
    if len(items) != rank or len(shape) != rank:
        raise InterpreterError(f"{array.name} has {rank} axes; got index {items} and tile shape {shape}")
    axes = tuple(range(rank)) if order == "C" else tuple(range(rank))[::-1] if order == "F" else tuple(order)
    if sorted(axes) != list(range(rank)):
        raise InterpreterError(f"{array.name}: order {order} is not a permutation of its {rank} axes")
    outer, inner, whole, uses = [], [], True, array.launch.uses
    for item, side, step, axis in zip(items, shape, steps or shape, axes, strict=True):
        size = array.data.shape[axis]
        start = int(item.__index__()) * step
        if start < 0 or start >= size:
            raise OutsideError(
                f"{array.name}: the tile at index {tuple(map(int, items))} of shape {shape} lies entirely outside "
                f"the array of shape {array.data.shape} (order {order}); cuTile leaves that undefined"
            )
        if uses is not None:
            uses.note(array.name, axis, step, start // step)
        stop = min(start + side, size)
        outer.append(slice(start, stop))
        inner.append(slice(0, stop - start))
        whole = whole and stop - start == side
    if not whole and not check_bounds:
        raise OutsideError(
            f"{array.name}: check_bounds=False, but the tile at {items} of shape {shape} crosses the edge"
        )
    return axes, tuple(outer), tuple(inner), whole


def read(
    array: Array,
    index: Any,
    shape: tuple[int, ...],
    order: Any,
    padding_mode: Any,
    check_bounds: bool,
    steps: tuple[int, ...] | None = None,
) -> Tile:
    """The tile at `index`, padded where it crosses the array's edge."""
    sides = shape or (1,) * array.ndim
    axes, outer, inner, whole = place(array, index, sides, order, check_bounds, steps)
    part = array.data.transpose(axes)[outer]
    if whole:
        return Tile(part.copy().reshape(shape), array.dtype)
    tile = np.full(sides, padding_value(array, padding_mode), array.data.dtype)
    tile[inner] = part
    return Tile(tile.reshape(shape), array.dtype)


def write(
    array: Array, index: Any, value: NumpyArray, order: Any, check_bounds: bool, steps: tuple[int, ...] | None = None
) -> None:
    """Write `value` at `index`; elements beyond the array's edge are dropped."""
    if value.ndim == 0:
        value = value.reshape((1,) * array.ndim)
    axes, outer, inner, _ = place(array, index, value.shape, order, check_bounds, steps)
    array.claim(outer, array.writers.transpose(axes))
    array.data.transpose(axes)[outer] = value[inner]
