"""Schedules of a kernel, run on the CPU in the interpreter and compared with the kernel's reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tiledsched.core.errors import TiledschedError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import load_space, space_for
from tiledsched.tuning.options import CheckOptions
from tiledsched.tuning.problems import Cases, kernel_of, problems_of, small_problems

MAX_DRAWS = 20
"""Draws from the space for each schedule wanted: a small space has fewer valid schedules than are wanted."""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """What one schedule computed for one problem in the interpreter."""

    problem: Problem
    """The problem that was computed."""
    schedule: Schedule
    """The schedule it was computed with."""
    passed: bool
    """Whether every output is right on every kind of inputs."""
    worst_error: float
    """Largest error of a tile; infinite where something was not written, NaN, or the kernel raised."""
    message: str
    """Why it did not pass; empty where it did."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "problem": self.problem.to_json(),
            "schedule": self.schedule.to_json(),
            "passed": self.passed,
            "worst_error": self.worst_error,
            "message": self.message,
        }


def check_problems(
    arch: str, kernel: KernelClass | str, problems: Cases | str | None, options: CheckOptions
) -> Iterator[CheckRow]:
    """A row for each schedule of each problem, as it is known; see :func:`tiledsched.check`."""
    from tiledsched.interpreter.checking import check_schedule

    kernel = kernel_of(kernel)
    wanted = problems_of(kernel, problems) if problems is not None else small_problems(kernel)
    space = load_space(options.space, kernel) if options.space else space_for(arch, kernel)
    for problem in wanted:
        for schedule in _some_schedules(space, problem, options.schedules, options.seed):
            passed, worst, message = check_schedule(kernel, problem, schedule, arch=arch, seed=options.seed)
            yield CheckRow(problem=problem, schedule=schedule, passed=passed, worst_error=worst, message=message)


def _some_schedules(space: SearchSpace, problem: Problem, count: int, seed: int) -> list[Schedule]:
    """The default schedule, and others drawn from the space."""
    rng = random.Random(seed)
    found = {space.default(problem): None}
    for _ in range(MAX_DRAWS * count):
        if len(found) >= count:
            break
        with suppress(TiledschedError):
            found.setdefault(space.sample(problem, rng))
    return list(found)[:count]
