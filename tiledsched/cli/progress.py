"""The progress of a tune on standard error: a bar, the best schedule so far and the time left; off a terminal a few lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tiledsched.cli.output import note
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule

MODELLED_STAGE = "compiling"
"""The stage in which the best schedule is the model's estimate, because no GPU takes part in it."""


class TuneProgress:
    """Shows how much is done, the best schedule so far and the time left.

    On a terminal that is a bar; elsewhere a line when a stage begins and at each quarter of it.

    Args:
        problems: how many problems are tuned; 0 where that is not known.
        budget_s: seconds that the whole run may take; None for no limit.
        console: where the bar is drawn; standard error unless given.
        clock: seconds since any moment.
    """

    def __init__(
        self,
        problems: int = 0,
        budget_s: float | None = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        console, self._clock = console or Console(stderr=True), clock
        self._terminal = console.is_terminal
        self._bars = _Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not self._terminal,
            expand=True,
            transient=True,
        )
        self._problems, self._seen = problems, dict[Problem, None]()
        self._ends = math.inf if budget_s is None else clock() + budget_s
        self._task: TaskID | None = None
        self._what, self._total, self._quarters, self._started = "", 0, 0, 0.0
        self._best, self._modelled = "", False

    def __enter__(self) -> TuneProgress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """Begin a stage: draw a new bar, or print a line."""
        if problem not in self._seen:
            self._seen[problem], self._best = None, ""
        self._what, self._total, self._quarters, self._started = f"{problem}: {what}", total, 0, self._clock()
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
        """Move the bar, or at each quarter print how far the stage is."""
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
        """Show the best schedule so far below the bar, or with the next line."""
        self._best = f"best so far {us:.1f} us{' (modelled)' if self._modelled else ''}: {schedule.short()}"
        self._bars.lines[1:] = [self._best]

    def _left(self, done: int) -> str:
        """The time left of the stage at its pace so far, or of the budget where that ends first. Empty where neither is known."""
        now = self._clock()
        seconds = (now - self._started) / done * (self._total - done) if done else math.inf
        seconds = min(seconds, max(0.0, self._ends - now))
        return f"{timedelta(seconds=round(seconds))} left" if 0 < seconds < math.inf else ""


class _Bars(Progress):
    """A bar between two lines: the problem, and the best schedule so far."""

    lines: list[str]

    def __init__(self, *columns: TextColumn | BarColumn | MofNCompleteColumn, **more: object) -> None:
        self.lines = []
        super().__init__(*columns, **more)  # type: ignore[arg-type]

    def get_renderables(self) -> Iterable[RenderableType]:
        """What rich draws: the line above the bar, the bar, and the lines below it."""
        above, *below = [Text(line) for line in self.lines] or [Text()]
        yield above
        yield self.make_tasks_table(self.tasks)
        yield from below
