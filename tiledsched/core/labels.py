"""The short names of a kernel's sizes, and problems written with them as `--problem` takes them."""

from __future__ import annotations

from typing import Any

from tiledsched.core.config import INVARIANT
from tiledsched.core.problem import KernelClass, Problem


def class_words(accum_mode: str) -> str:
    """The class of a schedule in words: its accumulators, or that its bits do not depend on the batch."""
    return "batch-invariant schedules" if accum_mode == INVARIANT else f"{accum_mode} accumulators"


def labels_of(kernel: KernelClass) -> dict[str, tuple[str, ...]]:
    """Short name -> the dims that it stands for."""
    return {short: (names,) if isinstance(names, str) else tuple(names) for short, names in kernel.label.items()}


def short_names(kernel: KernelClass) -> list[str]:
    """The short names that stand for fields; others stand for what is derived from fields."""
    return [short for short in kernel.label if fields_called(kernel, short) is not None]


def fields_called(kernel: KernelClass, key: str, several: bool = False) -> tuple[str, ...] | None:
    """The fields that a name or short name stands for; None where it stands for no field.

    Args:
        kernel: the kernel.
        key: the name.
        several: whether its value has slashes, so that each field gets a value of its own.
    """
    names = kernel.written.get(key) if several or key not in kernel.label else None
    names = (names,) if isinstance(names, str) else names or labels_of(kernel).get(key, (key,))
    return names if all(name in kernel.fields for name in names) else None


def format_problem(problem: Problem) -> str:
    """The problem as `--problem` takes it: by short names where there are some, and without fields at their defaults."""
    kernel, words, named = problem.declaration, [], set[str]()
    for short in short_names(kernel):
        names = labels_of(kernel)[short]
        if len({problem.values[name] for name in names}) == 1:
            words.append(f"{short}={show(problem.values[names[0]], '+')}")
            named |= set(names)
    words += [
        f"{name}={show(value, '+')}"
        for name, value in problem.values.items()
        if name not in named and value != kernel.fields[name].default
    ]
    return ",".join(words)


def show(value: Any, between: str = ",") -> str:
    """A value of a problem or a knob as people read it, with a sign between the numbers of a list."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return between.join(map(str, value)) if isinstance(value, tuple) else str(value)
