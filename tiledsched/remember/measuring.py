"""Measures what is not known of a call: builds the programs, compares their outputs where asked, and races them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.blame import first_line
from tiledsched.core.errors import Failure
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Candidate, Measurement
from tiledsched.remember.answers import PASSING, REGIME, SPACE, Answers, Findings, StoredTime, class_of
from tiledsched.remember.comparing import OutputComparison
from tiledsched.remember.description import Call
from tiledsched.remember.machine import CallProgram, SearchMachine
from tiledsched.remember.timing import RULES, CallRunner, kind_of
from tiledsched.store.records import BuildRecord, Entry, Toolchain
from tiledsched.tuning.race import RaceResult, race


class Measuring:
    """The measurements of one call.

    Args:
        machine: builds, launches and times.
        call: the call.
        problem: its problem.
        known: what is stored of it, which is added to.
        incumbent: the fastest of the call's schedules by what is stored; None where nothing is.
        programs: what was built: every schedule that is not known, the incumbent, and the first one where outputs are compared.
    """

    def __init__(
        self,
        machine: SearchMachine,
        call: Call,
        problem: Problem,
        known: Answers,
        incumbent: Schedule | None,
        programs: dict[Schedule, CallProgram],
    ) -> None:
        self._machine, self._call, self._problem, self._programs = machine, call, problem, programs
        self._incumbent, self.answers = incumbent, known
        self._before = replace(known, times=dict(known.times))
        self.errors: dict[Schedule, Exception] = {}
        """What went wrong, by schedule."""
        self._failures: dict[Schedule, Failure] = {}
        self._accuracies: dict[Schedule, Accuracy] = {}
        self._runner = CallRunner(machine, machine.device(), programs, call.request)

    def measure(self) -> Findings:
        """Measure, and add to what is known."""
        call = self._call
        for schedule, program in self._programs.items():
            if program.artifact is None:
                self._fail(schedule, program.error or RuntimeError("it was not compiled"))
        not_built = set(self._failures)
        heads = self._heads()
        racing = [each for each, head in heads.items() if each == head]
        if call.request.check:
            self._compare(racing if call.schedules[0] not in heads else [call.schedules[0], *racing])
            racing = [each for each in racing if each not in self._failures]
        new = [each for each in racing if each != self._incumbent]
        result = self._race(racing) if new else None
        measured = [
            replace(each, accuracy=self._accuracies.get(each.schedule))
            for each in (result.outcomes if result else ())
            if isinstance(each, Measurement)
        ]
        for taken in measured:
            self.answers.times[taken.schedule.id] = StoredTime(
                median_us=taken.median_us,
                ci_low_us=taken.ci_low_us,
                ci_high_us=taken.ci_high_us,
                samples=len(taken.samples_us),
                checked=taken.accuracy is not None,
            )
        measured += self._equals(heads, measured)
        toolchain, entry = self._machine.toolchain(), None
        if result is not None and result.winner is not None:
            winner = result.winner.schedule
            self.answers.winner, self.answers.space = winner.id, call.space
            if not self._other_stays(winner):
                entry = Entry(
                    kernel=call.kernel,
                    arch=self._runner.device.arch,
                    problem=self._problem,
                    device_name=self._runner.device_name,
                    regime=REGIME,
                    provenance="measured",
                    schedule=winner,
                    fingerprint=result.winner.fingerprint,
                    runner_up=result.runner_up.schedule if result.runner_up else None,
                    margin=result.margin,
                    ties=result.ties,
                    candidates=len(set(self.answers.programs.values())) + len(new),
                    source=f"exhaustive_search of {len(call.schedules)} configurations, {SPACE}{call.space}",
                    toolchain=toolchain,
                    source_hash=call.source,
                )
        self.answers.failures |= {each.id: failure for each, failure in self._failures.items()}
        return Findings(
            answers=self.answers,
            alone=not self._runner.concurrent_pids,
            problem=self._problem,
            device=self._runner.device,
            toolchain=toolchain,
            builds=[self._build(each, toolchain) for each in self._programs],
            measured=measured,
            failed=[
                (each, failure)
                for each, failure in self._failures.items()
                if each not in not_built and failure.kind not in PASSING
            ],
            entry=entry,
        )

    def _fail(self, schedule: Schedule, error: Exception) -> None:
        self.errors[schedule] = error
        self._failures[schedule] = Failure(kind=kind_of(error), message=first_line(error))

    def _build(self, schedule: Schedule, toolchain: Toolchain) -> BuildRecord:
        call, program = self._call, self._programs[schedule]
        return BuildRecord.of(
            program.artifact or self._failures[schedule],
            kernel=call.kernel,
            source_hash=call.source,
            toolchain=toolchain,
            arch=self._runner.device.arch,
            schedule=schedule,
            problem_class=class_of(self._problem, call.grids[call.places[schedule.id]]),
            seconds=program.seconds,
        )

    def _heads(self) -> dict[Schedule, Schedule]:
        """For each schedule that was built, the first one with the same program. A new one whose program is stored is given the
        stored time, and left out."""
        call, answers = self._call, self.answers
        first: dict[Any, Schedule] = {}
        found: dict[Schedule, Schedule] = {}
        stored = {program: each for each, program in answers.programs.items() if each in answers.times}
        for each in sorted(self._programs, key=lambda each: (each != self._incumbent, call.places[each.id])):
            program = self._programs[each]
            if program.artifact is None:
                continue
            key = class_of(self._problem, call.grids[call.places[each.id]]).id, program.artifact.fingerprint
            if each.id not in answers.times and key in stored and not program.numbers:
                answers.times[each.id], answers.programs[each.id] = answers.times[stored[key]], key
            else:
                found[each] = first.setdefault((key, program.numbers), each)
        return found

    def _compare(self, schedules: Sequence[Schedule]) -> None:
        """Compare outputs with those of the first of the schedules that runs."""
        comparison = OutputComparison(self._machine, self._call.request)
        for each in dict.fromkeys(schedules):
            compared = self._runner.compare(each, comparison)
            if isinstance(compared, Failure):
                self._failures[each] = compared
                self.errors[each] = self._runner.errors.get(each, ValueError(compared.message))
            else:
                self._accuracies[each] = compared

    def _race(self, racing: Sequence[Schedule]) -> RaceResult:
        """Race programs. Of a tie the incumbent wins, or else the first in the caller's order."""
        candidates = [
            Candidate(schedule=each, artifact=artifact)
            for each in racing
            if (artifact := self._programs[each].artifact) is not None
        ]
        order = [*([self._incumbent] if self._incumbent else []), *self._call.schedules]
        result = race(self._runner, self._problem, candidates, preference=list(dict.fromkeys(order)), rules=RULES)
        for each, error in self._runner.errors.items():
            if each not in self._failures:
                self._fail(each, error)
        return result

    def _equals(self, heads: dict[Schedule, Schedule], measured: Sequence[Measurement]) -> list[Measurement]:
        """Give schedules the outcome of the first one with the same program. Returned are measurements to store: of schedules
        whose machine code alone does not tell them from programs that are launched with other numbers."""
        of_head = {taken.schedule: taken for taken in measured}
        found = []
        for each, head in heads.items():
            if each == head:
                continue
            if head.id in self.answers.times:
                self.answers.times.setdefault(each.id, self.answers.times[head.id])
                if head in of_head and self._programs[each].numbers:
                    found.append(replace(of_head[head], schedule=each))
            elif head in self._failures:
                self.answers.failures[each.id] = self._failures[head]
                self.errors[each] = self.errors[head]
        return found

    def _other_stays(self, winner: Schedule) -> bool:
        """Whether a schedule is served that this call does not have, and that is faster than the call's winner."""
        served = self._before.times.get(self._before.winner)
        there = served is not None and self._before.winner not in self._call.places
        return there and served is not None and served.median_us < self.answers.times[winner.id].median_us
