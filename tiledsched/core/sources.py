"""Which source files a kernel's machine code comes from, and their hash; and copies of an author's tile code in which names stand
for other things.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import linecache
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from tiledsched.core.files import plain_text, read_bounded
from tiledsched.core.modules import SHIPPED_KERNELS, is_library

DIGITS = 12
"""Hex digits of a hash."""
FRONT = "front"
"""The module in the folder of a kernel that ships which has its torch-shaped functions. It is no source of machine code."""


def source_hash(kernel: type) -> str:
    """Hash of the source that a kernel's machine code comes from.

    The source is that of the module that declares the kernel, of the modules it takes functions from, and of what these use of
    their own packages. Builds from other source are made again; measurements stand while the machine code is the same.
    """
    return _hash_of(tuple((path, os.stat(path).st_mtime_ns) for path in sorted(_files(kernel))))


@functools.lru_cache(maxsize=256)
def _hash_of(files: tuple[tuple[str, int], ...]) -> str:
    """Hash of the text of files, each with the time of its last change: a command that shows many entries asks for each."""
    text = "".join(plain_text(path, read_bounded(path)) for path, _ in files).replace("\r\n", "\n")
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def compiled(file: str, text: str, names: dict[str, Any], function: str) -> Callable[..., Any]:
    """A function of this package's text, which finds `names`; cuTile finds the text where Python keeps that of modules."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)
    return names[function]


def is_shipped(kernel: type) -> bool:
    """Whether a kernel ships with this package."""
    return kernel.__module__.startswith(SHIPPED_KERNELS)


def evidence_source(kernel: type, where: str) -> str:
    """What entries note of a kernel's source: its hash, and unless the kernel ships, a hash of where it is declared.

    The second tells an edited kernel from another one of the same name.
    """
    return kernel.source_hash() + hashlib.sha256(where.encode()).hexdigest()[:DIGITS]  # type: ignore[attr-defined]


def source_part(noted: str) -> str:
    """The hash of the source in what an entry notes of it."""
    return noted[:DIGITS] if len(noted) == 2 * DIGITS else noted


def place_part(noted: str) -> str:
    """The hash of where the kernel is declared in what an entry notes of its source; empty where it notes no place."""
    return noted[DIGITS:] if len(noted) == 2 * DIGITS else ""


def of_one_kernel(one: str, other: str) -> bool:
    """Whether two notes of :func:`evidence_source` may be of one kernel: of the same source, of the same place, or one names no
    place.
    """
    places = [place for noted in (one, other) if (place := place_part(noted))]
    return len(places) < 2 or places[0] == places[1] or source_part(one) == source_part(other)


BESIDE: dict[str, dict[str, ModuleType]] = {}
"""Folder -> the modules in it that files of kernels there import, by name. Two folders may each have a module `helpers`."""


def neighbour_module(folder: str, name: str) -> ModuleType | None:
    """The module that a file in a folder means by a name: one beside it, or else the one that this process has."""
    return BESIDE.get(folder, {}).get(name) or sys.modules.get(name)


@functools.cache
def _files(kernel: type) -> frozenset[str]:
    """The source files of a kernel, found through the names that its modules hold."""
    import cuda.tile as ct

    declared = sys.modules[kernel.__module__]
    left, found = [declared], {declared.__name__: str(declared.__file__)}
    if declared.__name__.startswith(SHIPPED_KERNELS):
        # A shipped kernel imports its tile code where it needs the code, so that all files of the folder count.
        files = Path(str(declared.__file__)).parent.glob("*.py")
        found |= {str(path): str(path) for path in files if path.stem != FRONT}
    folder = os.path.dirname(str(declared.__file__))
    while left:
        module = left.pop()
        own = os.path.dirname(str(module.__file__)) == folder and not is_shipped(kernel)
        for value in [*vars(module).values(), *(_imported(module, folder) if own else ())]:
            function = value._pyfunc if isinstance(value, ct.kernel) else value
            name = getattr(function, "__module__", None) or getattr(value, "__name__", "")
            other = (
                value
                if isinstance(value, ModuleType)
                else neighbour_module(folder, name if isinstance(name, str) else "")
            )
            path = getattr(other, "__file__", None)
            if other is None or other.__name__ in found or not path or not path.endswith(".py"):
                continue
            if is_library(other.__name__):
                continue
            beside = os.path.dirname(path) == folder
            if module is declared or beside or other.__name__.split(".")[0] == module.__name__.split(".")[0]:
                found[other.__name__] = path
                left.append(other)
    return frozenset(found.values())


def _imported(module: ModuleType, folder: str) -> list[ModuleType]:
    """The modules that a module imports as it is loaded: a number taken from one leaves no trace of where it came from."""
    try:
        tree = ast.parse(read_bounded(str(module.__file__)))
    except (OSError, ValueError, SyntaxError):
        return []
    names = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            before = (module.__package__ or "").split(".")[: -node.level + 1 or None] if node.level else []
            names.append(".".join([*before, *filter(None, [node.module])]))
    return [found for name in names if (found := neighbour_module(folder, name)) is not None]


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
