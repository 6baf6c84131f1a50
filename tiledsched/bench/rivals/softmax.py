"""Rivals of softmax over rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled, fastest
from tiledsched.core.problem import Problem

TILEGYM_VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "tma": {"use_tma": True},
    "chunked": {"use_chunked": True},
    "multi_wave": {"use_multi_wave": True},
}


def rivals(p: Problem) -> Rivals:
    """Each takes X and returns the softmax of its rows."""
    import torch

    def soften(X: Any) -> Any:
        return torch.softmax(X, dim=-1)

    found: dict[str, Callable[..., Any]] = {"torch": soften, "torch_compile": compiled(soften)}
    if importlib.util.find_spec("tilegym") is not None:
        found["tilegym"] = fastest({name: _tilegym(more) for name, more in TILEGYM_VARIANTS.items()})
    return found


def _tilegym(more: dict[str, bool]) -> Callable[..., Any]:
    def call(X: Any) -> Any:
        from tilegym.ops import softmax

        return softmax(X, **more)

    return call
