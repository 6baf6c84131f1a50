"""Making tiles and changing their shape and type."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import numpy as np

from tiledsched.interpreter.registry import implements
from tiledsched.interpreter.values import (
    CATEGORY,
    FLOAT,
    STORAGE,
    TILE_TYPE,
    InterpreterError,
    Scalar,
    ShapeError,
    Tile,
    UnsupportedOperationError,
    cast,
    constant_int,
    constant_shape,
    scalar_dtype,
)


def as_dtype(dtype: Any) -> Any:
    """A cuTile type, from one, from a type of torch, or from what NumPy takes for a type."""
    dtype = dtype.dtype if isinstance(dtype, TypeInTiles) else dtype
    if dtype in STORAGE:
        return dtype
    if isinstance(dtype, ct.DType):
        raise UnsupportedOperationError(f"the interpreter cannot hold {dtype}", operation=f"ct.{dtype}")
    if type(dtype).__module__ == "torch":
        named = getattr(ct, "bool_" if str(dtype) == "torch.bool" else str(dtype).removeprefix("torch."), None)
        if named in STORAGE:
            return named
    try:
        return TILE_TYPE[np.dtype(dtype)]
    except (TypeError, KeyError):
        raise InterpreterError(f"{dtype!r} is not a type the interpreter holds; use one such as ct.float32") from None


class TypeInTiles:
    """A cuTile type as tile code sees it: equal to the type itself, and called to make a scalar of it.

    cuTile's own types cannot be called on the host.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __call__(self, value: Tile | Scalar = 0, /) -> Tile:
        """`value` as a scalar of this type."""
        return astype(value, self.dtype)

    def __eq__(self, other: object) -> bool:
        return bool(self.dtype == (other.dtype if isinstance(other, TypeInTiles) else other))

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __repr__(self) -> str:
        return repr(self.dtype)

    def __str__(self) -> str:
        return str(self.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dtype, name)


def as_tile(value: Tile | Scalar) -> Tile:
    """A tile, of shape () where `value` is a Python number."""
    return value if isinstance(value, Tile) else Tile(value, scalar_dtype(value))


@implements("full")
def full(shape: Any, fill_value: Tile | Scalar, dtype: Any) -> Tile:
    """A tile with one value everywhere."""
    dtype = as_dtype(dtype)
    return Tile(np.broadcast_to(cast(fill_value, dtype), constant_shape(shape)), dtype)


@implements("zeros")
def zeros(shape: Any, dtype: Any) -> Tile:
    """A tile of zeros."""
    return full(shape, 0, dtype)


@implements("ones")
def ones(shape: Any, dtype: Any) -> Tile:
    """A tile of ones."""
    return full(shape, 1, dtype)


@implements("arange")
def arange(size: int, /, *, dtype: Any, start: Tile | Scalar = 0, step: Tile | Scalar = 1) -> Tile:
    """`size` values from `start`, `step` apart."""
    dtype = as_dtype(dtype)
    (length,) = constant_shape(size)
    steps = np.arange(length).astype(STORAGE[dtype])
    return Tile(steps * cast(step, dtype) + cast(start, dtype), dtype)


@implements("astile")
def astile(value: Any, /, *, dtype: Any) -> Tile:
    """A tile from (nested tuples of) numbers."""

    def numbers(item: Any) -> Any:
        return [numbers(part) for part in item] if isinstance(item, tuple) else cast(item, as_dtype(dtype))

    array = np.asarray(numbers(value))
    constant_shape(array.shape)
    return Tile(array, as_dtype(dtype))


@implements("astype")
def astype(x: Tile | Scalar, dtype: Any, /, *, rounding_mode: Any = None) -> Tile:
    """`x` converted, to nearest even."""
    if rounding_mode not in (None, ct.RoundingMode.RN):
        raise UnsupportedOperationError(
            f"ct.astype: the interpreter does not imitate {rounding_mode}; it rounds to nearest even",
            operation=f"ct.astype with {rounding_mode}",
        )
    tile, dtype = as_tile(x), as_dtype(dtype)
    return tile if tile.dtype == dtype else Tile(cast(tile, dtype), dtype)


@implements("bitcast")
def bitcast(x: Tile | Scalar, /, dtype: Any) -> Tile:
    """The tile's bits as another type of the same width."""
    tile, dtype = as_tile(x), as_dtype(dtype)
    if tile.dtype.bitwidth != dtype.bitwidth or ct.bool_ in (tile.dtype, dtype):
        raise InterpreterError(f"ct.bitcast from {tile.dtype} to {dtype}: the widths differ, or one is bool")
    return Tile(tile.array.view(STORAGE[dtype]), dtype)


@implements("pack_to_bytes")
def pack_to_bytes(x: Tile, /) -> Tile:
    """The elements' bits as bytes, little end first; of two 4-bit elements the first is the low half."""
    if x.dtype == ct.bool_ or x.array.size * x.dtype.bitwidth % 8:
        raise InterpreterError(f"ct.pack_to_bytes: {x.array.size} elements of {x.dtype} are not whole bytes")
    codes = np.ascontiguousarray(x.array).reshape(-1).view(np.uint8)
    return Tile(codes[::2] & 15 | codes[1::2] << 4 if x.dtype.bitwidth == 4 else codes, ct.uint8)


@implements("unpack_from_bytes")
def unpack_from_bytes(x: Tile, /, dtype: Any) -> Tile:
    """The inverse of `pack_to_bytes`."""
    dtype = as_dtype(dtype)
    if x.dtype != ct.uint8 or x.ndim != 1 or dtype == ct.bool_ or x.array.size * 8 % dtype.bitwidth:
        raise InterpreterError(f"ct.unpack_from_bytes: no {dtype} in a tile of {x.dtype} of shape {x.shape}")
    codes = np.ascontiguousarray(x.array)
    if dtype.bitwidth == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(-1)
    return Tile(codes.view(STORAGE[dtype]), dtype)


@implements("reshape")
def reshape(x: Tile | Scalar, /, shape: Any) -> Tile:
    """The elements in row-major order in another shape; one side may be -1."""
    tile = as_tile(x)
    sides = tuple(constant_int(side, "a side of a tile") for side in (shape if isinstance(shape, tuple) else (shape,)))
    return tile if sides == tile.shape else Tile(tile.array.reshape(sides), tile.dtype)


@implements("broadcast_to")
def broadcast_to(x: Tile | Scalar, /, shape: Any) -> Tile:
    """`x` repeated along sides of length one."""
    tile, sides = as_tile(x), constant_shape(shape)
    return tile if sides == tile.shape else Tile(np.broadcast_to(tile.array, sides), tile.dtype)


@implements("expand_dims")
def expand_dims(x: Tile, /, axis: Any) -> Tile:
    """A new side of length one at `axis`, or wherever an index such as `[:, None]` says."""
    if isinstance(axis, int):
        return Tile(np.expand_dims(x.array, axis), x.dtype)
    items = axis if isinstance(axis, tuple) else (axis,)
    if any(item is not None and item is not Ellipsis and item != slice(None) for item in items):
        raise InterpreterError("a tile is indexed with : and None only; use .extract() to take a part of it")
    return Tile(x.array[items], x.dtype)


@implements("permute")
def permute(x: Tile, /, axes: tuple[int, ...]) -> Tile:
    """The axes in another order."""
    return Tile(x.array.transpose([constant_int(axis, "an axis") for axis in axes]), x.dtype)


@implements("transpose")
def transpose(x: Tile, /, axis0: int | None = None, axis1: int | None = None) -> Tile:
    """Two axes exchanged; those of a two-dimensional tile need not be named."""
    if axis0 is None and axis1 is None and x.ndim == 2:
        axis0, axis1 = 0, 1
    if axis0 is None or axis1 is None:
        raise InterpreterError(f"ct.transpose of a tile of shape {x.shape} needs both axes")
    return Tile(np.swapaxes(x.array, axis0, axis1), x.dtype)


@implements("cat")
def cat(tiles: tuple[Tile, ...], /, axis: int) -> Tile:
    """Two tiles joined along `axis`."""
    if not 1 <= len(tiles) <= 2 or tiles[0].dtype != tiles[-1].dtype:
        raise InterpreterError(f"ct.cat joins two tiles of one type, got {', '.join(map(repr, tiles))}")
    joined = np.concatenate([tile.array for tile in tiles], constant_int(axis, "an axis"))
    constant_shape(joined.shape)
    return Tile(joined, tiles[0].dtype)


def part_of(x: Tile, index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Where the subtile of `shape` at `index`, counted in subtiles, lies in `x`."""
    items = index if isinstance(index, tuple) else (index,)
    if not len(items) == len(shape) == x.ndim:
        raise InterpreterError(f"index {items} and shape {shape} do not fit a tile of shape {x.shape}")
    for item, side, whole in zip(items, shape, x.shape, strict=True):
        if whole % side or not 0 <= int(item) < whole // side:
            raise InterpreterError(f"no subtile of shape {shape} at index {items} in a tile of shape {x.shape}")
    return tuple(slice(int(item) * side, (int(item) + 1) * side) for item, side in zip(items, shape, strict=True))


@implements("extract")
def extract(x: Tile, /, index: Any, shape: Any) -> Tile:
    """The subtile at `index`, counted in subtiles."""
    sides = constant_shape(shape)
    part = x.array[part_of(x, index, sides or (1,) * x.ndim)]
    return Tile(part if sides else part.reshape(()), x.dtype)


@implements("insert")
def insert(x: Tile, /, index: Any, value: Tile) -> Tile:
    """`x` with the subtile at `index` replaced."""
    if x.dtype != value.dtype:
        raise InterpreterError(f"ct.insert: the types differ, {x.dtype} and {value.dtype}")
    sides = value.shape or (1,) * x.ndim
    array = x.array.copy()
    array[part_of(x, index, sides)] = value.array.reshape(sides)
    return Tile(array, x.dtype)


@implements("static_eval", "ensure_constant")
def same_value(value: Any, /) -> Any:
    """Tile code is ordinary Python here: the expression has been evaluated already."""
    return value


@implements("assume_divisible_by")
def assume_divisible_by(x: Any, divisor: int) -> Any:
    """`x`, once the promise has been checked."""
    if int(x) % divisor:
        raise InterpreterError(f"ct.assume_divisible_by: {int(x)} is not divisible by {divisor}")
    return x


@implements("static_assert")
def static_assert(condition: Any, message: Any = None, /) -> None:
    """Raise where the condition does not hold."""
    if not condition:
        raise ShapeError(f"static assertion failed: {'' if message is None else message}")


@implements("assert_")
def assert_(condition: Tile, /, message: str | None = None) -> None:
    """Raise where the condition fails for any element."""
    if not np.all(condition.array):
        raise InterpreterError(f"assertion failed: {message or repr(condition)}")


@implements("print")
def print_values(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Print to standard output."""
    print(*(format(value) for value in values), sep=sep, end=end)


@implements("printf")
def printf(template: str, *values: Tile) -> None:
    """Print with a C format, one line for every element of the broadcast values."""
    arrays = np.broadcast_arrays(*(as_tile(value).array for value in values)) if values else []
    kinds = [float if CATEGORY[as_tile(value).dtype] >= FLOAT else int for value in values]
    for row in zip(*(array.reshape(-1) for array in arrays), strict=True) if values else [()]:
        print(template % tuple(kind(item) for kind, item in zip(kinds, row, strict=True)), end="")


@implements("grid_dependency_control_wait", "grid_dependency_control_launch_dependents")
def nothing_to_wait_for() -> None:
    """One kernel runs at a time here."""
