"""What is known before anything is measured: the static model's estimates, and the measurements of other problems."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.core.device import ArchSpec, ResourceFacts
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.measure.clocks import describe_throttling
from tiledsched.measure.runner import Measurement
from tiledsched.serve.entries import lent_entries, load_entries, table_of
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import leaders, timed_as_now
from tiledsched.store.exchange import read_table
from tiledsched.store.manifest import shipped_landscapes
from tiledsched.store.records import Entry, StoredMeasurement
from tiledsched.tuning.resources import Resources
from tiledsched.tuning.study import Estimate
from tiledsched.tuning.surrogate import Known

MeasuredPrograms = dict[Problem, list[tuple[Schedule, ResourceFacts | None, float]]]
"""The measured programs of each problem: schedule, facts, microseconds."""
Landscape = tuple[Sequence[StoredMeasurement], Mapping[str, ResourceFacts | None]]
"""Measurements, and facts by fingerprint."""
MOST_PROBLEMS = 4
"""The most similar problems that a search learns from: more of them changed no result of the search benchmark."""
MOST_PROGRAMS = 96
"""Programs of each: the fastest half of that, and others spread evenly over the rest."""
FEWEST_PROGRAMS = 8
"""Measured programs below which a problem teaches nothing."""
MOST_PLAIN = 256
"""Plain schedules, the most promising ones, around which the structural knobs are explored."""
NEARBY = 4
"""Winners of similar problems that are raced where what is served was measured with another compiler."""


def estimator(problem: Problem, spec: ArchSpec) -> Estimate:
    """The static model for `problem` on the GPU that `spec` describes; schedules not built yet count with expected facts."""

    kernel = problem.declaration

    @cache
    def estimate(schedule: Schedule, facts: ResourceFacts | None) -> float:
        return kernel.cost.model(problem, schedule, facts or kernel.cost.expected(problem, schedule, spec), spec)

    return estimate


def judged(schedules: Iterable[Schedule], estimate: Estimate, deadline_s: float) -> list[Schedule]:
    """The schedules whose times are estimated before `deadline_s` (`time.monotonic()`), in their order, and in any case the
    first: a kernel's own model may be slow.
    """
    found = list[Schedule]()
    for each in schedules:
        if found and time.monotonic() > deadline_s:
            break
        estimate(each, None)  # which keeps it
        found.append(each)
    return found


def plain_schedules(
    space: SearchSpace,
    problem: Problem,
    pinned: Mapping[str, KnobValue],
    estimate: Estimate,
    deadline_s: float = math.inf,
) -> list[Schedule]:
    """All schedules of a space whose knobs that only a measurement can judge are at their defaults, the most promising first.

    Of a large space, or of a model that has not judged all of them by `deadline_s` (`time.monotonic()`), it is some of them.
    """
    plain, _ = space.listed(problem, pinned={**pinned, **space.modelled_pins()}, deadline_s=deadline_s)
    return sorted(judged(plain, estimate, deadline_s), key=lambda schedule: (estimate(schedule, None), schedule.id))


def promising_part(
    space: SearchSpace,
    problem: Problem,
    pinned: Mapping[str, KnobValue],
    plain: Sequence[Schedule],
    winners: Iterable[Schedule],
    deadline_s: float = math.inf,
) -> list[Schedule]:
    """The part of a large space that is worth judging: tens of thousands of schedules would take longer than measuring.

    All plain schedules, and every variant of the most promising of them, by the static model, and of past winners, as far as
    they are listed by `deadline_s` (`time.monotonic()`).
    """
    fixed = [name for name, knob in space.knobs.items() if not knob.measured_only and name not in pinned]
    bases = dict.fromkeys(tuple(schedule[name] for name in fixed) for schedule in [*winners, *plain[:MOST_PLAIN]])
    found = dict.fromkeys([space.default(problem, pinned=pinned), *plain])
    for base in bases:
        if len(found) >= space.most_listed or time.monotonic() > deadline_s:
            break
        held = {**pinned, **dict(zip(fixed, base, strict=True))}
        variants, _ = space.listed(problem, pinned=held, deadline_s=deadline_s)
        found |= dict.fromkeys(variants)
    return list(found)[: space.most_listed]


def nearest(
    problem: Problem, measured: Iterable[Problem], *, itself: bool = False, deadline_s: float = math.inf
) -> list[Problem]:
    """The measured problems most similar to `problem`, most similar first, at most MOST_PROBLEMS, of those that are compared
    before `deadline_s` (`time.monotonic()`); with `itself`, `problem` may be among them.
    """
    others = (other for other in measured if other.kernel == problem.kernel and (itself or other != problem))
    compared = itertools.takewhile(lambda _: time.monotonic() < deadline_s, others)
    return sorted(compared, key=lambda other: (-problem.declaration.similarity.weight(problem, other), other))[
        :MOST_PROBLEMS
    ]


def known_elsewhere(
    problem: Problem, others: MeasuredPrograms, spec: ArchSpec, *, itself: bool = False, deadline_s: float = math.inf
) -> list[Known]:
    """What to learn from: the most similar problems, and of each a choice of programs that shows its best and its spread.

    Args:
        problem: what is to be tuned.
        others: for each problem its measured programs: schedule, facts, microseconds.
        spec: of the arch.
        itself: learn from `problem` itself, too, where `others` has it.
        deadline_s: the `time.monotonic()` after which no more is learnt.
    """
    found = list[Known]()
    taught = (other for other in others if len(others[other]) >= FEWEST_PROGRAMS)
    for other in nearest(problem, taught, itself=itself, deadline_s=deadline_s):
        programs = sorted(others[other], key=lambda program: (program[2], program[0].id))
        half = MOST_PROGRAMS // 2
        rest = programs[half:]
        programs = programs[:half] + rest[:: max(1, -(-len(rest) // half))]
        estimate, expected = estimator(other, spec), list[float]()
        for schedule, facts, _ in programs:
            if time.monotonic() > deadline_s:
                return found
            expected.append(estimate(schedule, facts))
        found.append(
            Known(
                task=other,
                candidates=tuple(program[0] for program in programs),
                expected=tuple(expected),
                values=tuple(program[2] for program in programs),
            )
        )
    return found


def winners_nearby(problem: Problem, entries: Iterable[Entry]) -> list[Schedule]:
    """What won on other problems, those of the most similar ones first."""
    similarity = problem.declaration.similarity.weight
    others = [entry for entry in entries if entry.problem != problem]
    others.sort(key=lambda entry: (-similarity(problem, entry.problem), entry.problem))
    return list(dict.fromkeys(entry.schedule for entry in others))


class Incumbents:
    """What would be served for a problem were nothing tuned: it takes part in the tune and can only be beaten.

    Where that was measured with another compiler, its ties and runner-up and what won on similar problems under this one
    take part, too: their times may have changed since.
    """

    def __init__(self, resources: Resources, kernel: KernelClass, settings: Settings) -> None:
        self._resources, self._kernel, self._regime = resources, kernel, settings.regime
        self._compiler = resources.toolchain.tileiras
        self._before = load_entries(settings, {resources.arch}, kernel)
        self._table = LookupTable(
            [*self._before, *lent_entries(settings, {resources.arch}, kernel)],
            kernel,
            regime=settings.regime,
            accum_mode=settings.accum_mode,
            compiler=self._compiler,
        )

    def __call__(self, problem: Problem, device_name: str) -> list[Schedule]:
        """The schedules that take part for `problem` on a device; none where nothing is known of the arch."""
        arch = self._resources.arch
        if not self._table.known_arch(arch):
            return []
        answer = self._table.resolve(problem, arch, device_name)
        if not (answer.stale and answer.entry):
            return [answer.schedule]
        # What this compiler made slow or fast on similar problems, it made slow or fast here.
        measured_alike = "measured", device_name, self._regime, self._compiler
        now = [
            each
            for each in (*self._resources.db.entries(arch, self._kernel.name), *self._before)
            if (each.provenance, each.device_name, each.regime, each.compiler) == measured_alike
        ]
        return [answer.schedule, *leaders(answer.entry), *winners_nearby(problem, now)[:NEARBY]]


def served_now(
    resources: Resources,
    kernel: KernelClass,
    settings: Settings,
    found: Sequence[Entry],
    device_name: str,
    space_file: str | None = None,
) -> list[Entry]:
    """For each entry that a tune found, the one that is served for its problem from now on, as `explain` says it, without the
    knobs that settings force. Where the answer rests on no entry of the problem itself, or on another schedule than its
    entry's, it is an entry with that schedule whose source is the reason.
    """
    spaces = [resources.space(kernel, space_file)] if space_file else []
    archs = {resources.arch}
    table = table_of(
        [*load_entries(settings, archs, kernel), *lent_entries(settings, archs, kernel)],
        replace(settings, knobs={}),
        kernel=kernel,
        spaces=spaces,
        compiler=resources.toolchain.tileiras,
    )
    if not (spaces or table.known_arch(resources.arch)):
        return list(found)
    now = []
    for each in found:
        served = table.resolve(each.problem, resources.arch, device_name)
        entry = served.entry
        if entry is None or (entry.problem, entry.schedule) != (each.problem, served.schedule):
            entry = Entry(
                kernel=each.kernel,
                arch=each.arch,
                problem=each.problem,
                device_name=each.device_name,
                regime=each.regime,
                accum_mode=each.accum_mode,
                provenance=served.provenance,
                schedule=served.schedule,
                source=served.reason,
            )
        now.append(entry.replace(provenance=served.provenance))
    return now


class Shipped:
    """What comes with the package for one kernel and arch, read when it is first needed; nothing without a kernel."""

    def __init__(self, kernel: str = "", arch: str = "") -> None:
        self._kernel, self._arch = kernel, arch

    @cached_property
    def winners(self) -> list[Entry]:
        """What was measured to be the fastest."""
        path = data_files.tuning_db() / "tables" / self._kernel / f"{self._arch}.json"
        entries = read_table(path).entries if self._kernel and path.is_file() else ()
        return [entry for entry in entries if entry.provenance == "measured"]

    @cached_property
    def recorded(self) -> dict[tuple[Problem, str], Path]:
        """The landscapes by problem and regime, and where they lie."""
        return {
            (each.problem, each.regime): each.path
            for each in (shipped_landscapes(self._kernel, self._arch) if self._kernel else ())
        }

    def landscape(self, problem: Problem, regime: str) -> Landscape:
        """One of those: measurements, and facts by fingerprint."""
        table = read_table(self.recorded[problem, regime])
        return table.measurements, {artifact.fingerprint: artifact.facts for artifact in table.artifacts}


class Elsewhere:
    """What is known of other problems, by one database and by what ships, read as it is needed: most of a large database is of
    no use to a problem.
    """

    def __init__(
        self, db: TuningDB, space: SearchSpace, regime: str, accum_mode: str, shipped: Shipped | None = None
    ) -> None:
        self._db, self._space, self._shipped = db, space, shipped or Shipped()
        self._regime, self._accum_mode = regime, accum_mode
        self._programs: MeasuredPrograms = {}

    @cached_property
    def _facts(self) -> dict[str, ResourceFacts | None]:
        """The resources of all machine code in the database."""
        return {
            fingerprint: artifact.facts for (_, fingerprint), artifact in self._db.artifacts(self._space.arch).items()
        }

    def known(
        self, problem: Problem, device_name: str, spec: ArchSpec, *, itself: bool, deadline_s: float = math.inf
    ) -> list[Known]:
        """What to learn from for `problem`, of what was measured on devices of that name; see `known_elsewhere`."""
        where = (device_name, self._regime)
        measured = {
            line.problem
            for line in self._db.landscapes()
            if (line.device_name, line.regime) == where and line.distinct_programs >= FEWEST_PROGRAMS
        }
        measured |= {other for other, programs in self._programs.items() if len(programs) >= FEWEST_PROGRAMS}
        recorded = {other for other, regime in self._shipped.recorded if regime == self._regime}
        near = nearest(problem, measured | recorded, itself=itself, deadline_s=deadline_s)
        for other in near:
            if other not in self._programs:  # what ships was recorded on whatever device of the arch
                taken, facts = (
                    (
                        self._db.measurements(other, device_name=device_name, regime=self._regime, latest=True),
                        self._facts,
                    )
                    if other in measured
                    else self._shipped.landscape(other, self._regime)
                )
                self._programs[other] = self._judged([stored.measurement for stored in taken], facts)
        others = {other: self._programs[other] for other in near}
        return known_elsewhere(problem, others, spec, itself=itself, deadline_s=deadline_s)

    def note(self, problem: Problem, programs: list[tuple[Schedule, ResourceFacts | None, float]]) -> None:
        """What was measured of `problem` just now."""
        self._programs[problem] = programs

    def _judged(
        self, taken: Sequence[Measurement], facts: Mapping[str, ResourceFacts | None]
    ) -> list[tuple[Schedule, ResourceFacts | None, float]]:
        """Those taken at the GPU's clock, alone and in the accuracy class that is tuned; if enough, only those timed as now."""
        taken = [one for one in taken if not one.conditions.concurrent_pids]
        seen_mhz = max((one.conditions.sm_clock_mhz for one in taken), default=0)
        at_clock = [one for one in taken if not describe_throttling(one.conditions, one.device, one.regime, seen_mhz)]
        as_now = [one for one in at_clock if timed_as_now(one.regime, one.conditions)]
        taken = as_now if len(as_now) >= FEWEST_PROGRAMS else taken
        programs = [(self._space.complete(one.schedule), facts.get(one.fingerprint), one.median_us) for one in taken]
        return [each for each in programs if each[0].get("accum_mode", self._accum_mode) == self._accum_mode]
