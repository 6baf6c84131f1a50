"""Products of 8-bit floats by torch: a function takes A, B, ScaleA, ScaleB and perhaps Bias, and returns C."""

from __future__ import annotations

from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Numbers, Variants
from tiledsched.kernels.torch_rivals import torch_methods


def is_known(p: Problem) -> bool:
    """torch has no products of two operands in e5m2. With scales of blocks, which it takes on sm_90, releases want other strides
    where k is no multiple of 512."""
    return bool(p.dtype == "float8_e4m3fn" and not (p.blocks and p.k % 512))


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """cuBLAS, through torch."""
    import torch

    kind = getattr(torch, str(p.out_dtype))

    def call(A: Any, B: Any, ScaleA: Any, ScaleB: Any, Bias: Any = None) -> Any:
        if p.scales == "row":
            ScaleA, ScaleB = ScaleA[:, None], ScaleB[None, :]
        elif p.blocks:
            ScaleA, ScaleB = ScaleA.t(), ScaleB.t()
        return torch._scaled_mm(A, B, ScaleA, ScaleB, Bias, out_dtype=kind, use_fast_accum=p.fast_accum)

    return call


def raced(p: Problem) -> Variants:
    """The rival that a tune times and that may serve; none where torch does not take the problem."""
    return {"cublas_scaled": in_torch(p, {})} if is_known(p) else {}


METHODS = torch_methods(in_torch, "default", is_known)
