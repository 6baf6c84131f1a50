"""Rivals of grouped products: torch's own kernels, and Inductor's templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled
from tiledsched.core.problem import Problem


def rivals(p: Problem) -> Rivals:
    """Each takes A, B and Offsets, and returns C."""
    found: dict[str, Callable[..., Any]] = {}
    for call in p.declaration.rivals(p).values():
        found = {"torch": call, "torch_compile": compiled(call, mode="default")}
    return found
