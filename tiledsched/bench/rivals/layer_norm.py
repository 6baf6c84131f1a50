"""Rivals of layer normalisation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled, fastest
from tiledsched.core.problem import Problem
from tiledsched.kernels.layer_norm.declaration import LayerNorm


def rivals(p: Problem) -> Rivals:
    """Each takes X, and W and B where the problem has them, and returns the normalised rows."""
    normalise = LayerNorm.rivals(p)["torch"]
    eps = float(p.declaration.scalar_values(p)["eps"])
    found: dict[str, Callable[..., Any]] = {"torch": normalise, "torch_compile": compiled(normalise)}
    others = {"liger_kernel": ("liger", _liger), "apex": ("apex", _apex), "tilegym": ("tilegym", _tilegym)}
    for package, (name, call) in others.items():
        if p.weighted and p.biased and importlib.util.find_spec(package) is not None:
            found[name] = call(eps)
    return found


def _liger(eps: float) -> Callable[..., Any]:
    def call(x: Any, weight: Any, bias: Any) -> Any:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return LigerLayerNormFunction.apply(x, weight, bias, eps)

    return call


def _apex(eps: float) -> Callable[..., Any]:
    def call(x: Any, weight: Any, bias: Any) -> Any:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        return fused_layer_norm_affine(x, weight, bias, (x.shape[-1],), eps)

    return call


def _tilegym(eps: float) -> Callable[..., Any]:
    def own(x: Any, weight: Any, bias: Any) -> Any:
        from tilegym.ops import layer_norm_legacy

        return layer_norm_legacy(x, (x.shape[-1],), weight, bias, eps)

    def of_liger(x: Any, weight: Any, bias: Any) -> Any:
        from tilegym.suites.liger.ops import layer_norm

        return layer_norm(x, weight, bias, eps)

    return fastest({"own": own, "liger": of_liger})
