"""Rivals of grouped products: torch's own kernels, and Inductor's templates."""

from __future__ import annotations

from tiledsched.bench.rivals import Rivals, compiled
from tiledsched.core.problem import Problem


def rivals(p: Problem) -> Rivals:
    """Each takes A, B and Offsets, and returns C."""
    found = dict(p.declaration.rivals(p))
    for call in tuple(found.values()):
        found["torch_compile"] = compiled(call, mode="default")
    return found
