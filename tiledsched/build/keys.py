"""Names of the files in a store of programs: hashes of all that their contents depend on, so that no file is ever replaced."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from tiledsched.build.compiler import BuildTask
from tiledsched.build.host_code import host_arch
from tiledsched.build.toolchain import compiler_at_hand, installed_toolchain
from tiledsched.core.canonical import stable_id
from tiledsched.core.device import arch_spec
from tiledsched.core.extras import package_version
from tiledsched.core.registry import load_kernel

KEY_DIGITS = 40
PLAIN = ("bool", "int", "float", "str", "bytes", "tuple", "NoneType", "DType", "module")
"""Names of the types whose values are what they are printed as; DType is cuTile's."""


@functools.lru_cache(maxsize=4096)
def build_key(task: BuildTask) -> str:
    """The key of what became of a build: of toolchain, hosts, arch, the kernel's source, schedule and class of problems."""
    from tiledsched.core.launches import problem_class  # imports cuTile, before which compile processes are prepared

    kernel = load_kernel(task.kernel)
    known = problem_class(kernel, task.problem, task.schedule, arch_spec(task.arch))
    toolchain = installed_toolchain().id
    return stable_id(
        [toolchain, task.host_arch, task.arch, kernel.source_hash(), task.schedule.id, known.id], KEY_DIGITS
    )


def program_key(source: str, captured: Any, hints: Mapping[str, Any], signature: Any, arch: str) -> str:
    """The key of the program of one launch; empty where no file can hold it.

    Args:
        source: hash of the kernel's source.
        captured: what :func:`captured_values` found.
        hints: the hints of the compilation, by name.
        signature: of the launch, with the assumptions that it is compiled on.
        arch: the GPU's.
    """
    tileiras = compiler_at_hand()  # starts no process where the compiler was installed with pip
    if captured is None or not tileiras:
        return ""
    parts = [source, captured, sorted(hints.items()), str(signature.parameters), signature.calling_convention.code]
    versions = f"cuda-tile {package_version('cuda-tile')}, tileiras {tileiras}"
    return stable_id([*parts, arch, host_arch(), versions], KEY_DIGITS)


@functools.lru_cache(maxsize=1024)
def captured_values(function: FunctionType) -> list[Any] | None:
    """What a tile function takes from around it, which its source alone does not tell: the plain values of the globals and of the
    enclosing functions that it, and the functions it calls, read. None where it captures something else.
    """
    found: list[Any] = []
    seen: set[int] = set()

    def visit(each: FunctionType) -> bool:
        if id(each) in seen:
            return True
        seen.add(id(each))
        code = each.__code__
        found.append([each.__qualname__, code.co_firstlineno])
        cells = {}
        for name, cell in zip(code.co_freevars, each.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not filled yet
                cells[name] = cell.cell_contents
        for name, value in cells.items():
            inner = inspect.unwrap(value) if callable(value) else value
            if type(inner).__name__ in PLAIN:
                found.append([name, repr(inner)])
            elif not (isinstance(inner, FunctionType) and visit(inner)):
                return False
        for name in _names(code):
            value = each.__globals__.get(name)
            inner = inspect.unwrap(value) if isinstance(value, FunctionType) else value
            if type(inner).__name__ in PLAIN[:-1] and name in each.__globals__:
                found.append([name, repr(inner)])
            elif isinstance(inner, FunctionType) and not visit(inner):
                return False
        return True

    return found if visit(function) else None


def _names(code: Any) -> list[str]:
    """The names that a function's code, and the functions inside it, may read from its module."""
    inner = [each for each in code.co_consts if inspect.iscode(each)]
    return [*code.co_names, *(name for each in inner for name in _names(each))]
