"""Grouped products with an epilogue by torch: a function takes A, B, Offsets and the arrays of the epilogue, and returns C."""

from __future__ import annotations

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Numbers, Variants
from tiledsched.kernels.epilogues import in_torch
from tiledsched.kernels.grouped_matmul import rivals as product
from tiledsched.kernels.torch_rivals import compiled, torch_methods


def is_known(p: Problem) -> bool:
    """torch has no bias for each group, and no functions of an author's; for the product see `grouped_matmul.rivals`."""
    return product.is_known(p) and not (p.bias or p.declaration.epilogue)  # type: ignore[attr-defined]


def eager(p: Problem, numbers: Numbers) -> Function:
    """torch's grouped product, followed by a kernel of torch's for each operation."""
    return in_torch(p, product.in_torch(p, numbers), 3)


def raced(p: Problem) -> Variants:
    """What a tune times and what may serve; none where torch does not take the problem."""
    made = eager(p, {})
    return {"torch": made, "torch_compile": compiled(made, "default", serves=True)} if is_known(p) else {}


METHODS = torch_methods(eager, "default", is_known)
