"""Kernels found by name, and the problems of stored or sent data, which name their kernel.

A kernel is one that this process declared, one that ships, one of an installed package, or one in a file.
"""

from __future__ import annotations

import ast
import contextlib
import copyreg
import functools
import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import (
    ConfigError,
    DeclarationError,
    ProblemError,
    TiledschedError,
    author_line,
    describe,
    did_you_mean,
    nearest,
    says_line,
)
from tiledsched.core.extras import remedy
from tiledsched.core.fields import Value
from tiledsched.core.files import MOST_TYPED, read_bounded, real_path
from tiledsched.core.modules import SHIPPED_KERNELS
from tiledsched.core.problem import FILE_PREFIX, Declaration, KernelClass, Problem, unknown_kernel
from tiledsched.core.sources import BESIDE, FRONT

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger(__name__)
ENTRY_POINTS = "tiledsched.kernels"
"""The entry-point group under which a package ships kernels: a name, and `module:Class`."""
FOLDER = Path(__file__).parents[1] / "kernels"
"""The folder of the kernels that ship. Each has a folder in it, by its name."""
SHIPPED = {
    name: f"{SHIPPED_KERNELS}{name}:{name.title().replace('_', '')}"
    for name in sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
}
"""The kernels that ship: name -> where each is declared. The class has the name of the folder: LayerNorm in `layer_norm`."""
ALLOWED_VARIABLE = "TILEDSCHED_FLEET_JOBS"
"""Modules and files, with commas between them, whose code a database may name."""
_known: dict[str, KernelClass] = {}
_allowed: set[str] = set()


@functools.cache
def shipped_functions() -> dict[str, str]:
    """The public functions of the kernels that ship: name -> the module that defines it, which is the `front` of its folder.

    The names are read from the source, because importing a front imports torch.
    """
    found: dict[str, str] = {}
    for path in FOLDER.glob(f"*/{FRONT}.py"):
        functions = (
            each for each in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(each, ast.FunctionDef)
        )
        names = (each.name for each in functions if not each.name.startswith("_"))
        found |= dict.fromkeys(names, f"{SHIPPED_KERNELS}{path.parent.name}.{FRONT}")
    return found


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
            known = {*SHIPPED, *_known, *(each.name for each in installed_entry_points())}
            raise unknown_kernel(name, did_you_mean(name, known))
        _known.setdefault(name, load_kernel(where))
    return _known[name]


def _installed(name: str) -> str | None:
    """Where an installed package declares the kernel of this name.

    Raises:
        ConfigError: several packages say so, and mean different kernels.
    """
    found = {each.value: each for each in installed_entry_points() if name in (each.name, each.value)}
    if len(found) > 1:
        places = ", ".join(f"{value} ({_package(each)})" for value, each in sorted(found.items()))
        raise ConfigError(
            f"installed packages register different kernels as {name!r}; name the one that you mean: {places}"
        )
    return next(iter(found), None)


def _package(entry_point: EntryPoint) -> str:
    """The installed package that an entry point is of."""
    return f"of {entry_point.dist.name}" if entry_point.dist else "of an unknown package"


def _warn_of_shadowed(name: str) -> None:
    """Say that a kernel that ships is meant where an installed package registers another one under its name."""
    for each in installed_entry_points():
        if each.name == name and each.value != SHIPPED.get(name):
            log.warning(
                "%s is the kernel that ships; the package %s registers another one under that name: name that one %s",
                *(name, _package(each).removeprefix("of "), each.value),
            )


@functools.cache
def installed_entry_points() -> tuple[EntryPoint, ...]:
    """The kernels that installed packages ship. Searched once in a process, because every problem of an unknown kernel asks."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def load_kernel(where: str | KernelClass) -> KernelClass:
    """The kernel at `package.module:Class` or `path/file.py:Class`, or the kernel of that name. A kernel's class is itself.

    Raises:
        ConfigError: there is no such file, module, class or name, or what is given is no kernel.
        DeclarationError: the declaration is wrong.
    """
    if not isinstance(where, str):
        if _is_kernel(where):
            return where
        raise ConfigError(
            f"{where!r:.80} is no kernel; give the class that declares it, without parentheses (class Name(ts.Kernel): function "
            "= ...), or its name"
        )
    place, colon, class_name = where.rpartition(":")
    place = place.removesuffix(":")  # as pytest has it
    if not colon:
        if where in SHIPPED:
            _warn_of_shadowed(where)
        try:
            return kernel_named(where)
        except ConfigError:
            _check_complete(where)
            raise
    path = Path(place if place.endswith(".py") else f"{place}.py")
    is_file = place.endswith(".py") or os.path.isfile(path)
    classes, others = declared_names(path) if is_file else ((), None)
    if others is not None and class_name not in (*classes, *others):
        if others:
            _check_function(place, path, class_name)
        meant = did_you_mean(class_name, (*classes, *others))
        there = ", ".join(classes) or ("no class" if meant else "none: a kernel is a subclass of ts.Kernel")
        raise ConfigError(
            f"{place} declares no kernel {class_name!r}; it declares {there}{meant}; the file is not run to look for more"
        )
    module = _load_file(path) if is_file else _load_module(place)
    found = getattr(module, class_name, None)
    if not _is_kernel(found):
        made = kernels_in(module)
        wrong = f"{place} declares no kernel {class_name!r}"
        if found is None and others and class_name in others:
            wrong += " (a function sets that name: set it outside of functions)"
        if found is not None:
            wrong += " (that is an object: leave out the line that makes it)" if _is_kernel(type(found)) else ""
        there = ", ".join(made) or "none: a kernel is a subclass of ts.Kernel"
        raise ConfigError(f"{wrong}; it declares {there}{did_you_mean(class_name, made)}")
    return found


def declared_names(path: Path) -> tuple[list[str], list[str] | None]:
    """The classes in a file, and the other names that it imports or assigns, read from its source: a program is not run to see
    whether it declares a kernel. The second is None where only an import of the file tells.
    """
    try:
        nodes = [*ast.walk(ast.parse(read_bounded(path, MOST_TYPED)))]
    except (OSError, SyntaxError, ValueError, RecursionError):
        return [], None
    classes = [each.name for each in nodes if isinstance(each, ast.ClassDef)]
    imported = [each.asname or each.name for each in nodes if isinstance(each, ast.alias)]
    read = [getattr(each, "id", getattr(each, "attr", "")) for each in nodes]
    if "exhaustive_search" in (*read, *imported):  # a program that tunes what it runs
        return classes, []
    assigned = [each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    unknown = not {"globals", "exec", "setattr", "*"}.isdisjoint((*read, *imported))
    return classes, None if unknown else [*assigned, *imported]


def _check_function(place: str, path: Path, name: str) -> None:
    """Make sure that a name is no function for scores of attention or for its mask, which alone is no kernel.

    Raises:
        ConfigError: it is; the message says how to declare the kernel.
    """
    nodes = ast.walk(ast.parse(read_bounded(path, MOST_TYPED)))
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == name and len(node.args.args) >= 4:
            what = "score_mod" if node.args.args[0].arg.startswith("score") else "mask_mod"
            raise ConfigError(
                f"{name} in {place} is a function and no kernel; to tune attention that uses it, write below it my_attention = "
                f"tiledsched.flex_attention({what}={name}), and name {place}:my_attention"
            )


def kernels_in(module: Any) -> list[str]:
    """The names of the kernels in a module."""
    return [name for name, each in vars(module).items() if _is_kernel(each)]


def _check_complete(where: str) -> None:
    """Make sure that a word is no file or module whose class was left out, or stands behind another mark than a colon.

    Raises:
        ConfigError: it is; the message has the word that was meant.
    """
    file, _, name = where.rpartition(".")
    if where.endswith(".py") or os.path.isfile(f"{where}.py"):
        path = where if where.endswith(".py") else f"{where}.py"
        made = kernels_in(_load_file(Path(path)))
        meant = " or ".join(f"{path}:{each}" for each in made) or f"{path}:Class; it declares none"
        raise ConfigError(f"{where} is a file; name its kernel, too: {meant}")
    file = file.removesuffix(".py")
    if name.isidentifier() and os.path.isfile(f"{file}.py"):
        raise ConfigError(f"a colon stands between a file and its class: {file}.py:{name}")


def allow(*places: str) -> None:
    """Let data name this code (`module:name` or `path/file.py:name`) in this process: the user named it."""
    _allowed.update(places)


def allowed_places() -> tuple[str, ...]:
    """The code that the user named in this process, and the kernels that it has loaded, for processes that it starts."""
    return tuple(sorted(_allowed | {where for kernel in known_kernels() if (where := place_of(kernel))}))


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
        if where == place_of(kernel):
            return kernel
    for place in (*SHIPPED.values(), *(each.value for each in installed_entry_points())):
        with contextlib.suppress(ConfigError, DeclarationError):
            if where in (place, place_of(kernel := load_kernel(place))):
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
        missing = str(error.name or "")
        if name == missing or name.startswith(f"{missing}."):
            known = [
                each.partition(":")[0] for each in (*SHIPPED.values(), *(e.value for e in installed_entry_points()))
            ]
            meant = did_you_mean(name, (*SHIPPED, *known))
            raise ConfigError(
                f"cannot import {name}: {error}{meant}; install it, or name the file (path/file.py:Class)"
            ) from error
        raise ConfigError(f"cannot import {name}: {describe(error)}; {remedy(error)}") from error
    except TiledschedError as error:
        raise _with_line(error) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"cannot import {name}: {describe(error)}; correct the module") from error


def _load_file(path: Path) -> Any:
    path = Path(real_path(path))
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) and real_path(str(main.__file__)) == str(path):  # type: ignore[union-attr]
        return main
    name = FILE_PREFIX + re.sub(r"\W", "_", path.stem) + "_" + stable_id(str(path), 8)
    if name in sys.modules:
        return sys.modules[name]
    if not os.path.isfile(path):
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent}; name a file as path/file.py:Class")
        meant = nearest(path.name, (each.name for each in path.parent.glob("*.py")))
        there = f" (did you mean {meant}?)" if meant else ""
        raise ConfigError(f"there is no file {path}{there}; name it as path/file.py:Class")

    def run() -> Any:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            with _neighbours(str(path.parent)):
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    try:
        return import_kernel_module(run)
    except TiledschedError as error:
        raise _with_line(error) from error
    except SystemExit as error:
        raise ConfigError(
            f"{path} ends the program as it is imported: {describe(error)}; put what it runs under if __name__ == '__main__':"
        ) from error
    except Exception as error:
        todo = remedy(error) if isinstance(error, ModuleNotFoundError) else "correct the file"
        if "relative import" in str(error):
            package = next(each for each in path.parents if not (each / "__init__.py").is_file())
            dotted = ".".join(path.relative_to(package).with_suffix("").parts)
            todo = f"name it as a module of its package, from {package}: {dotted}:Class"
        raise ConfigError(f"cannot import {path}: {describe(error)}; {todo}") from error


@contextlib.contextmanager
def _neighbours(folder: str) -> Iterator[None]:
    """Within the block, modules in a folder are imported as where Python runs a file of that folder.

    Each folder has modules of its own, also where another folder has some of the same names. Afterwards a name means what it
    meant before, and the folder is the last one searched, for what functions import as they are called.
    """
    mine = BESIDE.setdefault(folder, {})
    others = {name for each, known in BESIDE.items() if each != folder for name in known}
    before = {name: sys.modules.pop(name) for name in others if name in sys.modules}
    sys.modules.update(mine)
    there = set(sys.modules) - set(mine)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
        for name in set(sys.modules) - there:
            path = getattr(sys.modules[name], "__file__", None)
            if path and real_path(path).startswith(folder + os.sep) and not name.startswith(FILE_PREFIX):
                mine[name] = sys.modules[name]
        sys.modules.update(before)


def _with_line(error: TiledschedError) -> TiledschedError:
    """The error of a field or a class in a module that is imported, with the line of it."""
    place = author_line(error)
    if not isinstance(error, DeclarationError) or not place or says_line(str(error)):
        return error
    return DeclarationError(f"{error} ({place})")


def import_kernel_module(run: Callable[[], Any]) -> Any:
    """The result of `run()`, which imports a module.

    Processes that compile or measure keep torch from being imported, which takes seconds; a module that needs torch gets it, also
    where a function of a declaration imports it, so that the declaration is refused without.
    """
    try:
        return run()
    except Exception:  # a module that catches the ImportError fails in a way of its own
        if not release_torch():
            raise
        return run()


def release_torch() -> bool:
    """Let torch be imported in a process that keeps it from being; False where nothing kept it."""
    kept = sys.modules.get("torch", True) is None
    if kept:
        del sys.modules["torch"]
    return kept


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
    where = place_of(problem.declaration) if problem.known else ""
    return _restored, (problem.kernel, where, problem.values, problem.omitted)


_places: dict[tuple[KernelClass, str], str] = {}


def place_of(kernel: KernelClass) -> str:
    """Where another process finds a kernel; empty where no other process can, or not yet."""
    key = kernel, kernel.declared_in
    if key not in _places:
        try:
            _places[key] = kernel.locator()
        except DeclarationError:
            return ""
    return _places[key]


def command_word(kernel: KernelClass) -> str:
    """What commands call a kernel: the name of one that ships or is known from stored results, and the place of any other one,
    as in `mymods.py:my_attention`."""
    place = "" if kernel.name in SHIPPED or kernel.is_called else place_of(kernel)
    return os.path.relpath(place) if os.path.isabs(place) else place or kernel.name


def title_of(kernel: KernelClass) -> str:
    """A kernel's name, and in brackets what commands call it where the name does not tell."""
    word = command_word(kernel)
    return kernel.name if ":" in kernel.name or word == kernel.name else f"{kernel.name} ({word})"


def _restored(name: str, where: str, values: Mapping[str, Value], omitted: frozenset[str]) -> Problem:
    """The problem that another process sent, of the kernel declared there, which is loaded where this process can load it.

    Another kernel that this process knows by the same name, from another file, is not taken for it.
    """
    known = _known.get(name)
    if known is not None and where in ("", place_of(known)):
        return Problem(known, values, omitted=omitted)
    for find, place in ((load_kernel, where or name), (kernel_named, name)):
        with contextlib.suppress(ConfigError, DeclarationError):
            return Problem(find(place), values, omitted=omitted)
    return Problem(name, values, omitted=omitted)


copyreg.pickle(Problem, _reduced)
