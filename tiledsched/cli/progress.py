"""The bar of a tune, on stderr: the best so far and the time left; off a terminal a few lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tiledsched.cli.output import note
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule

MODELLED_STAGE = "compiling"
"""The stage whose best is the model's estimate: no GPU takes part in it."""


class TuneProgress:
    """What is done, the best so far and the time left; off a terminal a line when a stage begins and at each quarter of it.

    Args:
        problems: how many are to be tuned; 0 where that is not told.
        budget_s: of the whole run; None for no limit.
    """

    def __init__(self, problems: int = 0, budget_s: float | None = None) -> None:
        self._terminal = sys.stderr.isatty()
        self._bars = _Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
            disable=not self._terminal,
            expand=True,
            transient=True,
        )
        self._problems, self._seen = problems, dict[Problem, None]()
        self._ends = math.inf if budget_s is None else time.monotonic() + budget_s
        self._task: TaskID | None = None
        self._what, self._total, self._quarters, self._started = "", 0, 0, 0.0
        self._best, self._modelled = "", False

    def __enter__(self) -> TuneProgress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """A new bar, or a new line."""
        if problem not in self._seen:
            self._seen[problem], self._best = None, ""
        self._what, self._total, self._quarters, self._started = f"{problem}: {what}", total, 0, time.monotonic()
        self._modelled = what == MODELLED_STAGE
        if self._terminal:
            place = f"[{len(self._seen)}/{self._problems}] " if self._problems > 1 else ""
            self._bars.lines = [f"{place}{problem}", self._best]
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            self._task = self._bars.add_task(what, total=total, left="")
        elif total:
            note(f"{self._what} {total}")

    def step(self, done: int) -> None:
        """Move the bar, or say how far it is."""
        left = self._left(done)
        if self._task is not None:
            self._bars.update(self._task, completed=done, left=left)
        elif self._total and done * 4 // self._total > self._quarters:
            self._quarters = done * 4 // self._total
            note(
                "".join(
                    [
                        f"{self._what} {done}/{self._total}",
                        f", {left}" if left else "",
                        f", {self._best}" if self._best else "",
                    ]
                )
            )

    def best(self, us: float, schedule: Schedule) -> None:
        """Show it below the bar, or with the next line."""
        self._best = f"best so far {us:.1f} us{' (modelled)' if self._modelled else ''}: {schedule.short()}"
        self._bars.lines[1:] = [self._best]

    def _left(self, done: int) -> str:
        """Of the stage, at the pace so far; of the budget where that ends first. Empty where nothing can be said yet."""
        now = time.monotonic()
        seconds = (now - self._started) / done * (self._total - done) if done else math.inf
        seconds = min(seconds, max(0.0, self._ends - now))
        return f"{timedelta(seconds=round(seconds))} left" if 0 < seconds < math.inf else ""


class _Bars(Progress):
    """A bar between the problem it is about and the best so far."""

    lines: list[str]

    def __init__(self, *columns: TextColumn | BarColumn | MofNCompleteColumn, **more: object) -> None:
        self.lines = []
        super().__init__(*columns, **more)  # type: ignore[arg-type]

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich for each picture."""
        above, *below = [Text(line) for line in self.lines] or [Text()]
        yield above
        yield self.make_tasks_table(self.tasks)
        yield from below
