"""Python's builtins, and cuTile's types, as tile code means them.

In tile code `min` and `max` of two tiles are elementwise, `range` over run-time bounds counts in run-time scalars, and
a type is called to make a scalar (`ct.float16(0.5)`). Python's own would compare whole tiles, so the kernel and the
functions it calls run as copies that differ only in what these names stand for.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cuda.tile as ct

from tiledsched.interpreter.shapes import TypeInTiles
from tiledsched.interpreter.values import Tile, promote


def tile_min(*values: Any, **options: Any) -> Any:
    """`min`, elementwise where a tile is among the values."""
    tiles = any(isinstance(value, Tile) for value in values)
    return functools.reduce(ct.minimum, values) if tiles else builtins.min(*values, **options)


def tile_max(*values: Any, **options: Any) -> Any:
    """`max`, elementwise where a tile is among the values."""
    tiles = any(isinstance(value, Tile) for value in values)
    return functools.reduce(ct.maximum, values) if tiles else builtins.max(*values, **options)


def tile_range(*bounds: Any) -> Any:
    """`range`; over run-time bounds it yields run-time scalars of their common type."""
    if not any(isinstance(bound, Tile) for bound in bounds):
        return builtins.range(*bounds)
    dtype = functools.reduce(lambda first, second: Tile(0, promote(first, second)), bounds).dtype
    return _count(builtins.range(*(int(bound.__index__()) for bound in bounds)), dtype)


def _count(numbers: range, dtype: Any) -> Iterator[Tile]:
    for number in numbers:
        yield Tile(number, dtype)


BUILTINS = {**vars(builtins), "min": tile_min, "max": tile_max, "range": tile_range}


def with_tile_builtins(function: FunctionType, done: dict[Any, Any] | None = None) -> Any:
    """A copy of `function`, and of the functions it names, that sees cuTile's builtins.

    So do those in tuples, and frozen dataclasses with a `__call__` and what their fields hold. Functions reached through a
    module or another object (`helpers.step`) keep Python's builtins.
    """
    done = {} if done is None else done
    function = getattr(function, "__wrapped__", function) if _is_tile_function(function) else function
    if function in done:
        return done[function]
    names: dict[str, Any] = {"__builtins__": BUILTINS, "__name__": function.__module__}
    cells = [CellType() for _ in function.__closure__ or ()]
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, tuple(cells))
    copy.__kwdefaults__ = function.__kwdefaults__
    done[function] = copy
    for name in _names(function.__code__):
        if name in function.__globals__:
            names[name] = copied(function.__globals__[name], done)
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = copied(original.cell_contents, done)
        except ValueError:  # a name that is not bound yet
            continue
    return copy


def copied(value: Any, done: dict[Any, Any]) -> Any:
    """A copy of a value that tile code names, as :func:`with_tile_builtins` makes it of functions; other values as they are.

    Args:
        value: anything.
        done: the copies made so far; more are added.
    """
    if type(value) is tuple:
        return tuple(copied(each, done) for each in value)
    if dataclasses.is_dataclass(value) and callable(value) and not isinstance(value, type):
        fields = {each.name: copied(getattr(value, each.name), done) for each in dataclasses.fields(value) if each.init}
        methods = {
            name: copied(method, done)
            for each in reversed(type(value).__mro__)
            for name, method in vars(each).items()
            if name[:2] != "__" or name == "__call__"
        }
        return type(type(value).__name__, (type(value),), methods)(**fields)
    if value is ct:
        if ct not in done:
            done[ct] = _namespace()
        return done[ct]
    if isinstance(value, ct.DType):
        return TypeInTiles(value)
    if not isinstance(value, FunctionType) or (value.__module__ or "").startswith("cuda.tile"):
        return value
    return with_tile_builtins(value, done)


def _namespace() -> ModuleType:
    """The module `cuda.tile` with types that can be called."""
    module = ModuleType(ct.__name__)
    vars(module).update(
        {name: TypeInTiles(value) if isinstance(value, ct.DType) else value for name, value in vars(ct).items()}
    )
    return module


def _is_tile_function(function: FunctionType) -> bool:
    """Whether `function` is the wrapper that @ct.function puts around a user's function."""
    return hasattr(function, "__wrapped__") and function.__globals__.get("__name__", "").startswith("cuda.tile.")


def _names(code: CodeType) -> set[str]:
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, nested))
