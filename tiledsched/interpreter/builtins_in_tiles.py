"""Python's builtins, and cuTile's types, as tile code means them.

In tile code `min` and `max` of two tiles are elementwise, `range` over run-time bounds counts in run-time scalars, and
a type is called to make a scalar (`ct.float16(0.5)`). Python's own would compare whole tiles, so the kernel and the
functions it calls run as copies that differ only in what these names stand for.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cuda.tile as ct

from tiledsched.core.copies import Copier
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


def with_tile_builtins(value: Any) -> Any:
    """A copy of a function, and of the functions it names, that sees cuTile's builtins; see `tiledsched.core.sources`."""
    own = {name: TypeInTiles(each) if isinstance(each, ct.DType) else each for name, each in vars(ct).items()}
    namespace = ModuleType(ct.__name__)
    vars(namespace).update(own)
    types = {id(each): own[name] for name, each in vars(ct).items() if isinstance(each, ct.DType)}
    return Copier({"__builtins__": BUILTINS}, {id(ct): namespace, **types}).copy(value)
