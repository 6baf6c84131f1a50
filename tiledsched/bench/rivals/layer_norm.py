"""Rivals of layer normalisation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled
from tiledsched.core.problem import Problem
from tiledsched.kernels.layer_norm.declaration import LayerNorm, affine


def rivals(p: Problem) -> Rivals:
    """Each takes X, and W and B where the problem has them, and returns the normalised rows."""
    normalise = LayerNorm.rivals(p)["torch"]
    eps = float(p.declaration.scalar_values(p)["eps"])
    found: dict[str, Callable[..., Any]] = {"torch": normalise, "torch_compile": compiled(normalise)}
    if p.weighted and p.biased and importlib.util.find_spec("liger_kernel") is not None:
        found["liger"] = lambda X, *more: _liger(X, *affine(p, more), eps)
    if p.weighted and p.biased and importlib.util.find_spec("apex") is not None:
        found["apex"] = lambda X, *more: _apex(X, *affine(p, more), eps)
    return found


def _liger(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def _apex(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, (x.shape[-1],), eps)
