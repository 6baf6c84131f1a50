"""Which methods are profiled side by side."""

from __future__ import annotations

from collections.abc import Sequence

from tiledsched.bench.methods import OURS, SERVED, methods_of
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem

FIRST_RIVAL = "torch_auto"
"""The rival that is profiled where a kernel has it: torch's own choice among its backends."""


def profiled_methods(kernel: KernelClass, problem: Problem, named: Sequence[str] | None) -> list[str]:
    """The methods that are named, or else the kernel and its first rival.

    Raises:
        ConfigError: a name that no method of this problem has.
    """
    known = methods_of(kernel, [problem])
    unknown = [name for name in named or () if name not in known]
    if unknown:
        raise ConfigError(f"unknown method {unknown[0]!r}; known are {', '.join(known)}")
    if named:
        return list(named)
    rivals = [name for name in known if name not in (OURS, SERVED, "untuned", "matmul")]
    return [OURS, *([FIRST_RIVAL] if FIRST_RIVAL in rivals else rivals[:1])]
