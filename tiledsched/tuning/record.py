"""Record landscapes: measure a broad choice of one problem's programs, so that search and reports can be replayed.

A tuner visits good regions and drops the rest; a landscape should show the whole space. So the schedules are chosen before
anything is measured, every program that is not hopeless gets several samples, and then the fastest ones get more.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import NoValidScheduleError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.measure.runner import REGIMES, Failed, Measurement, Runner
from tiledsched.store.exchange import export_landscape, landscape_file_name
from tiledsched.tuning.options import RecordOptions
from tiledsched.tuning.problems import Cases, kernel_of, problems_of
from tiledsched.tuning.programs import RETRIED, Builder, Key, Program, deadlines
from tiledsched.tuning.race import Outcome, Rules, race
from tiledsched.tuning.resources import Resources

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
) -> Iterator[Schedule]:
    """Every valid schedule once, in the order in which they are worth recording; the same `seed`, the same order.

    First the default and the `seeds` (completed where an older space lacked a knob; invalid ones are left out). Then by
    turns a schedule one knob away from one of those, the default's neighbours first, and one from the whole space: one
    with the knob value that is rarest so far if that is below COVERAGE, else a random one. Random means by a hash of
    the schedule, so that problems with different constraints still share most of their plan.
    """
    pinned = dict(pinned or {})
    ranked = sorted(space.schedules(problem, pinned=pinned), key=lambda schedule: _rank(schedule, seed))
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


class PlannedOrder:
    """A planned order, drawn once and shared: enumerating a space takes seconds."""

    def __init__(self, order: Iterator[Schedule]) -> None:
        self._order, self._drawn = order, list[Schedule]()

    def first(self, count: int) -> list[Schedule]:
        """The first `count` schedules; fewer where there are no more."""
        while len(self._drawn) < count:
            found = next(self._order, None)
            if found is None:
                break
            self._drawn.append(found)
        return self._drawn[:count]


@dataclass(frozen=True, kw_only=True)
class LandscapeFile:
    """One landscape file that was written."""

    path: Path
    """Where it lies."""
    problem: Problem
    """What was computed."""
    device_name: str
    """Where it was measured."""
    regime: str
    """burst or sustained."""
    distinct_programs: int
    """Programs in it."""
    best_us: float
    """Median of the fastest."""
    worst_us: float
    """Median of the slowest."""

    @property
    def best_tflops(self) -> float:
        """Rate of the fastest program, in TFLOP/s."""
        return self.problem.tflops(self.best_us)

    @property
    def worst_ratio(self) -> float:
        """Time of the slowest program / time of the fastest."""
        return self.worst_us / self.best_us


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
        self.db, self.kernel = builder.db, builder.kernel
        self.say = progress or (lambda line: None)
        self._batch = max(16, 4 * builder.jobs)
        self._pinned = accuracy_class(space, options.accum_mode or Settings().accum_mode)
        self._plans: dict[tuple[object, ...], PlannedOrder] = {}

    def record(self, problems: Sequence[Problem], folder: Path) -> Iterator[RecordResult]:
        """Record every problem in turn and write its landscapes to `folder`; a result as each is done.

        Raises:
            NoValidScheduleError: for some problem no schedule is valid or builds; those before it are written.
        """
        for deadline_s, problem in zip(deadlines(self.options.budget_s, len(problems)), problems, strict=True):
            yield self._record(problem, folder, deadline_s)

    def _record(self, problem: Problem, folder: Path, deadline_s: float | None) -> RecordResult:
        planned, programs, compiled = self._build(problem, deadline_s)
        builds = [self.builder.record(schedule, problem) for schedule in planned]
        built: dict[str, Any] = {
            "problem": problem,
            "schedules": len(planned),
            "programs": len(programs),
            "wanted": self.options.programs,
            "compiled": compiled,
            "failed_builds": sum(bool(build and build.failure) for build in builds),
        }
        if self.runner is None:
            return RecordResult(**built, measured=0, failed_programs=0, complete=False, files=())
        measuring = _Measuring(self, self.runner, problem, programs, deadline_s)
        try:
            complete = measuring.run()
        finally:  # what an interrupt left is a landscape, too
            files = self._write(problem, self.runner.device.name, folder)
        return RecordResult(
            **built, measured=measuring.measured, failed_programs=len(measuring.failed), complete=complete, files=files
        )

    def _build(self, problem: Problem, deadline_s: float | None) -> tuple[list[Schedule], list[Program], int]:
        """Build schedules in planned order until there are enough distinct programs."""
        order, wanted = self._plan(problem), self.options.programs
        device = self.runner.device if self.runner else arch_spec(self.space.arch)
        planned: list[Schedule] = []
        programs: list[Program] = []
        compiled = 0
        while len(programs) < wanted and not (programs and _late(deadline_s)):
            more = order.first(len(planned) + self._batch)
            if len(more) == len(planned):
                break
            compiled += self.builder.build(more[len(planned) :], problem, deadline_s=deadline_s)
            planned = more
            programs = self.builder.programs(planned, problem, device)
            self.say(f"{problem}: built {len(planned)} schedules, {len(programs)} of {wanted} programs")
        if not programs:
            why = f"none of {len(planned)} schedules builds" if planned else "no schedule is valid"
            raise NoValidScheduleError(f"{why} for {problem} on {self.space.arch}; run: tiledsched doctor")
        if len(programs) < wanted:
            self.say(f"{problem}: only {len(programs)} distinct programs could be had, {wanted} were asked for")
        return planned, programs[:wanted], compiled

    def _plan(self, problem: Problem) -> PlannedOrder:
        """The plan of a problem; problems of one class that the constraints cannot tell apart share one."""
        read = {name for constraint in self.space.constraints for name in constraint.names}
        values = self.space.constraint_values(problem)
        kernel = self.kernel
        key = (kernel.similarity.kind(problem), *(values[name] for name in values if name in read))
        if key not in self._plans:
            seeds = [
                entry.schedule
                for entry in self.db.entries(self.space.arch, kernel.name)
                if kernel.similarity.kind(entry.problem) == kernel.similarity.kind(problem)
            ]
            order = plan(self.space, problem, seeds=seeds, pinned=self._pinned, seed=self.options.seed)
            self._plans[key] = PlannedOrder(order)
        return self._plans[key]

    def _write(self, problem: Problem, device_name: str, folder: Path) -> tuple[LandscapeFile, ...]:
        """One file for each regime with measurements."""
        files = []
        for regime in REGIMES:
            taken = self.taken(problem, device_name, regime)
            if taken:
                path = folder / landscape_file_name(problem, device_name, regime)
                export_landscape(self.db, path, problem, device_name, regime)
                times = [one.median_us for one in taken.values()]
                files.append(
                    LandscapeFile(
                        path=path,
                        problem=problem,
                        device_name=device_name,
                        regime=regime,
                        distinct_programs=len(taken),
                        best_us=min(times),
                        worst_us=max(times),
                    )
                )
        return tuple(files)

    def taken(self, problem: Problem, device_name: str, regime: str) -> dict[Key, Measurement]:
        """The newest measurement of each program on this device."""
        found: dict[Key, Measurement] = {}
        for stored in self.db.measurements(problem, self.space.arch, device_name, regime):
            one = stored.measurement
            key = one.fingerprint, self.kernel.grids(problem, self.space.complete(one.schedule), one.device)
            found.setdefault(key, one)
        return found


class _Measuring:
    """Measures the programs of one problem: knows what was measured before, and what is left to do."""

    def __init__(
        self,
        recorder: Recorder,
        runner: Runner,
        problem: Problem,
        programs: Sequence[Program],
        deadline_s: float | None,
    ) -> None:
        self._recorder, self._runner, self._problem, self._deadline_s = recorder, runner, problem, deadline_s
        self._programs = {program.key: program for program in programs}
        self._known = {
            regime: {
                key: one
                for key, one in recorder.taken(problem, runner.device.name, regime).items()
                if key in self._programs
            }
            for regime in REGIMES
        }
        broken = {
            (failed.fingerprint, failed.schedule)
            for failed in recorder.db.failures(recorder.space.arch, problem, stage="measure")
            if failed.device_name == runner.device.name and failed.failure.kind not in RETRIED
        }
        self.failed = {
            key
            for key, program in self._programs.items()
            if key not in self._known["burst"]
            and any((program.fingerprint, schedule) in broken for schedule in program.schedules)
        }
        self.measured = 0
        self._begun = False

    def run(self) -> bool:
        """The field, then the leaders, then the fastest in the sustained regime; whether everything was done."""
        burst, sustained = self._known["burst"], self._known["sustained"]
        field = [key for key in self._programs if key not in self.failed and not _in_field(burst.get(key))]
        for start in range(0, len(field), BATCH):
            if not self._race(field[start : start + BATCH], FIELD, "burst"):
                return False
        raced: list[Key] = []
        while (lacking := self._lacking()) and lacking != raced:  # a leader's new median may bring others near
            if not self._race(lacking, LEADERS, "burst"):
                return False
            raced = lacking
        fastest = sorted(burst, key=lambda key: (burst[key].median_us, key))
        fastest = fastest[: self._recorder.options.sustained_leaders]
        enough = SUSTAINED.opening_rounds
        known = all(key in sustained and len(sustained[key].samples_us) >= enough for key in fastest)
        if not known and not self._race(fastest, SUSTAINED, "sustained"):  # all again: only one race compares them
            return False
        return all(key in burst or key in self.failed for key in self._programs)

    def _lacking(self) -> list[Key]:
        """Leaders with too few samples."""
        limit_us = LEADER_RATIO * self._best_us()
        return [
            key
            for key, one in self._known["burst"].items()
            if one.median_us <= limit_us and len(one.samples_us) < LEADERS.opening_rounds
        ]

    def _best_us(self) -> float:
        return min((one.median_us for one in self._known["burst"].values()), default=math.inf)

    def _race(self, keys: Sequence[Key], rules: Rules, regime: str) -> bool:
        """Measure some programs against each other, and store them; False once the time is up."""
        if _late(self._deadline_s):
            return False
        if not self._begun:
            self._runner.begin(self._problem)
            self._begun = True
        recorder = self._recorder
        candidates = recorder.builder.candidates(self._programs[key] for key in keys)
        known_us = self._best_us() if regime == "burst" else math.inf
        result = race(
            self._runner,
            self._problem,
            candidates,
            rules=rules,
            regime=regime,
            known_us=known_us,
            deadline_s=self._deadline_s,
            on_outcome=lambda outcome: self._keep(outcome, regime),
        )
        if result.disturbance:
            recorder.say(f"{self._problem}: left, because all is timed {result.disturbance}; end it and run again")
        done = sum(key in self._known["burst"] or key in self.failed for key in self._programs)
        recorder.say(f"{self._problem}: {regime}, {done} of {len(self._programs)} programs measured")
        return not result.disturbance and not _late(self._deadline_s)

    def _keep(self, outcome: Outcome, regime: str) -> None:
        """Store one outcome, at once."""
        recorder, runner = self._recorder, self._runner
        key = outcome.fingerprint, recorder.kernel.grids(self._problem, outcome.schedule, runner.device)
        recorder.builder.keep(outcome, recorder.run_id, self._problem, runner.device)
        if isinstance(outcome, Failed):
            self.failed.add(key)
            self._known[regime].pop(key, None)
        elif not outcome.conditions.concurrent_pids:
            self.measured += 1
            self._known[regime][key] = outcome


def _in_field(known: Measurement | None) -> bool:
    """Whether a program needs no more samples: it has them, or it was hopeless and therefore not even checked."""
    return known is not None and (known.accuracy is None or len(known.samples_us) >= FIELD.opening_rounds)


def _late(deadline_s: float | None) -> bool:
    return deadline_s is not None and time.monotonic() > deadline_s


def record_problems(
    resources: Resources,
    kernel: KernelClass | str,
    problems: Cases | str | None,
    options: RecordOptions,
    *,
    folder: str | Path | None,
    progress: Callable[[str], None],
    on_result: Callable[[RecordResult], None],
    command: Mapping[str, Any] | None,
) -> tuple[int, list[RecordResult]]:
    """Record each problem; see `Session.record`."""
    kernel = kernel_of(kernel)
    wanted = problems_of(kernel, problems)
    options = replace(options, accum_mode=options.accum_mode or resources.settings.accum_mode)
    space = resources.space(kernel, options.space)
    builder = resources.builder(kernel, options.compile_timeout_s)
    runner = resources.open_runner(
        kernel, "none" if options.build_only else "gpu", seed=options.seed, without="--build-only"
    )
    noted = command or {"kernel": kernel.name, "problems": [each.to_json() for each in wanted], **options.to_json()}
    results = []
    with resources.noted_run(noted) as run_id:
        recorder = Recorder(builder, space, options, run_id=run_id, runner=runner, progress=progress)
        for result in recorder.record(wanted, Path(folder) if folder else Path()):
            results.append(result)
            on_result(result)
    return run_id, results
