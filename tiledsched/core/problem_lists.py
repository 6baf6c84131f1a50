"""Kernels and problems in the forms in which a caller may name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem

Cases = Iterable[Problem | Mapping[str, Any]]
"""Problems, each as itself or as its values by name."""


def problems_of(kernel: KernelClass, problems: Cases | str | None) -> list[Problem]:
    """Distinct problems, given as such, as values by name, as the name of a suite, or as None for all suites of the kernel.

    Raises:
        ConfigError: there are none.
        ProblemError: one has a wrong value.
    """
    if isinstance(problems, str):
        return kernel.suite(problems)
    if problems is None:
        found = [each for name in kernel.suites for each in kernel.suite(name)]
    else:
        given = [problems] if isinstance(problems, (Problem, Mapping)) else problems
        if not isinstance(given, Iterable):
            raise ConfigError(f"{given!r:.80} is no list of problems; give a list of dicts, such as [{{'rows': 4096}}]")
        found = [kernel.as_problem(each) for each in given]
    if not found:
        raise ConfigError(
            f"no problem of {kernel.name} is named, and it declares no suites; pass --problem, or a list of problems"
        )
    return list(dict.fromkeys(found))
