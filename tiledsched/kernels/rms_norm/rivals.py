"""Root-mean-square normalisation by others: a function takes X and W, or X, R and W, and returns Out, or Out and X + R.

Of rows that are rounded to 8-bit floats, it also takes their scale where that is given, and returns each row's scale, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Numbers, Variants, called
from tiledsched.kernels.row_schedules import torch_quantized
from tiledsched.kernels.torch_rivals import torch_methods

TILEGYM_MODES = (None, "static_persistent", "multi_wave_reload", "multi_wave_cached")


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's rms_norm, after adding the residual if there is one; it stands in while the kernel is compiled."""
    if p.kernel != "rms_norm":
        return quantized_in_torch(p, numbers)
    from torch.nn.functional import rms_norm

    return _after_adding(p, partial(_normalised, p, rms_norm, eps=numbers["eps"]))


def quantized_in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's functions in float32, rounded once."""

    def call(*given: Any) -> Any:
        total = sum(each.float() for each in given[: 1 + p.residual])
        factor = (total.square().mean(-1, keepdim=True) + numbers["eps"]).rsqrt() * given[1 + p.residual].float()
        out, scale = torch_quantized(total * factor, given[-1] if p.static else None)
        return (out, total.to(given[0].dtype), scale) if p.residual else (out, scale)

    return call


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


METHODS = (
    *torch_methods(in_torch),
    Method(name="tilegym", make=called(tilegym), package="tilegym", knows=lambda p: p.kernel == "rms_norm"),
)
