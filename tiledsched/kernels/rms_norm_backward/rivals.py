"""The gradients of root-mean-square normalisation by torch.

A function takes dOut, X and W, and dSum where there is a residual, and returns dX and dW.
"""

from __future__ import annotations

from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Numbers, called
from tiledsched.kernels.torch_rivals import compiled, gradients_of


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """The gradients by elementary functions of torch, which stand in while the kernel is compiled."""

    def call(dOut: Any, X: Any, W: Any, dSum: Any = None) -> Any:
        x, gradient = X.float(), dOut.float()
        scale = (x.square().mean(-1, keepdim=True) + numbers["eps"]).rsqrt()
        weighed, x = gradient * W.float(), x * scale
        dx = scale * (weighed - x * (weighed * x).mean(-1, keepdim=True))
        return (dx if dSum is None else dx + dSum).to(X.dtype), (gradient * x).sum(0).to(W.dtype)

    return call


def forward(p: Problem) -> Function:
    """The normalisation whose gradients are taken; where there is a residual, also the sum."""
    import torch

    eps = float(p.declaration.scalar_values(p)["eps"])

    def call(X: Any, W: Any) -> Any:
        total = X + torch.zeros_like(X) if p.residual else X
        out = torch.nn.functional.rms_norm(total, (p.columns,), W, eps)
        return (out, total) if p.residual else out

    return call


def gradients_alone(function: Function) -> Function:
    """The gradients of a forward function, in the order of this kernel's arrays. What runs forward is not timed."""
    gradients = gradients_of(function)
    return lambda dOut, X, W, *more: gradients((dOut, *more), X, W)


METHODS = (
    Method(name="torch", make=called(lambda p: gradients_alone(forward(p)))),
    Method(name="torch_compile", make=called(lambda p: gradients_alone(compiled(forward(p))))),
)
