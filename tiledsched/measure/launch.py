"""What the measuring process needs to know of one candidate: plain data, no kernel, no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiledsched.core.arrays import ArraySpec, Tolerance
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule

Argument = tuple[str, str, Any]
"""("array", name, wide), ("list", name, wide) or ("scalar", dtype, value). `wide`: indexed with 64 bits. Constants are in the
machine code, so that no launch passes them.
"""


@dataclass(frozen=True, kw_only=True)
class LaunchStep:
    """One of the functions that a candidate launches in a row."""

    grid: tuple[int, int, int]
    """Blocks."""
    arguments: tuple[Argument, ...]
    """In the order of the function's parameters."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is needed to run one artifact on the current problem."""

    fingerprint: str
    """Key of the loaded machine code."""
    steps: tuple[LaunchStep, ...]
    """What is launched, in order; the machine code has a function for each."""
    scratch: tuple[ArraySpec, ...]
    """Arrays it takes besides those of the problem."""
    tolerance: Tolerance
    """How close to the reference its result must be."""
    tile: tuple[int, int]
    """Rows and columns of the tiles that errors are taken over."""


def launch_of(kernel: KernelClass, p: Problem, s: Schedule, device: Any, fingerprint: str) -> Launch:
    """What launching a schedule takes.

    Args:
        kernel: declares it.
        p: the problem.
        s: the schedule.
        device: anything with `sm_count` and `arch`, for the grid.
        fingerprint: of its machine code.

    Raises:
        DeclarationError: the declaration gives no launch.
    """
    from tiledsched.core.launches import scratch, steps

    found = steps(kernel, p, s, device)
    plain = tuple(
        LaunchStep(
            grid=step.grid,
            arguments=tuple(
                ("scalar", each.dtype, each.value) if each.kind == "scalar" else (each.kind, each.name, each.wide)
                for each in step.arguments
                if each.kind != "constant"
            ),
        )
        for step in found
    )
    return Launch(
        fingerprint=fingerprint,
        steps=plain,
        scratch=scratch(kernel, p, s, found),
        tolerance=kernel.tolerance(p, s),
        tile=kernel.check_tile(p, s),
    )
