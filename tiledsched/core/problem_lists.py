"""Kernels and problems in the forms in which a caller may name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem

Cases = Iterable[Problem | Mapping[str, Any]]
"""Problems, each as itself or as its values by name."""


def in_batches(kernel: KernelClass, case: Problem | Mapping[str, Any]) -> list[Problem | Mapping[str, Any]]:
    """A case whose values leave out the kernel's first batch dim, once for each of its `batch_sizes`; else the case.

    Raises:
        ConfigError: the kernel has no batch dims.
    """
    if not kernel.batch_dims:
        raise ConfigError(
            f"{kernel.name} {kernel.unordered}, so that no order of sums can serve every batch (docs/batch_invariance.md); leave "
            "out --numerics invariant"
        )
    dim = kernel.batch_dims[0]
    if not isinstance(case, Mapping) or dim in case:
        return [case]
    return [{**case, dim: size} for size in kernel.batch_sizes]


def problems_of(kernel: KernelClass, problems: Cases | str | None, *, every_batch: bool = False) -> list[Problem]:
    """Distinct problems, given as such, as values by name, as the name of a suite, or as None for all suites of the kernel.

    With `every_batch`, values that leave out the kernel's first batch dim stand for a problem of each of its `batch_sizes`.

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
        given = [one for each in given for one in (in_batches(kernel, each) if every_batch else [each])]
        found = [kernel.as_problem(each) for each in given]
    if not found:
        raise ConfigError(
            f"no problem of {kernel.name} is named, and it declares no suites; pass --problem, or a list of problems"
        )
    return list(dict.fromkeys(found))
