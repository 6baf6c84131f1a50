"""Which methods are profiled side by side."""

from __future__ import annotations

from collections.abc import Sequence

from tiledsched.bench.methods import OURS, SERVED, choose_methods, methods_of
from tiledsched.core.problem import KernelClass, Problem

FIRST_RIVAL = "torch_auto"
"""The rival that is profiled where a kernel has it: torch's own choice among its backends."""


def profiled_methods(kernel: KernelClass, problem: Problem, named: Sequence[str] | None) -> list[str]:
    """The methods that are named, or else the kernel and its first rival.

    Raises:
        ConfigError: a name that no method of this problem has.
    """
    if named:
        return [method.name for method in choose_methods(kernel, named, [problem])]
    rivals = [name for name in methods_of(kernel, [problem]) if name not in (OURS, SERVED, "untuned", "matmul")]
    return [OURS, *([FIRST_RIVAL] if FIRST_RIVAL in rivals else rivals[:1])]
