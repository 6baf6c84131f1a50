"""Rivals of root-mean-square normalisation, with or without a residual that is added first."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled, fastest
from tiledsched.core.problem import Problem

TILEGYM_MODES = (None, "static_persistent", "multi_wave_reload", "multi_wave_cached")


def rivals(p: Problem) -> Rivals:
    """Each takes X and W, or X, R and W, and returns Out, or Out and X + R."""
    import torch

    eps = float(p.declaration.scalar_values(p)["eps"])

    def normalise(x: Any, w: Any) -> Any:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps)

    found: dict[str, Callable[..., Any]] = {"torch": _of(p, normalise), "torch_compile": compiled(_of(p, normalise))}
    if importlib.util.find_spec("tilegym") is not None:
        found["tilegym"] = fastest({str(mode): _of(p, _tilegym(mode, eps)) for mode in TILEGYM_MODES})
    return found


def _of(p: Problem, normalise: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`normalise` with the problem's inputs as arguments."""
    if not p.residual:
        return normalise

    def add_first(X: Any, R: Any, W: Any) -> Any:
        total = X + R
        return normalise(total, W), total

    return add_first


def _tilegym(mode: str | None, eps: float) -> Callable[[Any, Any], Any]:
    def call(x: Any, w: Any) -> Any:
        from tilegym.ops import rms_norm

        return rms_norm(x, (x.shape[-1],), w, eps, mode=mode)

    return call
