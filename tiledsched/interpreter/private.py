"""The private names of cuda-tile that the interpreter stands on, and nothing else.

cuTile has no public way to run tile code on the host. Its `ct.*` functions, called outside a kernel, ask the current
dispatch mode what to do; a mode of our own answers with NumPy. That class and the function inside a kernel object are
the only private names used, so a cuda-tile that moved them is noticed here, in words.
"""

from __future__ import annotations

import importlib
from types import FunctionType
from typing import Any

from tiledsched.core.errors import CompilerError
from tiledsched.core.extras import package_version

KNOWN_VERSIONS = "1.2 to 1.7"
"""Releases of cuda-tile in which these names were found; the package itself needs 1.7."""
MODE_METHODS = ("as_current", "call_tile_function_from_host")


def load_dispatch_mode() -> Any:
    """The class whose instances decide what `ct.*` functions do when called on the host.

    Raises:
        CompilerError: this cuda-tile keeps it elsewhere, or it has changed.
    """
    try:
        mode = importlib.import_module("cuda.tile._dispatch_mode").DispatchMode
    except (ImportError, AttributeError) as error:
        raise CompilerError(_moved("cuda.tile._dispatch_mode.DispatchMode")) from error
    for method in MODE_METHODS:
        if not callable(getattr(mode, method, None)):
            raise CompilerError(_moved(f"cuda.tile._dispatch_mode.DispatchMode.{method}"))
    return mode


def undecorated(kernel: Any) -> FunctionType:
    """The Python function of a kernel: of a `ct.kernel` object, or a plain function itself.

    Raises:
        CompilerError: a kernel object of a cuda-tile that keeps the function elsewhere.
        TypeError: neither a kernel nor a function.
    """
    import cuda.tile as ct

    if isinstance(kernel, ct.kernel):
        kernel = getattr(kernel, "_pyfunc", None)
        if not isinstance(kernel, FunctionType):
            raise CompilerError(_moved("cuda.tile.kernel._pyfunc"))
    if not isinstance(kernel, FunctionType):
        raise TypeError(f"expected a cuTile kernel or a Python function, got {type(kernel).__name__}")
    return kernel


def _moved(name: str) -> str:
    installed = package_version("cuda-tile") or "an unknown version"
    return (
        f"the CPU interpreter needs cuda-tile's private name {name}, which this cuda-tile ({installed}) does not have. "
        f"It is known in cuda-tile {KNOWN_VERSIONS}: pip install 'cuda-tile==1.7.*', or install a newer tiledsched. "
        "Tuning and serving do not need the interpreter."
    )
