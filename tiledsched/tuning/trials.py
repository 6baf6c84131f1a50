"""The trials of one search: what every schedule took, and which of them are one program."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from tiledsched.build.cubin import ResourceFacts
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Measurement
from tiledsched.tuning.inert import InertChanges
from tiledsched.tuning.programs import Builder, Key, Program
from tiledsched.tuning.race import Outcome
from tiledsched.tuning.study import ScheduleStudy


class Trials:
    """Keeps the study informed of one problem: of equal programs only one waits to be measured, and all get its time.

    Args:
        builder: what builds; it knows which schedules are one program.
        problem: what is tuned.
        device: on which grids depend.
        study: who is told.
        times: what the store knows: microseconds, or None for a failure.
        inert: who learns which changes of knobs leave the program as it is.
    """

    def __init__(
        self,
        builder: Builder,
        problem: Problem,
        device: Any,
        study: ScheduleStudy,
        times: Mapping[Schedule, float | None],
        inert: InertChanges,
    ) -> None:
        self._builder, self._problem, self._device, self._study = builder, problem, device, study
        self._inert = inert
        self.times = dict(times)
        self._known = {
            program.key: self.times[program.schedule] for program in builder.programs(list(times), problem, device)
        }
        learn(inert, problem, builder.programs(builder.built(problem, study.space), problem, device), tried=self.times)
        self._waiting: dict[Key, list[Schedule]] = {}
        for schedule, median_us in times.items():
            study.tell(schedule, median_us)

    @property
    def programs(self) -> int:
        """Distinct programs whose outcome is known."""
        return len(self._known)

    @property
    def best(self) -> Schedule | None:
        """The fastest so far; None where nothing worked."""
        worked = {schedule: us for schedule, us in self.times.items() if us is not None}
        return min(worked, key=lambda schedule: worked[schedule], default=None)

    @property
    def best_us(self) -> float:
        """The least time so far; infinite where nothing worked."""
        return min((us for us in self.times.values() if us is not None), default=math.inf)

    def measured(self) -> list[tuple[Schedule, ResourceFacts | None, float]]:
        """Each distinct program that worked: its first schedule, its facts, its microseconds."""
        worked = [schedule for schedule, us in self.times.items() if us is not None]
        return [
            (program.schedule, program.facts, us)
            for program in self._builder.programs(worked, self._problem, self._device)
            if (us := self.times[program.schedule]) is not None
        ]

    def note_builds(self, asked: Sequence[Schedule]) -> int:
        """Take down what became of builds; how many of them failed. A schedule not reached before a deadline is left."""
        failed = 0
        for schedule in asked:
            record = self._builder.record(schedule, self._problem)
            if record is not None and record.failure is not None:
                failed += 1
                self._study.tell(schedule, None)
        programs = self._builder.programs(asked, self._problem, self._device)
        learn(self._inert, self._problem, programs)
        for program in programs:
            if program.key in self._known:
                self._note(program.schedules, self._known[program.key])
            elif program.key in self._waiting:
                self._waiting[program.key] += program.schedules
            else:
                self._waiting[program.key] = list(program.schedules)
                self._study.built(program.schedule, program.facts)
        return failed

    def note_outcomes(self, chosen: Sequence[Schedule], outcomes: Iterable[Outcome]) -> None:
        """Note the outcomes of a batch. A schedule that was chosen and not reached counts as tried, and nothing is learnt from
        it.
        """
        found = {
            outcome.schedule: outcome.median_us if isinstance(outcome, Measurement) else None for outcome in outcomes
        }
        for program in self._builder.programs(chosen, self._problem, self._device):
            waiting = self._waiting.pop(program.key, list(program.schedules))
            if program.schedule in found:
                self._known[program.key] = found[program.schedule]
                self._note(waiting, found[program.schedule])
            else:
                for schedule in waiting:
                    self._study.leave(schedule)

    def _note(self, schedules: Iterable[Schedule], median_us: float | None) -> None:
        for schedule in schedules:
            self.times.setdefault(schedule, median_us)
            self._study.tell(schedule, self.times[schedule])


def learn(
    inert: InertChanges, problem: Problem, programs: Iterable[Program], *, tried: Container[Schedule] | None = None
) -> None:
    """Which of the built schedules of `problem` are one program; all of them were tried, unless it is said which."""
    for program in programs:
        for schedule in program.schedules:
            inert.learn(problem, schedule, program.key, tried=tried is None or schedule in tried)
