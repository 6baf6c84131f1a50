"""Root-mean-square normalisation by others: a function takes X and W, or X, R and W, and returns Out, or Out and X + R."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Numbers, Variants, called
from tiledsched.kernels.torch_rivals import torch_methods

TILEGYM_MODES = (None, "static_persistent", "multi_wave_reload", "multi_wave_cached")


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's rms_norm, after adding the residual if there is one; it stands in while the kernel is compiled."""
    from torch.nn.functional import rms_norm

    return _after_adding(p, partial(_normalised, p, rms_norm, eps=numbers["eps"]))


def tilegym(p: Problem) -> Variants:
    """TileGym's rms_norm in each of its modes."""
    from tilegym.ops import rms_norm

    eps = float(p.declaration.scalar_values(p)["eps"])
    calls = {str(mode): partial(rms_norm, mode=mode) for mode in TILEGYM_MODES}
    return {name: _after_adding(p, partial(_normalised, p, call, eps=eps)) for name, call in calls.items()}


def _normalised(p: Problem, function: Function, X: Any, W: Any, *, eps: float) -> Any:
    return function(X, (p.columns,), W, eps)


def _after_adding(p: Problem, normalise: Callable[[Any, Any], Any]) -> Function:
    """`normalise` with the problem's inputs as arguments."""
    if not p.residual:
        return normalise

    def add_first(X: Any, R: Any, W: Any) -> Any:
        total = X + R
        return normalise(total, W), total

    return add_first


METHODS = (*torch_methods(in_torch), Method(name="tilegym", make=called(tilegym), package="tilegym"))
