"""Which modules are libraries, by their names: their source is no part of a kernel."""

from __future__ import annotations

import sys

SHIPPED_KERNELS = "tiledsched.kernels."
"""How the names of the modules begin that declare the kernels that ship."""
CALLERS = {"click", "optuna", "pebble", "ray", "sqlalchemy"}
"""Packages that call functions of this one, and so stand between its frames."""
LIBRARIES = frozenset({"cuda", "torch", "numpy", "cupy", "ml_dtypes", "tiledsched", *CALLERS})
"""Packages whose source is not part of a kernel."""


def is_library(name: str) -> bool:
    """Whether a module of this name is part of Python or of a package whose source is not part of a kernel."""
    top = name.split(".")[0]
    return (top in LIBRARIES and not name.startswith(SHIPPED_KERNELS)) or top in sys.stdlib_module_names
