"""Grouped products with an epilogue by torch: a function takes A, B, Offsets and the arrays of the epilogue, and returns C."""

from __future__ import annotations

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Numbers, Variants
from tiledsched.kernels.epilogues import in_torch
from tiledsched.kernels.product_schedules import row_bytes
from tiledsched.kernels.torch_rivals import compiled, torch_methods


def is_known(p: Problem) -> bool:
    """torch's grouped product takes bfloat16 whose rows start at multiples of 16 bytes, and no bias."""
    return bool(p.dtype == "bfloat16" and not (p.odd or p.bias or row_bytes(p.n) or p.declaration.epilogue))  # type: ignore[attr-defined]


def eager(p: Problem, numbers: Numbers) -> Function:
    """torch's grouped product, followed by a kernel of torch's for each operation."""
    import torch

    return in_torch(p, lambda A, B, Offsets: torch._grouped_mm(A, B, offs=Offsets), 3)


def raced(p: Problem) -> Variants:
    """What a tune times and what may serve; none where torch does not take the problem."""
    made = eager(p, {})
    return {"torch": made, "torch_compile": compiled(made, "default", serves=True)} if is_known(p) else {}


METHODS = torch_methods(eager, "default", is_known)
