"""Layer normalisation by others: a function takes X, and W and B where the problem has them, and returns the normalised rows."""

from __future__ import annotations

from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Numbers, Variants, called
from tiledsched.kernels.torch_rivals import torch_methods


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's layer norm, which stands in while the kernel is compiled."""
    from torch.nn.functional import layer_norm

    def call(X: Any, *more: Any) -> Any:
        left = list(more)
        weight = left.pop(0) if p.weighted else None
        return layer_norm(X, (p.columns,), weight, left.pop(0) if p.biased else None, numbers["eps"])

    return call


def raced(p: Problem) -> Variants:
    """The rival that a tune times and that may serve."""
    return {"torch": in_torch(p, p.declaration.scalar_values(p))}


def liger(p: Problem) -> Function:
    """Liger's layer norm."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    eps = _eps(p)
    return lambda X, W, B: LigerLayerNormFunction.apply(X, W, B, eps)


def apex(p: Problem) -> Function:
    """Apex's fused layer norm."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    eps = _eps(p)
    return lambda X, W, B: fused_layer_norm_affine(X, W, B, (p.columns,), eps)


def tilegym(p: Problem) -> Variants:
    """TileGym's layer norm, its own and the one of its suite for Liger."""
    from tilegym.ops import layer_norm_legacy

    eps = _eps(p)

    def of_liger(X: Any, W: Any, B: Any) -> Any:
        from tilegym.suites.liger.ops import layer_norm  # which not every release has

        return layer_norm(X, W, B, eps)

    return {"own": lambda X, W, B: layer_norm_legacy(X, (p.columns,), W, B, eps), "liger": of_liger}


def _eps(p: Problem) -> float:
    return float(p.declaration.scalar_values(p)["eps"])


def _is_affine(p: Problem) -> bool:
    return bool(p.weighted and p.biased)


METHODS = (
    *torch_methods(in_torch),
    Method(name="liger", make=called(liger), package="liger_kernel", knows=_is_affine),
    Method(name="apex", make=called(apex), package="apex", knows=_is_affine),
    Method(name="tilegym", make=called(tilegym), package="tilegym", knows=_is_affine),
)
