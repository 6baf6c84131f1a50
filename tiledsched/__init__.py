"""Find, prove, keep and serve the best schedule of a cuTile kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
_HOMES = {
    "Kernel": "tiledsched.kernel", "Problem": "tiledsched.problem", "Schedule": "tiledsched.schedule",
    "SearchSpace": "tiledsched.space", "TiledschedError": "tiledsched.errors", "Tolerance": "tiledsched.kernel",
    "array": "tiledsched.fields", "arrays": "tiledsched.fields", "check": "tiledsched.tuning",
    "check_ranks": "tiledsched.serve.ranks",
    "choice": "tiledsched.fields", "configure": "tiledsched.config", "dim": "tiledsched.fields", "dtype": "tiledsched.fields",
    "explain": "tiledsched.attention.explain", "flag": "tiledsched.fields", "inout": "tiledsched.fields",
    "knob": "tiledsched.fields", "load_kernel": "tiledsched.kernel_names", "load_space": "tiledsched.space_files",
    "op": "tiledsched.serve.op", "out": "tiledsched.fields", "outs": "tiledsched.fields", "scalar": "tiledsched.fields",
    "sdpa": "tiledsched.attention.sdpa", "sdpa_paged": "tiledsched.attention.placed",
    "sdpa_varlen": "tiledsched.attention.placed", "sizes": "tiledsched.fields", "space_for": "tiledsched.space_files",
    "tune": "tiledsched.tuning", "workspace": "tiledsched.fields",
}  # fmt: skip
__all__ = [
    "Kernel",
    "Problem",
    "Schedule",
    "SearchSpace",
    "TiledschedError",
    "Tolerance",
    "__version__",
    "array",
    "arrays",
    "check",
    "check_ranks",
    "choice",
    "configure",
    "dim",
    "dtype",
    "explain",
    "flag",
    "inout",
    "knob",
    "load_kernel",
    "load_space",
    "op",
    "out",
    "outs",
    "scalar",
    "sdpa",
    "sdpa_paged",
    "sdpa_varlen",
    "sizes",
    "space_for",
    "tune",
    "workspace"
]  # fmt: skip

if TYPE_CHECKING:
    from tiledsched.attention.explain import explain
    from tiledsched.attention.placed import sdpa_paged, sdpa_varlen
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
    from tiledsched.kernel import Kernel, Tolerance
    from tiledsched.kernel_names import load_kernel
    from tiledsched.problem import Problem
    from tiledsched.schedule import Schedule
    from tiledsched.serve.op import op
    from tiledsched.serve.ranks import check_ranks
    from tiledsched.space import SearchSpace
    from tiledsched.space_files import load_space, space_for
    from tiledsched.tuning import check, tune


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import tiledsched` costs next to nothing."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiledsched' has no attribute {name!r}")
