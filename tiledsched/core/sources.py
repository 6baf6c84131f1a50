"""Which source files a kernel's machine code comes from, and their hash."""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
