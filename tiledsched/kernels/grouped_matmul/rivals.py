"""Grouped products by torch: a function takes A, B and Offsets, and returns C."""

from __future__ import annotations

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Numbers, Variants
from tiledsched.kernels.product_schedules import row_bytes
from tiledsched.kernels.torch_rivals import torch_methods


def is_known(p: Problem) -> bool:
    """torch's grouped product takes bfloat16 whose rows start at multiples of 16 bytes."""
    return bool(p.dtype == "bfloat16" and not p.odd and not row_bytes(p.n))


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's grouped product."""
    import torch

    return lambda A, B, Offsets: torch._grouped_mm(A, B, offs=Offsets)


def raced(p: Problem) -> Variants:
    """The rival that a tune times and that may serve; none where torch does not take the problem."""
    return {"torch_grouped_mm": in_torch(p, {})} if is_known(p) else {}


METHODS = torch_methods(in_torch, "default", is_known)
