"""Kernels by their names: those this process made, those that ship, those of installed packages, and those in a file."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.core.errors import ConfigError, DeclarationError
from tiledsched.core.problem import stable_id

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from tiledsched.core.kernel import KernelClass

ENTRY_POINTS = "tiledsched.kernels"
"""The entry-point group under which a package ships kernels: a name, and `module:Class`."""
SHIPPED = {
    "attention": "tiledsched.kernels.attention:Attention",
    "matmul": "tiledsched.kernels.matmul:Matmul",
    "rms_norm": "tiledsched.kernels.rms_norm:RmsNorm",
    "softmax": "tiledsched.kernels.softmax:Softmax",
}
"""The kernels that ship: name -> where each is declared."""
_FILE_PREFIX = "tiledsched_file_"
_known: dict[str, KernelClass] = {}


@contextlib.contextmanager
def known_as_declared(kernel: KernelClass) -> Iterator[None]:
    """Makes a kernel known by its name; where the block raises, what the name stood for before is known again."""
    before = _known.get(kernel.name)
    _known[kernel.name] = kernel
    try:
        yield
    except BaseException:
        if before is None:
            del _known[kernel.name]
        else:
            _known[kernel.name] = before
        raise


def known_kernels() -> list[KernelClass]:
    """Every kernel that this process has made or loaded."""
    return list(_known.values())


def kernel_named(name: str) -> KernelClass:
    """The kernel that tables know as `name`: one this process made, one that ships, or one of an installed package.

    Raises:
        ConfigError: there is none.
    """
    if name not in _known:
        if name in SHIPPED:
            load_kernel(SHIPPED[name])
        else:
            _load_entry_points(name)
    if name not in _known:
        raise ConfigError(
            f"kernel {name!r} is not known here; name the file or module that declares it (file.py:Class)"
        )
    return _known[name]


def _load_entry_points(name: str) -> None:
    for each in installed_entry_points():
        if each.name == name or each.value == name:
            _known.setdefault(name, load_kernel(each.value))


@functools.cache
def installed_entry_points() -> tuple[EntryPoint, ...]:
    """What installed packages ship. Looked for once in a process: a problem of an unknown kernel asks again and again."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def load_kernel(where: str) -> KernelClass:
    """The kernel at `package.module:Class` or `path/file.py:Class`, or one that is known by a name of its own.

    Raises:
        ConfigError: it is not there.
        DeclarationError: it is wrong.
    """
    from tiledsched.core.kernel import Kernel

    place, colon, class_name = where.rpartition(":")
    if not colon:
        return kernel_named(where)
    path = Path(place if place.endswith(".py") else f"{place}.py")
    module = _load_file(path) if place.endswith(".py") or path.is_file() else _load_module(place)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Kernel)):
        made = [
            name
            for name, each in vars(module).items()
            if isinstance(each, type) and issubclass(each, Kernel) and each is not Kernel
        ]
        raise ConfigError(f"{place} declares no kernel {class_name!r}; it declares {', '.join(made) or 'none'}")
    return found


def _load_module(name: str) -> Any:
    try:
        return import_kernel_module(lambda: importlib.import_module(name))
    except ImportError as error:
        raise ConfigError(
            f"cannot import {name}: {error}; install it, or name the file (path/file.py:Class)"
        ) from error


def _load_file(path: Path) -> Any:
    path = path.resolve()
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == path:  # type: ignore[union-attr]
        return main
    name = _FILE_PREFIX + re.sub(r"\W", "_", path.stem) + "_" + stable_id(str(path), 8)
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
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
    """`run()`. Processes that compile or measure keep torch out, which takes seconds; a module that needs it gets it."""
    try:
        return run()
    except ImportError:
        if "torch" not in sys.modules or sys.modules["torch"] is not None:
            raise
        del sys.modules["torch"]
        return run()


def locator(kernel: KernelClass) -> str:
    """`module:Class`, or `/path/file.py:Class`: where another process finds a kernel.

    Raises:
        DeclarationError: it was made at a prompt, where no other process can.
    """
    name = kernel.__module__
    module = sys.modules.get(name)
    spec, path = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if name != "__main__" and spec is not None and "." in name and _FILE_PREFIX not in name:
        return f"{name}:{kernel.__qualname__}"
    if path is None or not Path(path).is_file():
        raise DeclarationError(
            f"{kernel.__name__} was declared at a prompt; put it in a file, so that the compile processes can import it"
        )
    return f"{Path(path).resolve()}:{kernel.__qualname__}"


def module_word(kernel: type) -> str:
    """The module by the name people know: a file's stem where it was loaded from a file."""
    module = kernel.__module__
    path = getattr(sys.modules.get(module), "__file__", None)
    return Path(path).stem if path and (module == "__main__" or module.startswith(_FILE_PREFIX)) else module
