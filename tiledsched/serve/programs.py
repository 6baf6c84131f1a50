"""Programs on disk: the machine code of launches that were compiled on this machine, found again by every later process.

A file is named by a hash of everything that machine code depends on, so that it never has to be replaced: the kernel's source,
the function and the constants it captures, the hints, what the launch tells of its arguments, the GPU's arch, the host's
architecture, and the compiler's version. What is damaged is compiled again and never runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from tiledsched.build.artifacts import default_cache_folder
from tiledsched.build.host_code import carried, check_host, host_arch, host_folder
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.canonical import canonical_json
from tiledsched.core.config import Settings
from tiledsched.core.errors import CompilerError
from tiledsched.core.extras import package_version
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.serve.sealed import discard, read_sealed, write_sealed

PLAIN = ("bool", "int", "float", "str", "bytes", "tuple", "NoneType", "DType", "module")
"""Names of the types whose values are what they are printed as; DType is cuTile's."""


@dataclass(frozen=True, kw_only=True)
class StoredProgram:
    """The machine code of one launch, or why the compiler makes none."""

    cubin: bytes = b""
    """The machine code, as an artifact keeps it; empty where the compiler refused."""
    symbol: str = ""
    """The name of its function."""
    error: str = ""
    """What the compiler said where it refused. It says so each time, which makes it worth keeping."""


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """A program to compile: everything that another process needs, small enough to send to it."""

    path: Path
    """The file that keeps the program."""
    kernel: str
    """Where the kernel is declared; see :func:`tiledsched.core.registry.load_kernel`."""
    schedule: Schedule
    """The schedule."""
    problem: Problem
    """A problem whose launches are compiled by the same function."""
    wide: bool
    """Whether the problem is served by functions with 64-bit indices, which its values do not say."""
    place: int
    """The number of the launch among the launches of the schedule."""
    parameters: tuple[Any, ...]
    """What the launch tells of its arguments, with the assumptions that it is compiled on."""
    arch: str
    """The GPU's arch."""
    timeout_s: float
    """Seconds after which the compiler is ended."""


def programs_folder(settings: Settings, arch: str) -> Path:
    """The folder of programs for an arch, launched by hosts like this one."""
    return host_folder(default_cache_folder(settings.cache) / "programs", host_arch()) / arch


def compiler_version() -> str:
    """The versions that decide what machine code comes out; empty where there is no compiler. No process is started where the
    compiler was installed with pip."""
    tileiras = compiler_at_hand()
    return f"cuda-tile {package_version('cuda-tile')}, tileiras {tileiras}" if tileiras else ""


def program_key(source: str, captured: Any, hints: Mapping[str, Any], signature: Any, arch: str) -> str:
    """The name of a program's file: a hash of everything that its machine code depends on. Empty where no file can hold it.

    Args:
        source: hash of the kernel's source.
        captured: what :func:`captured_values` found.
        hints: the hints of the compilation, by name.
        signature: of the launch, with the assumptions that it is compiled on.
        arch: the GPU's.
    """
    compiler = compiler_version()
    if captured is None or not compiler:
        return ""
    parts = [source, captured, sorted(hints.items()), str(signature.parameters), signature.calling_convention.code]
    return hashlib.sha256(canonical_json([*parts, arch, host_arch(), compiler]).encode()).hexdigest()[:40]


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


def read_program(path: Path) -> StoredProgram | None:
    """The program in a file; None where there is none, or the file is damaged (then it is removed)."""
    found = read_sealed(path)
    if found is None:
        return None
    told, cubin = found
    try:
        if cubin:
            check_host(carried(cubin)[0])
        return StoredProgram(cubin=cubin, symbol=told["symbol"], error=told["error"])
    except (KeyError, CompilerError) as error:
        discard(path, str(error))
        return None


def write_program(path: Path, program: StoredProgram) -> None:
    """Keep a program. Where the folder cannot be written to, it is compiled again."""
    write_sealed(path, {"symbol": program.symbol, "error": program.error}, program.cubin)


@contextlib.contextmanager
def only_builder(path: Path) -> Iterator[None]:
    """Wait until no other process compiles the program of a file, and keep others waiting within the block. Where the folder
    cannot be locked, nobody waits."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.parent / "lock", "ab"))  # closed by the stack
            # A byte for each program. The system gives the lock up when this process ends, however it ends.
            fcntl.lockf(lock, fcntl.LOCK_EX, 1, int(path.name[:7], 16), os.SEEK_SET)
        yield
