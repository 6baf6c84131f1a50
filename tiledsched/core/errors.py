"""One root exception, and the kinds of failure a candidate schedule can have.

An exception is for the person at the keyboard: its message says what was wrong and ends with what to do next. A
:class:`Failure` is data: a candidate that did not compile, launch or compute correctly becomes a row, never a crash.
Here is also what an error of an author's code says: the line it comes from, and the name that was meant by a misspelt one.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FrameType
from typing import Any, TypeVar

from tiledsched.core.modules import is_library

T = TypeVar("T")


class TiledschedError(Exception):
    """Root of every error this package raises on purpose."""

    exit_code = 2


class DeclarationError(TiledschedError, ValueError):
    """A kernel's declaration that is wrong; the message names the field and what is allowed."""


class ProblemError(TiledschedError, ValueError):
    """A problem its kernel cannot have (a negative length, an unknown dtype, ...)."""


class SpaceError(TiledschedError, ValueError):
    """A search-space file or a schedule that does not fit its space."""


class UnknownKnobError(KeyError):
    """A schedule was asked for a knob that it does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(TiledschedError, ValueError):
    """A wrong flag, environment variable or configuration file."""


class CompilerError(TiledschedError, RuntimeError):
    """The cuTile compiler is missing, mismatched or too old for the arch."""


class NoRoomError(CompilerError):
    """The disk that compilers write to was full. The message names the folder. The candidate itself did not fail."""


class MissingPackageError(TiledschedError, ImportError):
    """A package that is needed is not installed, or cannot be imported. The message ends with the command that installs it."""


class FileFormatError(TiledschedError, RuntimeError):
    """A file is compressed and should not be, or is not text in UTF-8. The message says what to do about it."""


class DatabaseError(TiledschedError, RuntimeError):
    """The tuning database cannot be opened, is newer than this program, or is damaged."""


class MeasureError(TiledschedError, RuntimeError):
    """Measuring cannot start or go on (no GPU of the arch, driver too old, worker cannot start)."""


class UnsupportedError(TiledschedError, ValueError):
    """The kernel of `sdpa` cannot serve the inputs, and the settings forbid to fall back on torch."""


class LaunchError(TiledschedError, RuntimeError):
    """A launch of `sdpa` failed, or cannot be made now; the message names the call."""


class RivalError(LaunchError):
    """A rival that was to be served refused its first call; our own kernel is served instead."""


class NoValidScheduleError(TiledschedError, RuntimeError):
    """Every candidate failed, or a space holds no valid schedule for a problem."""

    exit_code = 1


class FailureKind(str, Enum):
    """Why a candidate produced no usable measurement."""

    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    COMPILER_KILLED = "compiler_killed"
    ARTIFACT_CORRUPT = "artifact_corrupt"
    LAUNCH_FAILURE = "launch_failure"
    ILLEGAL_ADDRESS = "illegal_address"
    HANG = "hang"
    OUT_OF_MEMORY = "out_of_memory"
    WORKER_KILLED = "worker_killed"
    GPU_LOST = "gpu_lost"
    DRIVER_MISMATCH = "driver_mismatch"
    WRONG_RESULT = "wrong_result"
    OTHER_NUMBERS = "other_numbers"
    """Right, and not bit for bit what was wanted: it says nothing against the program where any right numbers will do."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A candidate's failure, as stored."""

    kind: FailureKind
    """What went wrong, from a closed list."""
    message: str
    """One line for people: the compiler's or the driver's own words where there are any."""


def or_none(function: Callable[..., T], *arguments: object) -> T | None:
    """The function's value, or None where it raises: where a GPU does not tell, or a function of a kernel's author fails that is
    given a schedule of an older search space."""
    try:
        return function(*arguments)
    except Exception:
        return None


CUTOFF, NAMED = 0.6, 0.75
"""Least likeness, from 0 to 1, of a name that is suggested: of few names, and of all that Python code may use."""
LONGEST = 500
"""Most characters of what is kept of an error's message."""
IMPORTS = {"ct": "import cuda.tile as ct", "ts": "import tiledsched as ts"}
"""Names that are missing where a file lacks an import."""
SHORT_TYPES = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "double": "float64",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "int": "int32",
    "bool": "bool_",
}
"""Other names of element types -> cuTile's."""


def nearest(word: object, known: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The name among `known` that `word` most likely stands for, whatever its case; None where none is near."""
    wanted = str(word).casefold()
    names = {name.casefold(): name for name in known}
    if (usual := SHORT_TYPES.get(wanted, wanted)) in names:
        return names[usual]
    found = difflib.get_close_matches(wanted, names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def did_you_mean(word: object, known: Iterable[str], cutoff: float = CUTOFF) -> str:
    """` (did you mean 'columns'?)`, which stands behind a misspelt name; nothing where no known name is near."""
    found = nearest(word, known, cutoff)
    return f" (did you mean {found!r}?)" if found else ""


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message, at most :data:`LONGEST` characters."""
    words = error.msg if isinstance(error, SyntaxError) else str(error)
    words = next((line.strip() for line in words.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {words or 'no message'}"[:LONGEST]


def describe(error: BaseException) -> str:
    """An exception of an author's code in one line: its kind, its message, what was meant, and the line it comes from."""
    place = author_line(error)
    return f"{first_line(error)}{_meant(error)}{f' ({place})' if place else ''}"


def _meant(error: BaseException) -> str:
    """Which name was meant where Python, or a function that declares a field, did not know one."""
    name = str(getattr(error, "name", None) or "")
    frame = next((frame for frame, _ in reversed(list(_author_frames(error)))), None)
    if "did you mean" in str(error):
        return ""
    if isinstance(error, AttributeError) and name and error.obj is not None:
        names = getattr(error.obj, "__all__", None) or [each for each in dir(error.obj) if not each.startswith("_")]
        return did_you_mean(name, names, NAMED)
    if isinstance(error, NameError) and name and frame is not None:
        if name in IMPORTS:
            return f" (the file lacks: {IMPORTS[name]})"
        known = {**frame.f_globals, **frame.f_locals}
        return (
            " (did you mean 'xp'?)" if name in ("np", "numpy") and "xp" in known else did_you_mean(name, known, NAMED)
        )
    found = re.match(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'", str(error))
    function = getattr(sys.modules.get("tiledsched"), found[1], None) if found else None
    return did_you_mean(found[2], inspect.signature(function).parameters) if found and callable(function) else ""


def mistake_of(error: BaseException) -> str:
    """An exception that a user's own function raised, in one line; empty where this package raised it."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in _author_frames(error)]
    return describe(error) if names and not names[-1].startswith("tiledsched.") else ""


def author_line(error: BaseException) -> str:
    """`softmax.py, line 8`: the innermost line of the author's own code that led to an exception; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return line_text(error.filename, error.lineno)
    where = getattr(error, "loc", None)  # cuTile's errors, which no frame of the author's leads to
    while where is not None and not getattr(where, "filename", None):
        where = getattr(where, "call_site", None)
    if where is not None:
        return line_text(where.filename, where.line)
    lines = list(_author_frames(error))
    own = [each for each in lines if not str(each[0].f_globals.get("__name__")).startswith("tiledsched.")] or lines
    return line_text(own[-1][0].f_code.co_filename, own[-1][1]) if own else ""


def says_line(message: str) -> bool:
    """Whether a message ends with a line of the author's code, as :func:`describe` writes it."""
    return bool(re.search(r", line \d+\)$", message))


def author_function(error: BaseException, names: Iterable[str]) -> str | None:
    """The innermost of the functions of these names that led to an exception."""
    called = [frame.f_code.co_name for frame, _ in _author_frames(error)]
    return next((name for name in reversed(called) if name in names), None)


def line_text(path: str, line: int | None) -> str:
    """`softmax.py, line 8`."""
    return f"{os.path.basename(path)}{f', line {line}' if line else ''}"


def function_line(function: Any) -> str:
    """`softmax.py, line 6`: where a function is written."""
    code: CodeType = function.__code__
    return line_text(code.co_filename, code.co_firstlineno)


def class_line(kernel: type, attribute: str = "") -> str:
    """`softmax.py, line 22`: where the body of a class that is being made sets an attribute, or where the class begins; empty for
    a class that is written in no file."""
    path = getattr(sys.modules.get(kernel.__module__), "__file__", None)
    try:
        with tokenize.open(str(path)) as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return ""
    made = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kernel.__name__]
    lines = [node.lineno for node in (made[-1].body if made else ()) if attribute in _names_set(node)]
    return line_text(str(path), lines[-1] if lines else made[-1].lineno) if made else ""


def _names_set(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]


def _author_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Each frame of the author's code that led to an exception, the outermost first, and the line where it was."""
    step = error.__traceback__
    while step is not None:
        if step.tb_lineno and not is_library(str(step.tb_frame.f_globals.get("__name__", ""))):
            yield step.tb_frame, step.tb_lineno
        step = step.tb_next
