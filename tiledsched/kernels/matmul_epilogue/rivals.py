"""Products with an epilogue by torch: a function takes A, B and the arrays of the problem's epilogue, and returns C."""

from __future__ import annotations

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Numbers, Variants
from tiledsched.kernels.epilogues import in_torch
from tiledsched.kernels.torch_rivals import compiled, torch_methods

FUSED = {"none": "addmm", "relu": "_addmm_activation", "gelu_tanh": "_addmm_activation"}
"""Activation -> the function of torch that lets cuBLAS add the bias and apply it."""


def eager(p: Problem, numbers: Numbers) -> Function:
    """cuBLAS, followed by a kernel of torch's for each operation."""
    import torch

    return in_torch(p, torch.mm, 2)


def is_fused(p: Problem) -> bool:
    """Whether torch lets cuBLAS do the epilogue: a bias, with relu or gelu by tanh behind it, or a residual."""
    more = p.gate or p.quantised or p.declaration.epilogue is not None  # type: ignore[attr-defined]
    return not more and p.bias + p.residual == 1 and p.activation in (FUSED if p.bias else ("none",))


def fused(p: Problem) -> Function:
    """cuBLAS with an epilogue of its own."""
    import torch

    function, more = getattr(torch, FUSED[p.activation]), {"use_gelu": True} if p.activation == "gelu_tanh" else {}
    return lambda A, B, added: function(added, A, B, **more)


def raced(p: Problem) -> Variants:
    """What a tune times and what may serve; none for an author's own function, which torch does not have."""
    if p.declaration.epilogue is not None:  # type: ignore[attr-defined]
        return {}
    found = {"torch": eager(p, {}), "torch_compile": compiled(eager(p, {}), "default", serves=True)}
    return found | ({"cublas_fused": fused(p)} if is_fused(p) else {})


METHODS = torch_methods(eager, "default")
