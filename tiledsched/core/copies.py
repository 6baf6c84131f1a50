"""Copies of an author's tile code in which names stand for other things."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class Copier:
    """Makes copies of functions, and of the functions that they name: by themselves, in tuples, or in frozen dataclasses with a
    `__call__`. Functions reached through a module or another object (`helpers.step`) stay as they are.
    """

    names: Mapping[str, Any]
    """Globals of every copy, in addition to those that the function reads."""
    done: dict[int, Any]
    """Identity of a value -> what takes its place in copies. Copies of functions are added."""
    code_of: Callable[[FunctionType], CodeType] = operator.attrgetter("__code__")
    """The code of a function's copy."""

    def copy(self, value: Any) -> Any:
        """A copy of a value that tile code names; a value without functions as it is."""
        if id(value) in self.done:
            return self.done[id(value)]
        if type(value) is tuple:
            return tuple(map(self.copy, value))
        if isinstance(value, FunctionType):
            function = getattr(value, "__wrapped__", value) if _is_tile_function(value) else value
            return value if (function.__module__ or "").startswith("cuda.tile") else self._copy(function)
        if not dataclasses.is_dataclass(value) or not callable(value) or isinstance(value, type):
            return value
        fields = {each.name: self.copy(getattr(value, each.name)) for each in dataclasses.fields(value) if each.init}
        methods = {
            name: self.copy(method)
            for each in reversed(type(value).__mro__)
            for name, method in vars(each).items()
            if name[:2] != "__" or name == "__call__"
        }
        methods["__dataclass_params__"] = type(value).__dataclass_params__  # cuTile looks for it in the class itself
        return type(type(value).__name__, (type(value),), methods)(**fields)

    def _copy(self, function: FunctionType) -> Any:
        if id(function) in self.done:
            return self.done[id(function)]
        names = {**self.names, "__name__": function.__module__}
        code, cells = self.code_of(function), {name: CellType() for name in function.__code__.co_freevars}
        closure = tuple([cells[name] for name in code.co_freevars])
        copy = FunctionType(code, names, function.__name__, function.__defaults__, closure)
        copy.__kwdefaults__ = function.__kwdefaults__
        self.done[id(function)] = copy
        for name in function.__globals__.keys() & names_in(code):
            names[name] = self.copy(function.__globals__[name])
        for name, value in closed_over(function).items():
            cells[name].cell_contents = self.copy(value)
        return copy


def closed_over(function: FunctionType) -> dict[str, Any]:
    """The values that a function took from the functions around it, by name; without those that are not bound yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The codes of the functions that are written within a piece of code, at any depth."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from codes_in(each)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """The names that code reads as globals or as attributes, functions inside it included."""
    return tuple(name for each in (code, *codes_in(code)) for name in each.co_names)


def _is_tile_function(function: FunctionType) -> bool:
    """Whether `function` is the wrapper that @ct.function puts around a user's function."""
    return hasattr(function, "__wrapped__") and function.__globals__.get("__name__", "").startswith("cuda.tile.")
