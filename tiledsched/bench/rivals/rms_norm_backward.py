"""Rivals of the gradients of root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled, gradients_of
from tiledsched.core.problem import Problem


def rivals(p: Problem) -> Rivals:
    """Each takes dOut, X and W, and dSum where there is a residual, and returns dX and dW. What runs forward is not timed."""
    import torch

    eps = float(p.declaration.scalar_values(p)["eps"])

    def forward(X: Any, W: Any) -> Any:
        total = X + torch.zeros_like(X) if p.residual else X
        out = torch.nn.functional.rms_norm(total, (p.columns,), W, eps)
        return (out, total) if p.residual else out

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        gradients = gradients_of(function)
        return lambda dOut, X, W, *more: gradients((dOut, *more), X, W)

    return {"torch": alone(forward), "torch_compile": alone(compiled(forward))}
