"""Find, prove, keep and serve the best schedule of a cuTile kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Problem", "Schedule", "SearchSpace", "TiledschedError", "__version__", "configure", "explain", "load_space",
           "sdpa", "space_for"]  # fmt: skip

if TYPE_CHECKING:
    from tiledsched.attention.sdpa import sdpa
    from tiledsched.config import configure
    from tiledsched.errors import TiledschedError
    from tiledsched.problem import Problem
    from tiledsched.schedule import Schedule
    from tiledsched.serve.explain import explain
    from tiledsched.space import SearchSpace
    from tiledsched.space_files import load_space, space_for

_HOMES = {
    "Problem": "tiledsched.problem", "Schedule": "tiledsched.schedule", "SearchSpace": "tiledsched.space",
    "TiledschedError": "tiledsched.errors", "configure": "tiledsched.config", "explain": "tiledsched.serve.explain",
    "load_space": "tiledsched.space_files", "sdpa": "tiledsched.attention.sdpa", "space_for": "tiledsched.space_files",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import tiledsched` costs next to nothing."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiledsched' has no attribute {name!r}")
