"""Kernels found by name, and the problems of stored or sent data, which name their kernel.

A kernel is one that this process declared, one that ships, one of an installed package, or one in a file.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import ConfigError, DeclarationError, ProblemError
from tiledsched.core.fields import Value
from tiledsched.core.files import real_path
from tiledsched.core.problem import FILE_PREFIX, Declaration, KernelClass, Problem, unknown_kernel

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "tiledsched.kernels"
"""The entry-point group under which a package ships kernels: a name, and `module:Class`."""
SHIPPED = {
    "attention": "tiledsched.kernels.attention:Attention",
    "matmul": "tiledsched.kernels.matmul:Matmul",
    "rms_norm": "tiledsched.kernels.rms_norm:RmsNorm",
    "softmax": "tiledsched.kernels.softmax:Softmax",
    "layer_norm": "tiledsched.kernels.layer_norm:LayerNorm",
    "glu": "tiledsched.kernels.glu:Glu",
    "rope": "tiledsched.kernels.rope:Rope",
    "rope_in_place": "tiledsched.kernels.rope:RopeInPlace",
    "cross_entropy": "tiledsched.kernels.cross_entropy:CrossEntropy",
}
"""The kernels that ship: name -> where each is declared."""
ALLOWED_VARIABLE = "TILEDSCHED_FLEET_JOBS"
"""Modules and files, with commas between them, whose code a database may name."""
_known: dict[str, KernelClass] = {}
_allowed: set[str] = set()


def register(kernel: KernelClass) -> None:
    """Make a kernel known by its name; a kernel declared again takes the place of the former one."""
    _known[kernel.name] = kernel


def known_kernels() -> list[KernelClass]:
    """Every kernel that this process has declared or loaded."""
    return list(_known.values())


def kernel_named(name: str) -> KernelClass:
    """The kernel of this name: one that this process declared, one that ships, or one of an installed package.

    Raises:
        ConfigError: there is no such kernel.
    """
    if name not in _known:
        where = SHIPPED.get(name) or _installed(name)
        if where is None:
            raise unknown_kernel(name)
        _known.setdefault(name, load_kernel(where))
    return _known[name]


def _installed(name: str) -> str | None:
    """Where an installed package declares the kernel of this name."""
    return next((each.value for each in installed_entry_points() if name in (each.name, each.value)), None)


@functools.cache
def installed_entry_points() -> tuple[EntryPoint, ...]:
    """The kernels that installed packages ship. Searched once in a process, because every problem of an unknown kernel asks."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def load_kernel(where: str) -> KernelClass:
    """The kernel at `package.module:Class` or `path/file.py:Class`, or the kernel of that name.

    Raises:
        ConfigError: there is no such file, module, class or name.
        DeclarationError: the declaration is wrong.
    """
    place, colon, class_name = where.rpartition(":")
    if not colon:
        return kernel_named(where)
    path = Path(place if place.endswith(".py") else f"{place}.py")
    module = _load_file(path) if place.endswith(".py") or os.path.isfile(path) else _load_module(place)
    found = getattr(module, class_name, None)
    if not _is_kernel(found):
        made = [name for name, each in vars(module).items() if _is_kernel(each)]
        raise ConfigError(f"{place} declares no kernel {class_name!r}; it declares {', '.join(made) or 'none'}")
    return found


def allow(*places: str) -> None:
    """Let data name this code (`module:name` or `path/file.py:name`) in this process: the user named it."""
    _allowed.update(places)


def allowed_places() -> tuple[str, ...]:
    """The code that the user named in this process, and the kernels that it has loaded, for processes that it starts."""
    return tuple(sorted(_allowed | {where for kernel in known_kernels() if (where := _place(kernel))}))


def check_allowed(place: str, what: str) -> None:
    """Make sure that the user allowed the code that data names: whoever can write to a database must not choose what runs.

    Args:
        place: `module:name` or `path/file.py:name`, as the data has it.
        what: what names it, for the message.

    Raises:
        ConfigError: the user did not allow it. The message says how to.
    """
    module, _, name = place.rpartition(":")
    words = [word.strip() for word in os.environ.get(ALLOWED_VARIABLE, "").split(",")]
    files = {real_path(word) for word in words if word.endswith(".py")}
    listed = module in words or (module.endswith(".py") and real_path(module) in files)
    if not (module and name.isidentifier() and (place in _allowed or listed)):
        raise ConfigError(
            f"{what} names {place!r}, which neither ships nor is registered by an installed package, and data does not choose "
            f"what code runs; if you trust that code, run this with {ALLOWED_VARIABLE}={module or place}"
        )


def kernel_of_data(where: str, what: str) -> KernelClass:
    """The kernel that data names: one that ships, one that an installed package registers, or one that the user allowed.

    Args:
        where: a name, or what `locator()` returned; see :func:`load_kernel`.
        what: what names it, for the message.

    Raises:
        ConfigError: there is no such kernel, or the user did not allow it.
        DeclarationError: the declaration is wrong.
    """
    if ":" not in where:
        return kernel_named(where)
    for kernel in known_kernels():
        if where == _place(kernel):
            return kernel
    for place in (*SHIPPED.values(), *(each.value for each in installed_entry_points())):
        with contextlib.suppress(ConfigError, DeclarationError):
            if where in (place, _place(kernel := load_kernel(place))):
                return kernel
    check_allowed(where, what)
    return load_kernel(where)


def _is_kernel(value: object) -> TypeGuard[KernelClass]:
    """Whether a value is the class of a kernel; the classes that authors subclass have no name."""
    return isinstance(value, type) and issubclass(value, Declaration) and bool(value.name)


def _load_module(name: str) -> Any:
    try:
        return import_kernel_module(lambda: importlib.import_module(name))
    except ImportError as error:
        raise ConfigError(
            f"cannot import {name}: {error}; install it, or name the file (path/file.py:Class)"
        ) from error


def _load_file(path: Path) -> Any:
    path = Path(real_path(path))
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) and real_path(str(main.__file__)) == str(path):  # type: ignore[union-attr]
        return main
    name = FILE_PREFIX + re.sub(r"\W", "_", path.stem) + "_" + stable_id(str(path), 8)
    if name in sys.modules:
        return sys.modules[name]
    if not os.path.isfile(path):
        raise ConfigError(f"there is no file {path}; name it as path/file.py:Class")

    def run() -> Any:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    try:
        return import_kernel_module(run)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"cannot import {path}: {error}; correct the file") from error


def import_kernel_module(run: Callable[[], Any]) -> Any:
    """The result of `run()`, which imports a module.

    Processes that compile or measure keep torch from being imported, which takes seconds; a module that needs torch gets it.
    """
    try:
        return run()
    except ImportError:
        if "torch" not in sys.modules or sys.modules["torch"] is not None:
            raise
        del sys.modules["torch"]
        return run()


def module_word(kernel: type) -> str:
    """The module of a class by the name that people know: the stem of the file, for a module loaded from a file."""
    module = kernel.__module__
    path = getattr(sys.modules.get(module), "__file__", None)
    return Path(path).stem if path and (module == "__main__" or module.startswith(FILE_PREFIX)) else module


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    """The problem that :meth:`Problem.to_json` wrote. For a kernel that this process does not know, values are taken as they are.

    Raises:
        ProblemError: a key is missing, unknown or has a wrong value.
    """
    values = dict(data)
    name = values.pop("kernel", None)
    if not isinstance(name, str):
        raise ProblemError(f'a problem needs the name of its kernel, got {data!r}; add "kernel"')
    try:
        kernel = kernel_named(name)
    except ConfigError:
        plain = {field: tuple(value) if isinstance(value, list) else value for field, value in sorted(values.items())}
        return Problem(name, plain)
    return kernel.problem(**values)


# Problems are sent to other processes by value. Their kernel is sent as its name and the place where it is declared.


def _reduced(problem: Problem) -> tuple[Any, ...]:
    where = _place(problem.declaration) if problem.known else ""
    return _restored, (problem.kernel, where, problem.values, problem.omitted)


def _find_place(kernel: KernelClass) -> str:
    try:
        return kernel.locator()
    except DeclarationError:
        return ""


_place = cast("Callable[[KernelClass], str]", functools.cache(_find_place))
"""Where another process finds a kernel; empty where no other process can."""


def _restored(name: str, where: str, values: Mapping[str, Value], omitted: frozenset[str]) -> Problem:
    """The problem that another process sent, of the kernel declared there, which is loaded where this process can load it.

    Another kernel that this process knows by the same name, from another file, is not taken for it.
    """
    known = _known.get(name)
    if known is not None and where in ("", _place(known)):
        return Problem(known, values, omitted=omitted)
    for find, place in ((load_kernel, where or name), (kernel_named, name)):
        with contextlib.suppress(ConfigError, DeclarationError):
            return Problem(find(place), values, omitted=omitted)
    return Problem(name, values, omitted=omitted)


copyreg.pickle(Problem, _reduced)
