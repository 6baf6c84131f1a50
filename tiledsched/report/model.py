"""Computes the numbers of a report from the database: see `build_report`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.device import ARCHS, spilled
from tiledsched.core.errors import or_none
from tiledsched.core.fields import Choice, Flag
from tiledsched.core.groups import firsts, grouped
from tiledsched.core.problem import KernelClass, Problem, ProblemClass, rate_of
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import source_part
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.measure.estimate import Timing
from tiledsched.report.analysis import tile_times
from tiledsched.report.axes import axes_of
from tiledsched.report.effects import tile_knobs
from tiledsched.report.landscapes import Landscape, LandscapeKey, accum_mode, measured_ceilings, read_measured
from tiledsched.report.records import MEASURED, MODELLED, FailureCount, ProblemReport, Report, Section, Timed, Untuned
from tiledsched.report.sources import Serving, WithShipped
from tiledsched.serve.chain import Served
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.evidence import for_compiler, of_kernel
from tiledsched.store.model_error import error_of
from tiledsched.store.queries import KnobEffect, knob_effects, program_key
from tiledsched.store.records import BuildRecord, Entry, FailureRecord, Toolchain

if TYPE_CHECKING:
    from tiledsched.store.db import TuningDB

ModelTimes = Callable[[Problem, list[BuildRecord]], dict[str, float]]
"""The performance model: from a problem and its builds to microseconds by schedule id. Builds that it cannot judge are
left out.
"""


def build_report(
    db: TuningDB | WithShipped,
    arch: str,
    kernel: KernelClass,
    *,
    regime: str = "burst",
    device_name: str | None = None,
    model_times: ModelTimes | None = None,
    served: Iterable[Entry] = (),
    serving: Serving | None = None,
) -> Report:
    """The report on the schedules of a kernel on `arch`, from all that `db` knows of them.

    Args:
        db: an open database; reading it is enough.
        arch: e.g. sm_121.
        kernel: what is reported; what the database holds of others is left alone.
        regime: burst or sustained. Measurements of the other one are left out, not mixed in.
        device_name: one device of the arch; None for all, each by itself.
        model_times: estimates for the problems that were not measured. Without it only the winner and the runner-up
            of each modelled entry are known.
        served: entries of every kernel: the highest rates measured among them are the ceilings.
        serving: the lookup whose answers are called served; None for that of the database's own entries.
    """
    compiler = compiler_at_hand()
    known = [
        entry
        for entry in of_kernel(db.entries(arch=arch, kernel=kernel.name), kernel)
        if device_name is None or entry.device_name in ("", device_name)
    ]
    reading = read_measured(
        db,
        arch,
        kernel,
        regime=regime,
        device_name=device_name,
        compiler=compiler,
        listed=((entry.problem, entry.schedule) for entry in known),
    )
    entries = _shown_entries(reading.compilers, known, compiler)
    builds = _Builds(db, arch, kernel, reading.sources, entries)
    if serving is None:
        serving = Serving(
            arch, lambda mode: LookupTable(known, kernel, regime=regime, compiler=compiler, accum_mode=mode)
        )
    desk = _Desk(kernel, arch, regime, builds, entries, serving)
    measured = [desk.measured(key, landscape) for key, landscape in reading.landscapes.items()]
    done = {(problem, accum) for problem, _, accum in reading.landscapes}
    unmeasured = {
        (entry.problem, entry.accum_mode): entry
        for entry in reversed(entries)  # of several the first
        if entry.provenance == MODELLED and (entry.problem, entry.accum_mode) not in done
    }
    modelled = [one for entry in unmeasured.values() if (one := desk.modelled(entry, model_times))]
    done |= unmeasured.keys()
    tile = tile_knobs(measured or modelled)
    return Report(
        kernel=kernel.name,
        arch=arch,
        axes=desk.axes,
        tile_knobs=tile,
        regime=regime,
        device_name=device_name or "",
        elsewhere=reading.found - reading.taken,
        left_out=db.left_out if isinstance(db, WithShipped) else 0,
        measured=_section(MEASURED, measured, tile),
        modelled=_section(MODELLED, [_with_error(one, arch) for one in modelled], tile),
        invariant=tuple(entry for entry in entries if entry.group),
        unmeasured=tuple(
            entry
            for entry in entries
            if entry.provenance in ("transferred", "default") and (entry.problem, entry.accum_mode) not in done
        ),
        inert=builds.knob_effects(),
        builds=sum(1 for build in builds.all if build.fingerprint),
        failures=_count_failures(
            [failed for failed in db.failures(arch=arch) if failed.kernel == kernel.name], builds.all
        ),
        conditions=reading.conditions,
        regimes=tuple(reading.regimes),
        model_compilers=tuple(
            sorted(
                builds.modelled_compilers
                or {entry.toolchain.compiler for entry in entries if entry.provenance == MODELLED and entry.toolchain}
            )
        ),
        ceilings=measured_ceilings(
            [*entries, *served], regime, {str(problem.values.get("dtype")) for problem, _, _ in reading.landscapes}
        ),
    )


def _shown_entries(shown: Mapping[Problem, str], entries: Sequence[Entry], compiler: str) -> list[Entry]:
    """The entry that is served for each problem, from the compiler whose times are shown, or else from the installed
    one.
    """
    alike = grouped((shown.get(entry.problem, compiler), entry) for entry in entries)
    return [entry for version, members in alike.items() for entry in for_compiler(members, version)]


def _with_error(one: ProblemReport, arch: str) -> ProblemReport:
    """A modelled problem with the error of its estimates and, where that is known, with what they cannot tell apart from what is
    served.
    """
    found = replace(one, error=error_of(arch, one.problem, one.best.schedule))
    of, most = one.serves or one.best, 1 + found.tolerance if found.error else 1.0
    ties = frozenset(
        each.schedule
        for each in one.timed
        if each.program != of.program and max(each.us, of.us) <= min(each.us, of.us) * most
    )
    return replace(found, ties=ties, level=ties)


def _section(provenance: str, problems: Sequence[ProblemReport], tile: tuple[str, ...]) -> Section:
    won = grouped(
        (one.device_name, one.served.schedule)
        for one in problems
        if one.served and one.served.provenance == MEASURED and one.served.candidates > 1
    )
    ordered = tuple(
        sorted(
            (
                replace(one, tiles=tile_times(one, tile), winners=tuple(won.get(one.device_name, ())))
                for one in problems
            ),
            key=lambda one: (one.group, one.size, one.problem),
        )
    )
    return Section(provenance=provenance, problems=ordered)


class _Builds:
    """All builds by the compilers and kernel sources that the evidence was made with."""

    def __init__(
        self,
        db: TuningDB | WithShipped,
        arch: str,
        kernel: KernelClass,
        sources: Mapping[tuple[str, str], Toolchain],
        entries: list[Entry],
    ) -> None:
        wanted = dict(sources)
        for entry in entries:
            if entry.toolchain is not None:
                wanted[source_part(entry.source_hash), entry.toolchain.id] = entry.toolchain
        self.all = [
            build
            for (source_hash, _), toolchain in wanted.items()
            for build in db.find_builds(kernel.name, source_hash, toolchain, arch).values()
        ]
        self.facts = {fingerprint: record.facts for (_, fingerprint), record in db.artifacts(arch).items()}
        """Resources of machine code, by fingerprint."""
        self.facts |= {build.fingerprint: build.facts for build in self.all if build.facts}
        self._kernel = kernel
        self._compiled_in = [
            name
            for name, each in kernel.fields.items()
            if isinstance(each, (Choice, Flag)) or getattr(each, "constant", False)
        ]
        self._alike = grouped(
            (tuple(map(build.problem_class.values.get, self._compiled_in)), build)
            for build in self.all
            if build.fingerprint
        )
        self._serving: dict[Problem, list[BuildRecord]] = {}
        self._compared: set[tuple[object, ...]] = set()
        self.modelled_compilers: set[str] = set()
        """Compilers behind modelled landscapes, one line each."""
        self.ships = db if isinstance(db, WithShipped) else None

    def of(self, problem: Problem, device: Any, measured: Collection[str] | None = None) -> list[BuildRecord]:
        """Successful builds whose machine code can serve `problem`; where the report is on some of many problems, `measured` may
        leave out machine code that was not measured, because telling the class of a build takes half a millisecond.
        """
        compiled_in = tuple(map(problem.values.get, self._compiled_in))
        if problem in self._serving:
            return self._serving[problem]
        alike = self._alike.get(compiled_in, [])
        if measured is not None and self.ships and self.ships.left_out and compiled_in in self._compared:
            return [build for build in alike if build.fingerprint in measured and self._serves(build, problem, device)]
        self._compared.add(compiled_in)
        self._serving[problem] = [build for build in alike if self._serves(build, problem, device)]
        return self._serving[problem]

    def _serves(self, build: BuildRecord, problem: Problem, device: Any) -> bool:
        from tiledsched.core.launches import problem_class

        return build.problem_class == or_none(problem_class, self._kernel, problem, build.schedule, device)

    def modelled(self, entry: Entry, device: Any) -> tuple[list[BuildRecord], bool]:
        """The builds that make the landscape of a problem that nobody measured, one for each schedule, and whether they are all
        of the search space, as what ships is.

        They are all of one compiler and source: of the entry's, or of those that ship where there are more of these.
        """
        own = [
            build
            for build in self.of(entry.problem, device)
            if accum_mode(build.schedule) == entry.accum_mode
            and (entry.toolchain is None or build.toolchain == entry.toolchain)
            and (not entry.source_hash or build.source_hash == source_part(entry.source_hash))
        ]
        shipped = [
            build
            for build in (self.ships.shipped_builds(entry.problem) if self.ships else ())
            if build.fingerprint and accum_mode(build.schedule) == entry.accum_mode
        ]
        if len({(build.toolchain, build.source_hash) for build in (*own, *shipped[:1])}) > 1:
            own, shipped = (own, []) if len(own) >= len(shipped) else ([], shipped)
        # Fingerprints of another element type than the problem's stand for what was built here of the same schedule.
        found = {build.schedule: build for build in own}
        here = {each.fingerprint: found[each.schedule].fingerprint for each in shipped if each.schedule in found}
        for each in shipped:
            own_name = here.get(each.fingerprint, each.fingerprint)
            alike = each if own_name == each.fingerprint else replace(each, fingerprint=own_name)
            found.setdefault(each.schedule, alike)
        self.modelled_compilers |= {build.toolchain.compiler for build in (*own[:1], *shipped[:1])}
        return list(found.values()), bool(shipped)

    def knob_effects(self) -> tuple[KnobEffect, ...]:
        """How often each knob leaves the machine code unchanged, the most inert knob first, over builds of the reported
        problems.

        Problems served by the same builds count once. A build's own class does not say which builds to compare: it
        holds constants of the kernel that follow from the knobs.
        """
        groups = {tuple(build.key for build in found): found for found in self._serving.values()}
        compared = knob_effects(
            replace(build, problem_class=ProblemClass({"group": place}))
            for place, found in enumerate(groups.values())
            for build in found
        )
        return tuple(
            sorted(
                (effect for effect in compared if effect.pairs),
                key=lambda effect: (-effect.same / effect.pairs, effect.knob),
            )
        )


class _Desk:
    """What is needed to write the report on one problem."""

    def __init__(
        self, kernel: KernelClass, arch: str, regime: str, builds: _Builds, entries: list[Entry], serving: Serving
    ) -> None:
        self.kernel, self.arch, self.regime, self.builds, self.serving = kernel, arch, regime, builds, serving
        self.axes = axes_of(kernel)
        self.space: SearchSpace | None = or_none(space_for, arch, kernel)
        self._defaults: dict[Problem, Schedule | None] = {}
        self._entries = grouped(((entry.problem, entry.accum_mode), entry) for entry in entries)

    def measured(self, key: LandscapeKey, landscape: Landscape) -> ProblemReport:
        """The report on one problem and device."""
        problem, _, mode = key
        device = landscape.newest[0].measurement.device
        own = self._served(key)
        answers = self._answers(key, len(landscape.newest) > 2 or bool(own and own.layer != "shipped"))
        by_schedule = {one.measurement.schedule: one for one in landscape.newest}
        fingerprints = {one.measurement.fingerprint for one in landscape.newest}
        programs = {
            schedule: program_key(one.measurement.fingerprint, problem, schedule, device)
            for schedule, one in by_schedule.items()
        } | {
            build.schedule: program_key(build.fingerprint, problem, build.schedule, device)
            for build in self.builds.of(problem, device, fingerprints)
            if build.fingerprint in fingerprints
            and build.schedule not in by_schedule
            and accum_mode(build.schedule) == mode
        }
        newest = firsts(
            (programs[schedule], (one.measurement, one.created_at)) for schedule, one in by_schedule.items()
        )
        known = {
            program: Timed(
                schedule=found.schedule,
                fingerprint=found.fingerprint,
                us=found.median_us,
                timing=Timing(median_us=found.median_us, ci_low_us=found.ci_low_us, ci_high_us=found.ci_high_us),
                samples=len(found.samples_us),
                taken=taken,
                facts=self.builds.facts.get(found.fingerprint),
            )
            for program, (found, taken) in newest.items()
        }
        timed = [
            replace(known[program], schedule=schedule, same_program_as=known[program].schedule)
            if schedule != known[program].schedule
            else known[program]
            for schedule, program in programs.items()
            if program in known
        ]
        written = self._write_up(MEASURED, key, timed, own, answers)
        trace = tuple(us / written.best.us for us in landscape.trace_us)
        written = replace(written, trace=trace, taken=max(one.created_at for one in landscape.newest))
        if unlisted := landscape.schedules - len(by_schedule):
            return replace(written, median_us=landscape.median_us, programs=written.programs + unlisted)
        return written

    def modelled(self, entry: Entry, model_times: ModelTimes | None) -> ProblemReport | None:
        """The report on a problem that nobody measured; None where the model has no time for it either.

        Each program stands in it once, under the schedule that changes the fewest knobs, beside what is served and the default.
        Other programs that spill registers are left out unless every program does, as when a schedule is chosen (docs/model.md).
        """
        problem, device = entry.problem, ARCHS.get(self.arch)
        default, answers = self.default(problem), self._answers((problem, "", entry.accum_mode))
        builds, whole = self.builds.modelled(entry, device)
        # What is served may be of an older search space than what ships.
        today = or_none(self.space.complete, entry.schedule) if self.space else None
        if today is not None and any(build.schedule == today for build in builds):
            entry = entry.replace(schedule=today)
        named = (entry.schedule, default, *(each.schedule for each in answers if each))
        spills = {build.schedule for build in builds if build.facts and spilled(build.facts.spill_bytes)}
        left_out = spills.difference(named) if len(spills) < len(builds) else set()
        every = grouped((program_key(each.fingerprint, problem, each.schedule, device), each) for each in builds)
        kept = {key: [each for each in alike if each.schedule not in left_out] for key, alike in every.items()}
        programs = {key: alike for key, alike in kept.items() if alike}
        first = [
            min(alike, key=lambda build: (build.schedule not in named, *plainness(build.schedule, default)))
            for alike in programs.values()
        ]
        others = {
            build.schedule: known.schedule
            for known, alike in zip(first, programs.values(), strict=True)
            for build in alike
            if build.schedule in named and build is not known
        }
        times = self._estimates(problem, first, model_times) if model_times else {}
        timed = [
            Timed(schedule=build.schedule, fingerprint=build.fingerprint, us=times[build.schedule], facts=build.facts)
            for build in first
            if build.schedule in times
        ]
        timed += [
            replace(one, schedule=schedule, same_program_as=own)
            for schedule, own in others.items()
            for one in timed
            if one.schedule == own
        ]
        if not timed and entry.model_us is not None:
            known_us = {entry.schedule: entry.model_us}
            if entry.runner_up is not None and entry.margin is not None:
                known_us[entry.runner_up] = entry.model_us * (1 + entry.margin)
            timed = [
                Timed(schedule=schedule, fingerprint=entry.fingerprint if schedule == entry.schedule else "", us=us)
                for schedule, us in known_us.items()
            ]
        if not timed:
            return None
        written = self._write_up(MODELLED, (problem, "", entry.accum_mode), timed, entry, answers)
        return replace(written, whole=whole, programs=written.programs + len(every) - len(programs))

    def _estimates(
        self, problem: Problem, builds: Sequence[BuildRecord], model_times: ModelTimes
    ) -> dict[Schedule, float]:
        """The model's estimates, in microseconds: those that ship, and of what else was built, those made now."""
        ship = self.builds.ships.shipped_times(problem) if self.builds.ships else {}
        found = {
            build.schedule: ship[build.schedule][1]
            for build in builds
            if build.schedule in ship and ship[build.schedule][0] == build.facts
        }
        others = [build for build in builds if build.schedule not in found]
        made = model_times(problem, others) if others else {}
        return found | {build.schedule: made[build.schedule.id] for build in others if build.schedule.id in made}

    def _served(self, key: LandscapeKey) -> Entry | None:
        problem, device_name, accum_mode = key
        fitting = [
            entry
            for entry in self._entries.get((problem, accum_mode), ())
            if entry.device_name in ("", device_name) and entry.regime in ("", self.regime)
        ]
        return min(fitting, key=lambda entry: (entry.rank, not entry.device_name, not entry.regime), default=None)

    def _answers(self, key: LandscapeKey, wanted: bool = True) -> tuple[Served | None, Served | None]:
        """What is served for a problem on a device and, where `wanted`, what would be without tuning: finding that takes long."""
        served = self.serving.served(*key)
        if self.kernel.is_called or not wanted:
            return served, None
        tuned = served is not None and served.provenance == MEASURED
        return served, self.serving.served(*key, tuned=False) if tuned else served

    def _write_up(
        self,
        provenance: str,
        key: LandscapeKey,
        timed: list[Timed],
        served: Entry | None,
        answers: tuple[Served | None, Served | None],
    ) -> ProblemReport:
        problem, device_name, accum_mode = key
        (explained, untuned), measured = answers, provenance == MEASURED
        chosen = explained.schedule if explained else None  # among equal times, the one that is served stands first
        timed.sort(key=lambda one: (one.us, one.same_program_as is not None, one.schedule != chosen, one.schedule.id))
        timed = [replace(one, relative=one.us / timed[0].us, rate=rate_of(problem, one.us)) for one in timed]
        programs = [one for one in timed if one.same_program_as is None]
        serves = self._timed_as(chosen, timed)
        found = ProblemReport(
            provenance=provenance,
            problem=problem,
            device_name=device_name,
            accum_mode=accum_mode,
            size=self.axes.size(problem),
            shared=self.axes.shared_values(problem),
            timed=tuple(timed),
            runner_up=None,
            default=self._timed_as(self.default(problem), timed),
            median_us=statistics.median(one.us for one in programs),
            programs=len(programs),
            served=served,
            explained=explained,
            serves=serves,
            ties=_ties(timed, serves or timed[0], served) if measured else frozenset(),
            untuned=self._untuned(untuned, timed) if untuned else None,
        )
        leader = found.leader
        level = _ties(timed, leader, served) if measured else frozenset()
        apart = (one for one in programs if one.program != leader.program and one.schedule not in level)
        return replace(found, level=level, runner_up=next(apart, None) or _raced(leader, served))

    def _untuned(self, found: Served, timed: Sequence[Timed]) -> Untuned:
        """What the lookup would serve without tuning, with its time where it has one."""
        known = self._timed_as(found.schedule, timed)
        return Untuned(
            schedule=found.schedule,
            provenance=found.provenance,
            relative=known.relative if known else None,
            expected=found.expected_loss,
        )

    def default(self, problem: Problem) -> Schedule | None:
        """The default schedule of a problem; None where its space has none."""
        if problem not in self._defaults:
            space = None if self.kernel.is_called else self.space
            self._defaults[problem] = or_none(space.default, problem) if space else None
        return self._defaults[problem]

    def _timed_as(self, schedule: Schedule | None, timed: Sequence[Timed]) -> Timed | None:
        """The time of a schedule, if it has one.

        A schedule of an older search space counts as the one wanted if it is, once the knobs it lacks are at their defaults.
        """
        if schedule is None:
            return None
        exact = next((one for one in timed if one.schedule == schedule), None)
        if exact is not None or self.space is None:
            return exact
        complete = self.space.complete
        alike = (
            one for one in timed if all(schedule.get(knob, value) == value for knob, value in one.schedule.items())
        )
        return next((one for one in alike if or_none(complete, one.schedule) == schedule), None)


def plainness(schedule: Schedule, default: Schedule | None) -> tuple[int, str]:
    """What orders schedules of one program: the one that changes the fewest knobs of the default stands first."""
    return sum(schedule.get(knob) != value for knob, value in (default or {}).items()), schedule.id


def _raced(best: Timed, served: Entry | None) -> Timed | None:
    """The runner-up that the race recorded in the entry, for when its own measurement is not in the database."""
    if served is None or served.runner_up is None or served.margin is None or served.schedule != best.schedule:
        return None
    relative = 1 + served.margin
    return Timed(
        schedule=served.runner_up, fingerprint="", us=best.us * relative, relative=relative, rate=best.rate / relative
    )


def _ties(timed: Sequence[Timed], of: Timed, entry: Entry | None) -> frozenset[Schedule]:
    """The schedules that cannot be told apart from one: as its own race found, or else by overlapping intervals and by times
    within `AS_GOOD` of each other. A race decides where it has an answer, because it timed both in turn.
    """
    raced: dict[Schedule, bool] = {}
    if entry is not None and entry.provenance == MEASURED and entry.schedule == of.schedule:
        raced = dict.fromkeys(entry.ties, True)
        if entry.runner_up is not None:
            raced[entry.runner_up] = False
    decided = {one.program: raced[one.schedule] for one in timed if one.schedule in raced}
    return frozenset(
        one.schedule for one in timed if one.program != of.program and decided.get(one.program, one.ties_with(of))
    )


def _count_failures(failures: Iterable[FailureRecord], builds: Iterable[BuildRecord]) -> tuple[FailureCount, ...]:
    """How often candidates failed in each way. A failed build that is also among `failures` counts once."""
    found: dict[tuple[str, str], dict[object, tuple[str, Schedule]]] = defaultdict(dict)
    failed_builds = set()
    for build in builds:
        if build.failure is not None:
            failed_builds.add((build.failure.kind, build.schedule))
            found["build", str(build.failure.kind)][build.key] = build.failure.message, build.schedule
    for failed in failures:
        if failed.stage != "build" or (failed.failure.kind, failed.schedule) not in failed_builds:
            candidate = failed.schedule.id, failed.problem.id if failed.problem else ""
            example = failed.failure.message, failed.schedule
            found[failed.stage, str(failed.failure.kind)].setdefault(candidate, example)
    examples = {way: next(iter(candidates.values())) for way, candidates in found.items()}
    counts = [
        FailureCount(stage=stage, kind=kind, candidates=len(found[stage, kind]), example=message, schedule=schedule)
        for (stage, kind), (message, schedule) in examples.items()
    ]
    return tuple(sorted(counts, key=lambda line: (-line.candidates, line.stage, line.kind)))
