"""The progress of a tune on standard error: a bar, the best schedule so far and the time left; off a terminal a few lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from tiledsched.cli.output import note
from tiledsched.core.files import printable
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.tuning.results import Watcher

LINE_EVERY_S = 2.0
"""Seconds between two lines of progress off a terminal."""
MODELLED_STAGE = "compiling"
"""The stage in which the best schedule is the model's estimate, because no GPU takes part in it."""


class TuneProgress(Watcher):
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
        self._console, self._clock = console or Console(stderr=True), clock
        columns = BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
        self._bar = Progress(TextColumn("{task.description}", markup=False), *columns, expand=True)
        self._task = self._bar.add_task("", left="")
        self._live = Live(self, console=self._console, transient=True)
        self._problems, self._seen = problems, dict[Problem, None]()
        self._ends = math.inf if budget_s is None else clock() + budget_s
        self._title, self._what, self._total, self._quarters, self._started = "", "", 0, 0, 0.0
        self._best, self._modelled = "", False

    def __enter__(self) -> TuneProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def __rich__(self) -> Group:
        """What a terminal shows: the problem, the bar of the stage, and the best schedule so far."""
        return Group(Text(printable(self._title)), self._bar, Text(printable(self._best)))

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """Begin a stage: draw a new bar, or print a line."""
        if problem not in self._seen:
            self._seen[problem], self._best = None, ""
        self._what, self._total, self._quarters, self._started = f"{problem}: {what}", total, 0, self._clock()
        self._modelled = what == MODELLED_STAGE
        place = f"[{len(self._seen)}/{self._problems}] " if self._problems > 1 else ""
        self._title = f"{place}{problem}"
        self._bar.reset(self._task, total=total, description=printable(what), left="")
        if total and not self._console.is_terminal:
            note(f"{self._what} {total}")

    def step(self, done: int) -> None:
        """Move the bar, or at each quarter print how far the stage is."""
        left, quarters = self._left(done), done * 4 // max(1, self._total)
        self._bar.update(self._task, completed=done, left=left)
        if quarters > self._quarters and not self._console.is_terminal:
            self._quarters = quarters
            note(", ".join(filter(None, [f"{self._what} {done}/{self._total}", left, self._best])))

    def best(self, us: float, schedule: Schedule) -> None:
        """Show the best schedule so far below the bar, or with the next line."""
        self._best = f"best so far {us:.1f} us{' (modelled)' if self._modelled else ''}: {schedule.short()}"

    def _left(self, done: int) -> str:
        """The time left of the stage at its pace so far, or of the budget where that ends first. Empty where neither is known."""
        now = self._clock()
        seconds = (now - self._started) / done * (self._total - done) if done else math.inf
        seconds = min(seconds, max(0.0, self._ends - now))
        return f"{timedelta(seconds=round(seconds))} left" if 0 < seconds < math.inf else ""


class Status:
    """Shows what a command does at the moment: one line that changes; off a terminal a line now and then, the first at once."""

    def __init__(self, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock, self._said = console or Console(stderr=True), clock, -math.inf
        self._status = self._console.status("")

    def __enter__(self) -> Status:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.stop()

    def __call__(self, text: str) -> None:
        """Show a line."""
        if self._console.is_terminal:
            self._status.update(Text(printable(text)))
        elif self._clock() - self._said >= LINE_EVERY_S:
            self._said = self._clock()
            note(text)
