"""Measures what is not known of a call: builds the programs, compares their outputs where asked, and races them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.errors import Failure, FailureKind, MeasureError, first_line
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Batch, Candidate, Checked, Measurement
from tiledsched.measure.timing import LEAST_REST, SHORT_US, sample_rounds
from tiledsched.remember.answers import PASSING, REGIME, SPACE, Answers, Findings, StoredTime, class_of
from tiledsched.remember.comparing import OutputComparison
from tiledsched.remember.description import Call
from tiledsched.remember.machine import CallProgram, SearchMachine
from tiledsched.store.records import BuildRecord, Entry, Toolchain
from tiledsched.tuning.race import RaceResult, Rules, race

RULES = Rules(most_rounds=23, short_factor=2, precision=0.005)
"""Fewer rounds than a tune takes: a caller waits for the answer. Programs that differ by less than the rules tell are ties."""
SHORT_GAP_S, GAP_S = 0.001, 0.003
"""From one timed launch to the next, below and above `SHORT_US`."""
LOOKS = 2
"""Launches of a first look, of which the faster counts."""
MARKS: tuple[tuple[str, FailureKind], ...] = (
    ("out of memory", FailureKind.OUT_OF_MEMORY),
    ("outofmemory", FailureKind.OUT_OF_MEMORY),
    ("launchtimeout", FailureKind.HANG),
    ("compilertimeout", FailureKind.COMPILE_TIMEOUT),
    ("illegal", FailureKind.ILLEGAL_ADDRESS),
    ("misaligned", FailureKind.ILLEGAL_ADDRESS),
    ("return code -", FailureKind.COMPILER_KILLED),
    ("tile", FailureKind.COMPILE_ERROR),
)
"""What stands in an error's type or message, in lower case, for each kind of failure."""


class Measuring:
    """The measurements of one call, in the caller's process and on the caller's arrays.

    It is the runner of its race (see `tiledsched.measure.runner.Runner`).

    Args:
        machine: builds, launches and times.
        call: the call.
        problem: its problem.
        known: what is stored of it, which is added to.
        incumbent: the fastest of the call's schedules by what is stored; None where nothing is.
        programs: what was built: every schedule that is not known, the incumbent, and the first one where outputs are compared.
    """

    name = "gpu"
    regimes = frozenset(["burst"])

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
        self.device = machine.device()
        self.device_name = self.device.name
        self.errors: dict[Schedule, Exception] = {}
        """What went wrong, by schedule."""
        self._failures: dict[Schedule, Failure] = {}
        self._accuracies: dict[Schedule, Accuracy] = {}
        self._concurrent_pids: tuple[int, ...] = ()
        self._rng = random.Random(0)
        self._looks: dict[Schedule, float] = {}
        self._launched: set[Schedule] = set()

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
                    arch=self.device.arch,
                    problem=self._problem,
                    device_name=self.device_name,
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
            alone=not self._concurrent_pids,
            problem=self._problem,
            device=self.device,
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

    def _fail(self, schedule: Schedule, error: Exception) -> Failure:
        self.errors[schedule] = error
        self._failures[schedule] = failure = Failure(kind=kind_of(error), message=first_line(error))
        return failure

    def _failed(self, schedule: Schedule, error: Exception) -> Failure:
        """The failure of a launch, after which the GPU must still be usable."""
        self._machine.check_gpu(error)
        return self._fail(schedule, error)

    def _build(self, schedule: Schedule, toolchain: Toolchain) -> BuildRecord:
        call, program = self._call, self._programs[schedule]
        return BuildRecord.of(
            program.artifact or self._failures[schedule],
            kernel=call.kernel,
            source_hash=call.source,
            toolchain=toolchain,
            arch=self.device.arch,
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
            try:
                self._launch_first(each)
                compared = comparison.compare(self._programs[each])
            except Exception as error:
                compared = self._failed(each, error)
            if isinstance(compared, Failure):
                self._failures[each] = compared
                self.errors.setdefault(each, ValueError(compared.message))
            else:
                self._accuracies[each] = compared

    def begin(self, problem: Problem) -> None:
        """Nothing: the caller has the arrays."""

    def probe(self, candidate: Candidate) -> float | Failure:
        """The faster of the first launches, in microseconds; a failure where the program does not run."""
        program = self._programs[candidate.schedule]
        try:
            self._launch_first(candidate.schedule)
            watch = self._machine.stopwatch([program], self._call.request)
            looks = [watch.read(watch.queue(0, paced=True)) for _ in range(LOOKS)]
        except MeasureError:
            raise
        except Exception as error:
            return self._failed(candidate.schedule, error)
        self._looks[candidate.schedule] = min(looks)
        return min(looks)

    def _launch_first(self, schedule: Schedule) -> None:
        if schedule not in self._launched:
            self._machine.first_launch(self._programs[schedule], self._call.request)
            self._launched.add(schedule)

    def check(self, candidate: Candidate) -> Checked | Failure:
        """Nothing: where outputs are compared, they are before the race."""
        return Checked(accuracy=None, first_look_us=self._looks[candidate.schedule])

    def sample(self, candidates: Sequence[Candidate], *, rounds: int, regime: str) -> list[Batch | Failure]:
        """Samples of each candidate, taken in turn; failures where a launch failed."""
        programs = [self._programs[each.schedule] for each in candidates]
        slowest_us = max((self._looks.get(each.schedule, 0.0) for each in candidates), default=0.0)
        gap_s = max(SHORT_GAP_S if slowest_us < SHORT_US else GAP_S, LEAST_REST * slowest_us / 1e6)
        log = self._machine.log()
        watch = self._machine.stopwatch(programs, self._call.request)
        try:
            samples = sample_rounds(
                watch, len(programs), rounds=rounds, regime=regime, rng=self._rng, log=log, gap_s=gap_s
            )
        except MeasureError:
            raise
        except Exception as error:  # of which of them is not known: each has run before
            return [self._failed(each.schedule, error) for each in candidates]
        conditions = replace(log.summary(), gap_ms=gap_s * 1e3)
        self._concurrent_pids = conditions.concurrent_pids or self._concurrent_pids
        alone = replace(conditions, concurrent_pids=())
        return [Batch(samples_us=tuple(values), conditions=alone) for values in samples]

    def close(self) -> None:
        """Nothing is held."""

    def _race(self, racing: Sequence[Schedule]) -> RaceResult:
        """Race programs. Of a tie the incumbent wins, or else the first in the caller's order."""
        candidates = [
            Candidate(schedule=each, artifact=artifact)
            for each in racing
            if (artifact := self._programs[each].artifact) is not None
        ]
        order = [*([self._incumbent] if self._incumbent else []), *self._call.schedules]
        return race(self, self._problem, candidates, preference=list(dict.fromkeys(order)), rules=RULES)

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
        served, elsewhere = self._before.times.get(self._before.winner), self._before.winner not in self._call.places
        return elsewhere and served is not None and served.median_us < self.answers.times[winner.id].median_us


def kind_of(error: BaseException) -> FailureKind:
    """The kind of failure that an exception of a build or a launch is."""
    text = first_line(error).lower()
    return next((kind for mark, kind in MARKS if mark in text), FailureKind.LAUNCH_FAILURE)
