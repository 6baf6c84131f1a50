"""Record landscapes: measure a broad choice of one problem's programs, so that search and reports can be replayed.

A tuner visits good regions and drops the rest; a landscape should show the whole space. So the schedules are chosen before
anything is measured, every program that is not hopeless gets several samples, and then the fastest ones get more.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import NoValidScheduleError
from tiledsched.core.groups import firsts
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.measure.clocks import describe_throttling, summarise_throttling
from tiledsched.measure.runner import LAUNCHED, Device, Failed, Measurement, Runner
from tiledsched.store.exchange import export_landscape, landscape_file_name
from tiledsched.tuning.builder import Builder, Key, Program, deadlines
from tiledsched.tuning.options import RecordOptions
from tiledsched.tuning.race import Outcome, Rules, race

COVERAGE = 0.05
"""Share of the planned schedules that every value of every knob gets, where the constraints leave enough of them."""
FIELD = Rules(hopeless_ratio=4.0, opening_rounds=6, most_rounds=6, check_all=True)
"""Rules for all programs: six samples each, or only a first look where that takes four times the best."""
LEADERS = Rules(hopeless_ratio=math.inf, opening_rounds=30, most_rounds=30)
"""Rules for programs near the best: thirty samples each, interleaved."""
SUSTAINED = Rules(hopeless_ratio=math.inf, opening_rounds=60, most_rounds=60, group=256)
"""The fastest in the sustained regime: all in one group, so that every round pairs them."""
LEADER_RATIO = 1.10
"""A leader's median is within this ratio of the best."""
BATCH = 64
"""Programs raced at once; a batch is stored before the next begins."""
Value = tuple[str, str]
"""(knob, value as text): True is not 1."""


def plan(
    space: SearchSpace,
    problem: Problem,
    *,
    seeds: Sequence[Schedule] = (),
    pinned: Mapping[str, KnobValue] | None = None,
    seed: int = 0,
    deadline_s: float = math.inf,
) -> Iterator[Schedule]:
    """Every valid schedule once, in the order in which they are worth recording; the same `seed`, the same order. Of a space that
    cannot be listed by `deadline_s` (`time.monotonic()`), or is too large, it is some of them.

    First the default and the `seeds` (completed where an older space lacked a knob; invalid ones are left out). Then by
    turns a schedule one knob away from one of those, the default's neighbours first, and one from the whole space: one
    with the knob value that is rarest so far if that is below COVERAGE, else a random one. Random means by a hash of
    the schedule, so that problems with different constraints still share most of their plan.
    """
    pinned = dict(pinned or {})
    ranked = sorted(
        space.listed(problem, pinned=pinned, deadline_s=deadline_s)[0], key=lambda schedule: _rank(schedule, seed)
    )
    if not ranked:
        return
    left = dict.fromkeys(ranked)  # what is still to come, in random order
    counts = Counter({value: 0 for schedule in ranked for value in _values(schedule)})  # of each value, in the plan
    waiting = {value: _having(ranked, value) for value in counts}

    def take(schedule: Schedule) -> Schedule:
        del left[schedule]
        counts.update(value for value in _values(schedule) if value in counts)
        return schedule

    def rarest() -> Schedule | None:
        """One with the rarest value; None where every value has its share."""
        planned = len(ranked) - len(left)
        for value, count in sorted(counts.items(), key=lambda item: (item[1], item[0])):
            if count >= COVERAGE * (planned + 1):
                return None
            found = next((each for each in waiting[value] if each in left), None)
            if found is not None:
                return found
            del counts[value]  # all schedules with it are in the plan
        return None

    default = space.default(problem, pinned=pinned)
    centres = [default]
    for each in seeds:
        fitted = space.complete(each)
        centres.append(default.replace(**{name: fitted[name] for name in space.knobs if name not in pinned}))
    for centre in dict.fromkeys(centres):
        if centre in left:
            yield take(centre)
    near = (
        centre.replace(**{name: value})
        for centre in dict.fromkeys(centres)
        for name, knob in space.knobs.items()
        for value in knob.choices
        if name not in pinned
    )
    while left:
        neighbour = next((each for each in near if each in left), None)
        if neighbour is not None:
            yield take(neighbour)
        if left:
            yield take(rarest() or next(iter(left)))


def _having(ranked: Sequence[Schedule], value: Value) -> Iterator[Schedule]:
    return (schedule for schedule in ranked if value in _values(schedule))


def _rank(schedule: Schedule, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{schedule.id}".encode(), digest_size=8).digest()


def _values(schedule: Schedule) -> list[Value]:
    return [(name, repr(value)) for name, value in schedule.items()]


@dataclass(frozen=True, kw_only=True)
class LandscapeFile:
    """One landscape file that was written."""

    path: Path
    """Where it lies."""
    device_name: str
    """Where it was measured."""
    regime: str
    """burst or sustained."""
    distinct_programs: int
    """Programs in it."""
    best_us: float
    """Median of the fastest."""
    best_tflops: float
    """Rate of the fastest, in TFLOP/s."""
    worst_ratio: float
    """Time of the slowest program / time of the fastest."""


@dataclass(frozen=True, kw_only=True)
class RecordResult:
    """What was recorded of one problem."""

    problem: Problem
    """What is computed."""
    schedules: int
    """Schedules planned and built."""
    programs: int
    """Distinct programs among them; fewer than wanted where the space or the budget holds no more."""
    wanted: int
    """Distinct programs wanted."""
    compiled: int
    """Compiler runs this took."""
    measured: int
    """Measurements taken in this run, both regimes."""
    failed_builds: int
    """Schedules that did not build."""
    failed_programs: int
    """Programs that did not run or computed wrongly."""
    complete: bool
    """Whether every program was measured (or failed); False with a budget that ended first, and for builds only."""
    files: tuple[LandscapeFile, ...]
    """Landscapes written, burst first."""

    @property
    def failed(self) -> int:
        """Failures of both kinds."""
        return self.failed_builds + self.failed_programs


class Recorder:
    """Records landscapes of one kernel on one GPU. Without a runner it builds and measures nothing.

    Everything is stored as it happens. A later run builds what is not built and measures what has too few samples by
    this device; nothing else.
    """

    def __init__(
        self,
        builder: Builder,
        space: SearchSpace,
        options: RecordOptions,
        *,
        run_id: int,
        runner: Runner | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.builder, self.space, self.options, self.run_id, self.runner = builder, space, options, run_id, runner
        self.say = progress or (lambda line: None)
        self._pinned = accuracy_class(space, options.accum_mode or Settings().accum_mode)
        self._plans: dict[tuple[object, ...], Iterator[Schedule]] = {}

    def record(self, problems: Sequence[Problem], folder: Path) -> Iterator[RecordResult]:
        """Record every problem in turn and write its landscapes to `folder`; a result as each is done.

        Raises:
            NoValidScheduleError: for some problem no schedule is valid or builds; those before it are written.
        """
        for deadline_s, problem in zip(deadlines(self.options.budget_s, len(problems)), problems, strict=True):
            yield _Recording(self, problem, deadline_s).run(folder)

    def plan(self, problem: Problem, deadline_s: float) -> Iterator[Schedule]:
        """The planned order of a problem, of the schedules that are listed by `deadline_s`.

        Problems of one class that the constraints cannot tell apart share one, because enumerating a space takes seconds.
        """
        read = {name for constraint in self.space.constraints for name in constraint.names}
        kind = problem.declaration.similarity.kind
        values = self.space.constraint_values(problem)
        key = (kind(problem), *(values[name] for name in values if name in read))
        if key not in self._plans:
            known = self.builder.db.entries(self.space.arch, problem.kernel)
            seeds = [entry.schedule for entry in known if kind(entry.problem) == kind(problem)]
            self._plans[key] = plan(
                self.space, problem, seeds=seeds, pinned=self._pinned, seed=self.options.seed, deadline_s=deadline_s
            )
        self._plans[key], order = itertools.tee(self._plans[key])
        return order


class _Recording:
    """The recording of one problem: its programs, what is known of them, and what is left to do."""

    def __init__(self, recorder: Recorder, problem: Problem, deadline_s: float) -> None:
        self.recorder, self.problem, self.deadline_s = recorder, problem, deadline_s
        self.builder, self.space, self.runner = recorder.builder, recorder.space, recorder.runner
        self.device: Any = self.runner.device if self.runner else arch_spec(self.space.arch)
        self.planned: list[Schedule] = []
        self.programs: dict[Key, Program] = {}
        self.known: dict[str, dict[Key, Measurement]] = {}
        self.broken: set[Key] = set()
        self.compiled = self.measured = 0
        self.begun = False

    def run(self, folder: Path) -> RecordResult:
        """Build the programs, measure them where there is a GPU, and write the landscapes."""
        self.build()
        complete, files = False, list[LandscapeFile]()
        if self.runner is not None:
            try:
                complete = self.measure(self.runner)
            finally:  # what an interrupt left is a landscape, too
                files = self.write(folder)
        builds = [self.builder.record(schedule, self.problem) for schedule in self.planned]
        return RecordResult(
            problem=self.problem,
            schedules=len(self.planned),
            programs=len(self.programs),
            wanted=self.recorder.options.programs,
            compiled=self.compiled,
            measured=self.measured,
            failed_builds=sum(bool(build and build.failure) for build in builds),
            failed_programs=len(self.broken),
            complete=complete,
            files=tuple(files),
        )

    def late(self) -> bool:
        """Whether the time for this problem is up."""
        return time.monotonic() > self.deadline_s

    def build(self) -> None:
        """Build schedules in planned order until there are enough distinct programs."""
        order, wanted, say = (
            self.recorder.plan(self.problem, self.deadline_s),
            self.recorder.options.programs,
            self.recorder.say,
        )
        batch, programs = max(16, 4 * self.builder.pool.jobs), list[Program]()
        while len(programs) < wanted and not (programs and self.late()):
            new = list(itertools.islice(order, batch))
            if not new:
                break
            self.compiled += self.builder.build(new, self.problem, deadline_s=self.deadline_s)
            self.planned += new
            programs = self.builder.programs(self.planned, self.problem, self.device)
            say(f"{self.problem}: built {len(self.planned)} schedules, {len(programs)} of {wanted} programs")
        if not programs:
            why = f"none of {len(self.planned)} schedules builds" if self.planned else "no schedule is valid"
            records = (self.builder.record(schedule, self.problem) for schedule in self.planned)
            message = next((f": {record.failure.message}" for record in records if record and record.failure), "")
            raise NoValidScheduleError(
                f"{why} for {self.problem} on {self.space.arch}{message}; run: tiledsched doctor"
            )
        if len(programs) < wanted:
            say(f"{self.problem}: only {len(programs)} distinct programs could be had, {wanted} were asked for")
        self.programs = {program.key: program for program in programs[:wanted]}

    def measure(self, runner: Runner) -> bool:
        """Measure all programs, then the leaders, then the fastest in the sustained regime; whether everything was done."""
        self.known = {
            regime: {
                key: one
                for key, one in self.taken(regime).items()
                if key in self.programs and not describe_throttling(one.conditions, one.device, regime)
            }
            for regime in LAUNCHED
        }
        burst, sustained = self.known["burst"], self.known["sustained"]
        broken = set(self.builder.broken(self.problem, runner.device.name))
        self.broken = {
            key
            for key, program in self.programs.items()
            if key not in burst and broken & {(schedule, program.fingerprint) for schedule in program.schedules}
        }
        field = [key for key in self.programs if key not in self.broken and not _in_field(burst.get(key))]
        for start in range(0, len(field), BATCH):
            if not self.race(runner, field[start : start + BATCH], FIELD, "burst"):
                return False
        raced: list[Key] = []
        while (lacking := self.lacking()) and lacking != raced:  # a leader's new median may bring others near
            if not self.race(runner, lacking, LEADERS, "burst"):
                return False
            raced = lacking
        fastest = sorted(burst, key=lambda key: (burst[key].median_us, key))
        fastest = fastest[: self.recorder.options.sustained_leaders]
        enough = SUSTAINED.opening_rounds
        known = all(key in sustained and len(sustained[key].samples_us) >= enough for key in fastest)
        if not known and not self.race(
            runner, fastest, SUSTAINED, "sustained"
        ):  # all again: only one race compares them
            return False
        return all(key in burst or key in self.broken for key in self.programs)

    def lacking(self) -> list[Key]:
        """Leaders with too few samples."""
        limit_us = LEADER_RATIO * self.best_us()
        return [
            key
            for key, one in self.known["burst"].items()
            if one.median_us <= limit_us and len(one.samples_us) < LEADERS.opening_rounds
        ]

    def best_us(self) -> float:
        """Least time in the burst regime so far; infinite where nothing is measured."""
        return min((one.median_us for one in self.known["burst"].values()), default=math.inf)

    def race(self, runner: Runner, keys: Sequence[Key], rules: Rules, regime: str) -> bool:
        """Measure some programs against each other, and store them; False once the time is up."""
        if self.late():
            return False
        if not self.begun:
            runner.begin(self.problem)
            self.begun = True
        result = race(
            runner,
            self.problem,
            self.builder.candidates(self.programs[key] for key in keys),
            rules=rules,
            regime=regime,
            known_us=self.best_us() if regime == "burst" else math.inf,
            deadline_s=self.deadline_s,
            on_outcome=lambda outcome: self.keep(runner, outcome, regime),
        )
        say = self.recorder.say
        if result.disturbance:
            say(f"{self.problem}: left, because all is timed {result.disturbance}; end it and run again")
        done = sum(key in self.known["burst"] or key in self.broken for key in self.programs)
        say(f"{self.problem}: {regime}, {done} of {len(self.programs)} programs measured")
        slowed = summarise_throttling(outcome for outcome in result.outcomes if isinstance(outcome, Measurement))
        if slowed:
            say(f"{self.problem}: clock held down {slowed}")
        return not result.disturbance and not self.late()

    def keep(self, runner: Runner, outcome: Outcome, regime: str) -> None:
        """Store one outcome, at once."""
        self.builder.keep(outcome, self.recorder.run_id, self.problem, runner.device)
        key = self.key(outcome, runner.device)
        if isinstance(outcome, Failed):
            self.broken.add(key)
            self.known[regime].pop(key, None)
        elif not outcome.conditions.concurrent_pids:
            self.measured += 1
            self.known[regime][key] = outcome

    def key(self, outcome: Outcome, device: Device) -> Key:
        """The program of an outcome on a device; its schedule may be of an older space."""
        schedule = self.space.complete(outcome.schedule)
        return outcome.fingerprint, self.builder.kernel.grids(self.problem, schedule, device)

    def taken(self, regime: str) -> dict[Key, Measurement]:
        """The newest measurement of each program on this device."""
        stored = self.builder.db.measurements(self.problem, self.space.arch, self.device.name, regime)
        return firsts((self.key(each.measurement, each.measurement.device), each.measurement) for each in stored)

    def write(self, folder: Path) -> list[LandscapeFile]:
        """One file for each regime with measurements, burst first."""
        files = []
        for regime in LAUNCHED:
            times_us = [one.median_us for one in self.taken(regime).values()]
            if times_us:
                path = folder / landscape_file_name(self.problem, self.device.name, regime)
                export_landscape(self.builder.db, path, self.problem, self.device.name, regime)
                files.append(
                    LandscapeFile(
                        path=path,
                        device_name=self.device.name,
                        regime=regime,
                        distinct_programs=len(times_us),
                        best_us=min(times_us),
                        best_tflops=self.problem.tflops(min(times_us)),
                        worst_ratio=max(times_us) / min(times_us),
                    )
                )
        return files


def _in_field(known: Measurement | None) -> bool:
    """Whether a program needs no more samples: it has them, or it was hopeless and therefore not even checked."""
    return known is not None and (known.accuracy is None or len(known.samples_us) >= FIELD.opening_rounds)
