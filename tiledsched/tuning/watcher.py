"""Who is told of the progress of a tune."""

from __future__ import annotations

from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule


class Watcher:
    """Is told of progress, and shows nothing. The bars of the command line do."""

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """A stage of `total` steps begins."""

    def step(self, done: int) -> None:
        """`done` steps of it are done."""

    def best(self, us: float, schedule: Schedule) -> None:
        """A schedule is the best so far; `us` is measured, or estimated where nothing is measured."""
