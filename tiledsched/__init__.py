"""Find, prove, keep and serve the best schedule of a cuTile kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Kernel", "Problem", "Schedule", "SearchSpace", "TiledschedError", "Tolerance", "__version__", "array", "arrays", "check",
    "choice", "configure", "dim", "dtype", "explain", "flag", "inout", "knob", "load_kernel", "load_space", "op", "out", "outs",
    "scalar", "sdpa", "sizes", "space_for", "tune", "workspace",
]  # fmt: skip

if TYPE_CHECKING:
    from tiledsched.attention.explain import explain
    from tiledsched.attention.sdpa import sdpa
    from tiledsched.config import configure
    from tiledsched.errors import TiledschedError
    from tiledsched.fields import (
        array,
        arrays,
        choice,
        dim,
        dtype,
        flag,
        inout,
        knob,
        out,
        outs,
        scalar,
        sizes,
        workspace,
    )
    from tiledsched.kernel import Kernel, Tolerance, load_kernel
    from tiledsched.problem import Problem
    from tiledsched.schedule import Schedule
    from tiledsched.serve.op import op
    from tiledsched.space import SearchSpace
    from tiledsched.space_files import load_space, space_for
    from tiledsched.tuning import check, tune

_NAMES = {
    "attention.explain": "explain", "attention.sdpa": "sdpa", "config": "configure", "errors": "TiledschedError",
    "fields": "array arrays choice dim dtype flag inout knob out outs scalar sizes workspace",
    "kernel": "Kernel Tolerance load_kernel", "problem": "Problem", "schedule": "Schedule", "serve.op": "op",
    "space": "SearchSpace", "space_files": "load_space space_for", "tuning": "check tune",
}  # fmt: skip
_HOMES = {name: f"tiledsched.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import tiledsched` costs next to nothing."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiledsched' has no attribute {name!r}")
