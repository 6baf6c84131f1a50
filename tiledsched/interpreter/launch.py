"""Running a kernel over its grid, one block after another."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cuda.tile as ct
import ml_dtypes
import numpy as np

from tiledsched.core.arrays import ArraySpec, poison, storage_type, tile_type, to_host
from tiledsched.core.copies import closed_over
from tiledsched.core.errors import ProblemError, author_line, describe
from tiledsched.core.launches import annotated, scratch, steps
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.interpreter import memory, reductions, shapes  # noqa: F401
from tiledsched.interpreter.arrays import Array, check_hints
from tiledsched.interpreter.builtins_in_tiles import with_tile_builtins
from tiledsched.interpreter.contraction import Arithmetic, implementations
from tiledsched.interpreter.private import load_dispatch_mode, undecorated
from tiledsched.interpreter.registry import IMPLEMENTATIONS, KEYWORDS, innermost
from tiledsched.interpreter.uses import TileUses
from tiledsched.interpreter.values import (
    TILE_TYPE,
    InterpreterError,
    ShapeError,
    Tile,
    UnsupportedOperationError,
    in_range,
)

DispatchMode: Any = load_dispatch_mode()
Grid = int | tuple[int, ...]
BlockOrder = int | typing.Literal["forward", "reversed"]
"""The order in which blocks run: an integer is the seed of a random one. A right kernel gives the same in each."""
BROADCAST = "counted from the last axis, sides must be equal or 1; write rows[:, None] and columns[None, :] for tiles of one axis"
"""What to do about tiles of shapes that do not fit together."""
Undetermined = typing.Literal["nan", "zero"]
"""What padding of mode `UNDETERMINED` holds: NaN (the largest value of a type without one), so that a kernel which uses
it shows; or zero, with which CUDA's tensor maps fill what lies outside by default."""


class InterpretedLaunch(DispatchMode):
    """One launch: the grid, the block whose turn it is, and the answer to every `ct.*` call."""

    def __init__(
        self,
        grid: tuple[int, int, int],
        check_overlap: bool,
        order: BlockOrder = "forward",
        undetermined: Undetermined = "nan",
        uses: TileUses | None = None,
        arithmetic: Arithmetic = "rounded",
    ) -> None:
        self.grid = grid
        self.uses = uses
        self.undetermined = undetermined
        self.order = order
        self.check_overlap = check_overlap
        self.block = (0, 0, 0)
        self.serial = 0
        """Number of the current block, from 1: what the writers' arrays hold."""
        self._own: dict[Any, Callable[..., Any]] = {
            innermost(ct.bid): self.bid,
            innermost(ct.num_blocks): self.num_blocks,
            **implementations(arithmetic),
        }

    def blocks(self) -> typing.Iterator[tuple[int, int, int]]:
        """Every block in turn: x fastest, or the same backwards, or drawn by a seed."""
        blocks = [(x, y, z) for z, y, x in itertools.product(*map(range, reversed(self.grid)))]
        if self.order == "reversed":
            blocks.reverse()
        elif self.order != "forward":
            random.Random(self.order).shuffle(blocks)
        for block in blocks:
            self.serial += 1
            self.block = block
            yield self.block

    def bid(self, axis: int) -> Tile:
        """Index of the current block."""
        return Tile(self.block[_axis(axis)], ct.int32)

    def num_blocks(self, axis: int) -> Tile:
        """Blocks along `axis`."""
        return Tile(self.grid[_axis(axis)], ct.int32)

    def call_tile_function_from_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a `ct.*` function, or of a user's @ct.function."""
        if self.uses is not None:
            self.uses.count_call()
        target = innermost(func)
        implementation = self._own.get(target) or IMPLEMENTATIONS.get(target)
        if implementation is None:
            if not getattr(target, "__module__", "").startswith("cuda.tile"):
                return target(*args, **kwargs)
            name = _name(target)
            raise UnsupportedOperationError(
                f"{name} is not supported by the interpreter (docs/check.md)", operation=name
            )
        try:
            if kwargs and not kwargs.keys() <= KEYWORDS.get(target, kwargs.keys()):
                raise TypeError(f"unknown arguments {sorted(kwargs.keys() - KEYWORDS[target])}")
            check_hints(kwargs.get("latency"))
            result = implementation(*args, **kwargs)
            if self.uses is not None and isinstance(result, Tile):
                self.uses.elements += result.array.size
            return result
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            sides = " and ".join(str(each.shape) for each in args if isinstance(each, Tile))
            what = (
                f"tiles of shapes {sides} do not fit together; {BROADCAST}"
                if "broadcast" in str(error) and " and " in sides
                else error
            )
            raise ShapeError(f"{_name(target)}: {what}") from error


def _name(target: Any) -> str:
    return f"ct.{getattr(target, '__qualname__', target)}"


def _axis(axis: int) -> int:
    if axis not in (0, 1, 2):
        raise InterpreterError(f"a grid has axes 0, 1 and 2, got {axis}")
    return axis


def run(
    kernel: Any,
    grid: Grid,
    args: Sequence[Any],
    *,
    check_overlap: bool = True,
    order: BlockOrder = "forward",
    undetermined: Undetermined = "nan",
    uses: TileUses | None = None,
    arithmetic: Arithmetic = "rounded",
) -> None:
    """Run a cuTile kernel on the CPU; arrays among `args` are changed in place.

    Args:
        kernel: a `ct.kernel`, or the function under one.
        grid: blocks along x, or along up to three axes.
        args: NumPy arrays, of any strides, and Python numbers, in the order of the kernel's parameters; constants
            included. Numbers whose parameter is not a `ct.Constant` become run-time scalars (int32, float32).
        check_overlap: whether a store to an element that another block stored to is an error.
        order: in which blocks run; see `BlockOrder`.
        undetermined: what padding of that mode holds; see `Undetermined`.
        uses: notes the tiles taken, if given.
        arithmetic: how numbers are computed; see `Arithmetic`.

    Raises:
        InterpreterError: the kernel did what cuTile forbids or leaves undefined.
        UnsupportedOperationError: the kernel used an operation that is not supported here.
    """
    function = undecorated(kernel)
    sides = grid if isinstance(grid, tuple) else (grid,)
    if not 1 <= len(sides) <= 3 or any(side < 1 for side in sides):
        raise InterpreterError(f"a grid has one to three axes of at least one block, got {grid}")
    if undetermined not in typing.get_args(Undetermined):
        raise InterpreterError(f'undetermined padding holds "nan" or "zero" here, got {undetermined!r}')
    launch = InterpretedLaunch((*sides, 1, 1)[:3], check_overlap, order, undetermined, uses, arithmetic)  # type: ignore[arg-type]
    values = _arguments(function, args, launch)
    body = with_tile_builtins(function)
    with np.errstate(all="ignore"), launch.as_current():
        for block in launch.blocks():
            with _located(f"{function.__name__}, block {block}"):
                body(*values)


@contextlib.contextmanager
def _located(place: str) -> typing.Iterator[None]:
    """Within the `with`, errors of tile code name `place` and the line of the author's code.

    Raises:
        InterpreterError: in the place of any other error, too.
    """
    try:
        yield
    except InterpreterError as error:
        raise error.located(place, author_line(error)) from error
    except Exception as error:  # an error of Python's in tile code
        raise InterpreterError(f"{place}: {describe(error)}") from error


def evaluate(function: Any, *values: Any, arrays: Sequence[Any] = ()) -> np.ndarray[Any, Any]:
    """What a tile function that works element by element returns for arrays of any size.

    For example, `evaluate(mask_mod, b, h, q_idx, kv_idx, arrays=(documents,))` is the mask of an attention, where `q_idx` is
    `[rows, 1]` and `kv_idx` is `[1, keys]`. Types are promoted as cuTile promotes them, so float64 values make a float64 result,
    except for what the function itself computes in a smaller type. Sides of tiles are powers of two: each array among `values`
    is extended to the next ones by its last elements, and the result is cut.

    Args:
        function: a tile function, or a frozen dataclass with a `__call__` that is one.
        values: its first arguments. Numbers become run-time scalars (int32, float32). Arrays, whose shapes broadcast, become
            tiles of their own element types.
        arrays: its last arguments, which it reads with `ct.gather`; of any types and shapes. Arrays of CuPy, here and above,
            are copied to the host.

    Returns:
        The result, broadcast to the shape of the `values`; not to be written to.

    Raises:
        InterpreterError: the function failed, did what cuTile forbids, or returned another shape. The message names the
            line in the function, where one is to blame.
        UnsupportedOperationError: the function used an operation that is not supported here.
    """
    launch = InterpretedLaunch((1, 1, 1), check_overlap=True)
    with (
        np.errstate(all="ignore"),
        launch.as_current(),
        _located(getattr(function, "__name__", type(function).__name__)),
    ):
        given = [to_host(value) for value in values]
        tiles = [_extended(each) if isinstance(each, np.ndarray) else _argument("", each, (), launch) for each in given]
        read = [_argument(f"array {i}", to_host(array), (), launch) for i, array in enumerate(arrays)]
        found = shapes.as_tile(with_tile_builtins(function)(*tiles, *read)).array
        shape, whole = (np.broadcast_shapes(*map(np.shape, each)) for each in (given, [tile.array for tile in tiles]))
        if found.ndim > len(whole) or any(
            a not in (1, b) for a, b in zip(found.shape[::-1], whole[::-1], strict=False)
        ):
            raise ShapeError(f"it must return a tile that broadcasts to {whole}, got {found.shape}; {BROADCAST}")
        return np.broadcast_to(found, whole)[tuple(map(slice, shape))]


def _extended(array: np.ndarray[Any, Any]) -> Tile:
    """An array as a tile, each of whose sides is extended to a power of two by the array's last elements."""
    more = [(0, (1 << max(side - 1, 0).bit_length()) - side) for side in array.shape]
    return Tile(np.pad(array, more, mode="edge" if array.size else "constant"), shapes.as_dtype(array.dtype))


@dataclass(frozen=True, kw_only=True)
class SmallDevice:
    """What grids may ask of the device they are made for."""

    sm_count: int = 8
    """Multiprocessors; few, so that persistent blocks take several work tiles."""
    arch: str = "sm_90"
    """Arch of the device."""


def run_schedule(
    kernel: KernelClass,
    p: Problem,
    s: Schedule,
    inputs: Mapping[str, Any],
    *,
    scalars: Mapping[str, float] | None = None,
    device: SmallDevice | None = None,
    order: BlockOrder = "forward",
    uses: TileUses | None = None,
    arithmetic: Arithmetic = "rounded",
) -> dict[str, Any]:
    """Every output of a kernel with one schedule, run on the CPU.

    Args:
        kernel: what is run.
        p: what is computed; the arrays must have its shapes.
        s: one value for each knob.
        inputs: NumPy arrays, or lists of them, by name, of any strides; bfloat16 and 8-bit floats are ml_dtypes'. Arrays that
            are changed in place are copied first.
        scalars: run-time numbers other than the declared ones.
        device: what the grid is made for.
        order: in which blocks run.
        uses: notes the tiles taken, if given.
        arithmetic: how numbers are computed; see `Arithmetic`.

    Returns:
        Outputs and changed arrays by name; NaN where the kernel wrote nothing.

    Raises:
        ProblemError: arrays that are not the problem's.
        InterpreterError: see :func:`run`; or the kernel left behind a workspace that it needs zeroed, and is not.
    """
    launches = steps(kernel, p, s, device or SmallDevice())
    specs = kernel.arrays(p)
    arrays: dict[str, Any] = {}
    for spec in specs:
        if spec.role == "out":
            made = [_unwritten(spec, shape) for shape in spec.shapes]
        else:
            given = inputs[spec.name] if spec.listed else [inputs[spec.name]]
            made = [_checked(spec, shape, array) for shape, array in zip(spec.shapes, given, strict=True)]
        arrays[spec.name] = made if spec.listed else made[0]
    extras = scratch(kernel, p, s, launches)
    arrays |= {spec.name: _unwritten(spec, spec.shape) for spec in extras}
    for step in launches:
        args = [
            arrays[each.name] if each.kind in ("array", "list") else (scalars or {}).get(each.name, each.value)
            for each in step.arguments
        ]
        args = [
            np.dtype(each.dtype).type(value) if each.kind == "scalar" else value
            for each, value in zip(step.arguments, args, strict=True)
        ]
        run(annotated(kernel, step, p, s), step.grid, args, order=order, uses=uses, arithmetic=arithmetic)
    for spec in extras:
        if spec.zeroed and np.any(arrays[spec.name]):
            left = np.count_nonzero(arrays[spec.name])
            raise InterpreterError(
                f"the kernel needs {spec.name} zeroed, but leaves {left} elements that are not: a second "
                "launch would go wrong"
            )
    return {spec.name: arrays[spec.name] for spec in specs if spec.role in ("out", "inout")}


def element_type(dtype: str) -> np.dtype[Any]:
    """NumPy's type for the elements of an array of this type in tile code, through ml_dtypes where NumPy has none."""
    dtype = tile_type(dtype)
    return np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype.rstrip("_"))


def _checked(spec: ArraySpec, shape: tuple[int, ...], array: Any) -> Any:
    if array.shape != shape or array.dtype != element_type(spec.dtype):
        raise ProblemError(f"{spec.name} must be {spec.dtype} of shape {shape}, got {array.dtype} {array.shape}")
    return array.copy("K") if spec.role == "inout" else array


def _unwritten(spec: ArraySpec, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A scratch array as a launch gets it: zeros where the kernel needs them, or else values that show a read before a write."""
    dtype = element_type(spec.dtype)
    swapped = spec.column and len(shape) > 1
    order = (*shape[:-2], shape[-1], shape[-2]) if swapped else shape
    made = np.zeros(order, dtype)
    if not spec.zeroed:
        poison(made.view(storage_type(spec.dtype)), spec.dtype)
    return made.swapaxes(-1, -2) if swapped else made


def _arguments(function: FunctionType, args: Sequence[Any], launch: InterpretedLaunch) -> list[Any]:
    """Kernel arguments as tile code sees them."""
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) != len(args):
        raise InterpreterError(f"{function.__name__} takes {len(parameters)} arguments {parameters}, got {len(args)}")
    notes = _annotations(function)
    return [_argument(name, value, notes.get(name, ()), launch) for name, value in zip(parameters, args, strict=True)]


def _annotations(function: FunctionType) -> dict[str, tuple[Any, ...]]:
    """What cuTile's annotations say of each parameter: the metadata of its `Annotated` hint."""
    try:
        hints = typing.get_type_hints(function, localns=closed_over(function), include_extras=True)
    except NameError as error:
        raise InterpreterError(f"{function.__name__}: annotation {error}; define it at module level") from error
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


def _argument(name: str, value: Any, notes: tuple[Any, ...], launch: InterpretedLaunch) -> Any:
    if isinstance(value, (list, tuple)):
        each = tuple(getattr(note, "element", note) for note in notes)
        return type(value)(_argument(f"{name}[{i}]", item, each, launch) for i, item in enumerate(value))
    if isinstance(value, np.ndarray):
        array = next((note for note in notes if isinstance(note, ct.ArrayAnnotation)), ct.ArrayAnnotation())
        static = tuple(axis % value.ndim for axis in array.static_shape_dims)
        return Array(
            name, value, np.zeros(value.shape, np.int32), launch, index_dtype=array.index_dtype, static_dims=static
        )
    if any(isinstance(note, ct.ConstantAnnotation) for note in notes):
        return value
    if isinstance(value, np.generic):
        return Tile(value, TILE_TYPE[value.dtype])
    if isinstance(value, bool):
        return Tile(value, ct.bool_)
    if isinstance(value, int):
        dtype = next((note.dtype for note in notes if hasattr(note, "dtype")), ct.int32)
        if not in_range(value, dtype):
            raise InterpreterError(f"{name} = {value} does not fit {dtype}; annotate it ct.ScalarInt64[int]")
        return Tile(value, dtype)
    if isinstance(value, float):
        return Tile(value, ct.float32)
    raise InterpreterError(
        f"{name}: expected a NumPy array or a number, got {type(value).__name__}; pass torch tensors as tensor.numpy()"
    )
