"""Tune problems one by one: build, measure or model, and store what should be served.

With a runner, schedules are proposed and built, and the most promising of them measured, in batches, until no more gain is
expected or the programs or the budget are used up; then the leaders race each other afresh, interleaved, because times of
different batches are never compared for the verdict.
Without one, the schedules that the model likes best are built, as many as the effort says, and it ranks the distinct
programs. Everything is stored as it happens, so that an interrupted run loses nothing and the next one goes on.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tiledsched.core.config import Settings
from tiledsched.core.device import ArchSpec, arch_spec
from tiledsched.core.errors import ConfigError, MeasureError, NoValidScheduleError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.measure.runner import REGIMES, Candidate, Failed, Measurement, RivalTime, Runner
from tiledsched.store.evidence import for_compiler, timed_as_now
from tiledsched.store.records import BuildRecord, Entry
from tiledsched.tuning.effort import EFFORTS
from tiledsched.tuning.inert import SURE, InertChanges
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.prior import Elsewhere, Shipped, estimator, plain_schedules, promising_part
from tiledsched.tuning.programs import RETRIED, Builder, Program, deadlines
from tiledsched.tuning.race import RULES, Outcome, RaceResult, near, race, settle
from tiledsched.tuning.samplers import OURS
from tiledsched.tuning.study import ScheduleStudy
from tiledsched.tuning.study_storage import LiveStudy
from tiledsched.tuning.surrogate import Known
from tiledsched.tuning.trials import Trials, learn

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

DEFAULTS = Settings()
"""What decides where neither the options nor the settings say it."""
LEARNT_AT_ONCE = 8
"""Schedules built, where there is no GPU, before the first look at which changes of knobs leave the machine code as it is."""
MOST_WINNERS = 4
"""Winners of similar problems that are tried first where nothing else is known of those problems."""
Served = Callable[[Problem, str], "Sequence[Schedule]"]
"""What would be served for a problem on a device of this name were nothing tuned, and what came close to it where its time may
have changed since; none where this space knows nothing.
"""
Rivals = Callable[[Problem, Candidate], "list[RivalTime] | None"]
"""Times a kernel's rivals next to a winner, on the problem it won; None where they cannot be timed."""
LOOKS = {
    regime: dataclasses.replace(rules, most_rounds=rules.opening_rounds + rules.heat_rounds)
    for regime, rules in RULES.items()
}
"""Rules by which a batch is measured: enough samples to learn from; the deciding race comes last."""


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What tuning one problem found."""

    entry: Entry
    """What is served from now on (or would be, if the store did not hold something better)."""
    stored: bool
    """False when a stronger entry was kept."""
    schedules: int
    """Schedules considered."""
    programs: int
    """Distinct programs among them."""
    compiled: int
    """How often the compiler ran."""
    measured: int
    """Programs measured in this run."""
    failed: int
    """Schedules that did not build, run or compute correctly."""
    seconds: float
    """Wall time."""
    left: int = 0
    """Schedules that effort, trials or time left unbuilt, where the model ranks."""
    over_default: float | None = None
    """(default - winner) / winner, of their measured medians or of the model's estimates; None where the default gave neither."""
    over_runner_up: float | None = None
    """(runner-up - winner) / winner, likewise; None where there is no runner-up."""


class Watcher(Protocol):
    """Shows progress, e.g. the bars of the command line."""

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """A stage of `total` steps begins."""

    def step(self, done: int) -> None:
        """`done` steps of it are done."""

    def best(self, us: float, schedule: Schedule) -> None:
        """A schedule is the best so far; `us` is measured, or estimated where nothing is measured."""


class Silent:
    """A watcher that shows nothing."""

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """Do nothing."""

    def step(self, done: int) -> None:
        """Do nothing."""

    def best(self, us: float, schedule: Schedule) -> None:
        """Do nothing."""


class Tuner:
    """Tunes one kernel for one arch.

    Args:
        builder: builds schedules of the kernel; its database holds what is known and takes what is found.
        space: the schedules that are searched.
        options: how much to do.
        run_id: number of the run in the database.
        runner: measures on the GPU; None to let the model rank.
        watcher: shows progress.
        served: what would be served without this run. It takes part, and loses only to what is faster.
        shipped: what comes with the package. It says where to look first.
        rivals: times rivals next to each winner; None to keep what was known of them.
        storage: where studies are kept besides the database, for Optuna's tools; None for nowhere.
    """

    def __init__(
        self,
        builder: Builder,
        space: SearchSpace,
        options: TuneOptions,
        *,
        run_id: int,
        runner: Runner | None = None,
        watcher: Watcher | None = None,
        served: Served | None = None,
        shipped: Shipped | None = None,
        rivals: Rivals | None = None,
        storage: BaseStorage | None = None,
    ) -> None:
        self._served, self._shipped, self._storage, self._rivals = served, shipped or Shipped(), storage, rivals
        self._live: LiveStudy | None = None
        self.builder, self.space, self.options, self.run_id, self.runner = builder, space, options, run_id, runner
        self.db, self.kernel, self.toolchain = builder.db, builder.kernel, builder.toolchain
        self.regime = options.regime or DEFAULTS.regime
        self.accum_mode = options.accum_mode or DEFAULTS.accum_mode
        self.watcher = watcher or Silent()
        self._effort = EFFORTS[options.effort]
        self._trials = self._effort.programs if options.trials is None else options.trials
        self._builds = self._effort.modelled if options.trials is None else options.trials
        # The surrogate learns more from small batches, but every compile process should have something to do.
        guided = options.sampler == OURS
        self._propose_batch = (
            max(self._effort.batch * self._effort.builds, builder.jobs) if guided else max(8, 2 * builder.jobs)
        )
        self._measure_batch = self._propose_batch // self._effort.builds if guided else self._propose_batch
        # Of each batch the last to compile take several times as long as most: they go on while the others are measured,
        # where there are cores enough for both.
        self._leave = max(0, builder.jobs - 4) // 2
        self._pinned = accuracy_class(space, self.accum_mode)
        self._source = ", ".join(
            part for part in (f"tune run {run_id}", space.listed_in, "neighbours" if options.neighbours else "") if part
        )
        self._inert = InertChanges(space.knobs)
        self._measurement_ids: dict[tuple[Schedule, str], int] = {}
        self._elsewhere = Elsewhere(self.db, space, self.regime, self.accum_mode, self._shipped)

    def tune(self, problems: Sequence[Problem]) -> list[TuneResult]:
        """Tune every problem in turn.

        Raises:
            NoValidScheduleError: for some problem no schedule is valid, or none of them works; the problems before it
                are stored.
            MeasureError: the GPU cannot be used, or was never alone long enough; the problems before are stored.
            ConfigError: neighbours are wanted, and nothing is measured that would say of what.
        """
        if self.options.neighbours and self.runner is None:
            raise ConfigError(
                f"neighbours of the fastest schedule are known only where it is measured, and no GPU of "
                f"{self.space.arch} is used here; leave out --neighbours"
            )
        results = []
        for deadline_s, problem in zip(deadlines(self.options.budget_s, len(problems)), problems, strict=True):
            if self.runner is None:
                results.append(self._model(problem, deadline_s))
            else:
                results.append(self._measure(problem, self.runner, deadline_s))
        return results

    # Without a GPU

    def _model(self, problem: Problem, deadline_s: float | None) -> TuneResult:
        started = time.monotonic()
        # The model cannot tell what such knobs do: they stay as they are until something is measured.
        pinned = self._pinned | self.space.modelled_pins()
        spec, default = arch_spec(self.space.arch), self._default(problem)
        incumbents = self._incumbents(problem, "")
        schedules = list(dict.fromkeys([*incumbents, default, *self.space.schedules(problem, pinned=pinned)]))
        order = expected_order(schedules, problem, spec, first=[*incumbents, default])
        compiled = self._build(order, problem, deadline_s)
        reached = [schedule for schedule in schedules if self.builder.record(schedule, problem)]
        programs = self.builder.programs(reached, problem, spec)
        ranked = self._ranked(programs, problem, incumbents)
        if not ranked:
            raise NoValidScheduleError(self._nothing_works(problem, reached))
        best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
        least = self._estimate(best, problem, spec)
        entry = self._entry(
            problem,
            best.schedule,
            best.fingerprint,
            provenance="modelled",
            model_us=least,
            candidates=len(programs),
            runner_up=second.schedule if second else None,
        )
        plain = next((program for program in ranked if default in program.schedules), None)
        unknown = set(incumbents) - set(reached)  # what it is compared with was not reached in time
        stored = not unknown and self.db.put_entry(entry)
        return TuneResult(
            entry=entry,
            stored=stored,
            schedules=len(reached),
            programs=len(programs),
            compiled=compiled,
            measured=0,
            failed=self._build_failures(reached, problem),
            seconds=time.monotonic() - started,
            left=len(schedules) - len(reached),
            over_default=self._estimate(plain, problem, spec) / least - 1 if plain else None,
            over_runner_up=self._estimate(second, problem, spec) / least - 1 if second else None,
        )

    def _ranked(self, programs: Sequence[Program], problem: Problem, incumbents: Sequence[Schedule]) -> list[Program]:
        """Programs by the model's estimate; of equal estimates, what is served first, then fewest knobs off their default,
        then by id.
        """
        spec, default = arch_spec(self.space.arch), self._default(problem)
        programs = [
            dataclasses.replace(each, schedules=tuple(sorted(each.schedules, key=lambda one: one not in incumbents)))
            for each in programs
        ]

        def order(program: Program) -> tuple[float, bool, int, str]:
            changed = sum(program.schedule[name] != default[name] for name in default)
            return (
                self._estimate(program, problem, spec),
                program.schedule not in incumbents,
                changed,
                program.schedule.id,
            )

        return sorted(programs, key=order)

    def _estimate(self, program: Program, problem: Problem, spec: ArchSpec) -> float:
        return min(self.kernel.cost.model(problem, schedule, program.facts, spec) for schedule in program.schedules)

    # With a GPU

    def _measure(self, problem: Problem, runner: Runner, deadline_s: float | None) -> TuneResult:
        started = time.monotonic()
        runner.begin(problem)
        if self._storage is not None:
            self._live = LiveStudy(self.db, self._storage, self.space, problem, runner.device_name, self.regime)
        if not self.db.entries(self.space.arch, self.kernel.name, problem=problem, provenance="measured"):
            self.builder.start()  # and both while we look up and judge what there is
        spec, guided = arch_spec(self.space.arch), self.options.sampler == OURS
        estimate, among = estimator(problem, spec), None
        partly = guided and not self.space.candidates
        plain = plain_schedules(self.space, problem, self._pinned, estimate) if partly else []
        if guided:
            self._elsewhere.read_recorded(problem)
        evidence = self._evidence(problem, runner)
        compiled = self._rebuild(problem, evidence, deadline_s)
        known_us = {
            schedule: us
            for (schedule, fingerprint), us in evidence.items()
            if self.builder.fingerprint(schedule, problem) == fingerprint
        }
        # Times of other machine code are no verdict; they tell where to look.
        elsewhere = self._elsewhere.known(problem, runner.device_name, spec, itself=not known_us) if guided else []
        incumbents = self._incumbents(problem, runner.device_name)
        first = self._first(problem, incumbents, elsewhere)
        if partly:  # what is tried first is built while the rest is judged
            early = [each for each in first if each in incumbents or not self.space.violations(each, problem)]
            compiled += self.builder.build(early, problem, leave=len(early))
            leaders = [Schedule(known.candidates[0]) for known in elsewhere]
            among = [*promising_part(self.space, problem, self._pinned, plain, [*first, *leaders]), *incumbents]
        # What is served was perhaps never a candidate here; it is not replaced by what it would beat.
        study = ScheduleStudy(
            self.space.including(incumbents),
            problem,
            pinned=self._pinned,
            sampler=self.options.sampler,
            seed=self.options.seed,
            elsewhere=elsewhere,
            first=first,
            estimate=estimate,
            among=among,
            repeats=lambda schedule: self._repeats(problem, schedule),
        )
        # From here on the worker must have opened the device: all that comes before it is done meanwhile.
        trials = Trials(self.builder, problem, runner.device, study, known_us, self._inert)
        tried, measured, failed = list(trials.times), 0, 0
        underway: list[Schedule] = []
        followed: set[Schedule] = set()
        most = self._trials if self.options.neighbours else min(self._trials, study.size)
        self.watcher.stage(problem, "measuring", most)
        while (left := self._trials - trials.programs) > 0:
            if trials.programs and _late(deadline_s, share=0.8, started=started):
                break
            best = trials.best if self.options.neighbours else None
            if best is not None and best not in followed:
                followed.add(best)
                study.widen(self.space.neighbours(best, problem, pinned=self._pinned))
            if trials.programs and study.expected_gain() < self._effort.least_gain:
                break
            asked = study.ask(self._propose_batch)
            # What is tried first is built in any case: a run out of time still serves something measured.
            late = [] if asked else underway
            compiled += self.builder.build(
                [*asked, *late],
                problem,
                leave=min(len(asked) // 4, self._leave),
                deadline_s=deadline_s if trials.programs else None,
            )
            tried += asked
            underway += asked
            reached = [each for each in underway if self.builder.record(each, problem)]
            underway = [each for each in underway if not self.builder.record(each, problem)]
            failed += trials.note_builds(reached)
            chosen = study.choose(min(self._measure_batch, left))
            if not asked and not chosen and not underway:
                break
            result = self._race(chosen, problem, runner, trials.best_us, deadline_s if trials.programs else None)
            outcomes = result.outcomes
            trials.note_outcomes(chosen, outcomes)
            measured += len(outcomes)
            failed += sum(isinstance(outcome, Failed) for outcome in outcomes)
            self.watcher.step(trials.programs)
            if trials.best is not None:
                self.watcher.best(trials.best_us, trials.best)
            if result.disturbance:
                break
        self._elsewhere.note(problem, trials.measured())
        return self._decide(problem, runner, trials.times, tried, compiled, measured, failed, started, deadline_s)

    def _repeats(self, problem: Problem, schedule: Schedule) -> bool:
        """Whether building it would most likely give a program that was tried already. What is built costs nothing."""
        return self.builder.record(schedule, problem) is None and self._inert.equal(problem, schedule) >= SURE

    def _first(self, problem: Problem, incumbents: Sequence[Schedule], elsewhere: Sequence[Known]) -> list[Schedule]:
        """What to try first: the default, what is served now, and what won on similar problems of which no more is known."""
        recorded = {known.task for known in elsewhere}
        tuned = [*self.db.entries(self.space.arch, self.kernel.name, provenance="measured"), *self._shipped.winners]
        tuned = for_compiler(tuned, self.toolchain.tileiras)
        near = [entry for entry in tuned if entry.problem != problem and entry.problem not in recorded]
        near.sort(key=lambda entry: (-self.kernel.similarity.weight(problem, entry.problem), entry.problem))
        winners = dict.fromkeys(self.space.complete(entry.schedule) for entry in near)
        return [self._default(problem), *incumbents, *list(winners)[: 0 if elsewhere else MOST_WINNERS]]

    def _evidence(self, problem: Problem, runner: Runner) -> dict[tuple[Schedule, str], float | None]:
        """Times in the store by schedule and machine code, on this device and timed as now; the newest first.

        None, last, for what failed on this device and never ran since. Failures that say more of the day than of the
        program (a lost GPU, a killed worker, memory taken by others) are tried again.
        """
        found: dict[tuple[Schedule, str], float | None] = {}
        for stored in self.db.measurements(problem, self.space.arch, runner.device_name, self.regime):
            if timed_as_now(stored.measurement.regime, stored.measurement.conditions):
                key = self.space.complete(stored.measurement.schedule), stored.measurement.fingerprint
                found.setdefault(key, stored.measurement.median_us)
        for failed in self.db.failures(self.space.arch, problem, stage="measure"):
            if failed.device_name == runner.device_name and failed.failure.kind not in RETRIED:
                found.setdefault((failed.schedule, failed.fingerprint), None)
        return {
            key: us
            for key, us in found.items()
            if fits(key[0], self._pinned) and not self.space.unworkable(key[0], problem)
        }

    def _rebuild(
        self, problem: Problem, evidence: Mapping[tuple[Schedule, str], float | None], deadline_s: float | None
    ) -> int:
        """Build what was measured of another compiler's or another source's machine code; how many were compiled.

        The fastest first, in batches, for as long as some of it comes out the same: of that nothing is measured again.
        """
        allowed = set(self.space.candidates)
        ranked = sorted(evidence, key=lambda key: us if (us := evidence[key]) is not None else math.inf)
        left = [
            each
            for each in dict.fromkeys(schedule for schedule, _ in ranked)
            if self.builder.record(each, problem) is None and (not allowed or each in allowed)
        ]
        left, compiled = left[: self._trials], 0
        for start in range(0, len(left), self._propose_batch):
            batch = left[start : start + self._propose_batch]
            compiled += self.builder.build(batch, problem, deadline_s=deadline_s)
            if not any((each, self.builder.fingerprint(each, problem)) in evidence for each in batch):
                break
        return compiled

    def _race(
        self, chosen: Sequence[Schedule], problem: Problem, runner: Runner, best_us: float, deadline_s: float | None
    ) -> RaceResult:
        """Measure the programs of `chosen`, well enough to learn from."""
        programs = self.builder.programs(chosen, problem, runner.device)
        regime = self.regime
        return race(
            runner,
            problem,
            self.builder.candidates(programs),
            rules=LOOKS[regime],
            regime=regime,
            known_us=best_us,
            deadline_s=deadline_s,
            on_outcome=lambda outcome: self._keep(outcome, problem, runner),
        )

    def _decide(
        self,
        problem: Problem,
        runner: Runner,
        times: dict[Schedule, float | None],
        tried: list[Schedule],
        compiled: int,
        measured: int,
        failed: int,
        started: float,
        deadline_s: float | None,
    ) -> TuneResult:
        """Race the leaders and the default afresh and store the winner. What is served already keeps its place in a tie."""
        default = self._default(problem)
        preferred = [*self._incumbents(problem, runner.device.name), default]
        worked = [(us, schedule) for schedule, us in times.items() if us is not None]
        worked.sort(key=lambda pair: pair[0])  # stable: of equal programs, the one that was measured stays first
        ordered = [schedule for _, schedule in worked]
        ordered += [schedule for schedule in preferred if schedule not in times]  # time ran out before their turn
        compiled += self.builder.build([*ordered[: 4 * self._effort.finalists], *preferred], problem)
        programs = self.builder.programs(ordered, problem, runner.device)
        finalists = programs[: self._effort.finalists]
        finalists += [
            program for program in programs[self._effort.finalists :] if set(preferred) & set(program.schedules)
        ]
        if not finalists:
            raise NoValidScheduleError(self._nothing_works(problem, tried))
        preference = [
            program.schedule for schedule in preferred for program in finalists if schedule in program.schedules
        ]
        self.watcher.stage(problem, "deciding", len(finalists))
        result = race(
            runner,
            problem,
            self.builder.candidates(finalists),
            preference=preference,
            regime=self.regime,
            on_outcome=lambda outcome: self._keep(outcome, problem, runner),
        )
        if result.disturbance:
            raise MeasureError(
                f"nothing is decided for {problem}, and what is served stays: all was timed {result.disturbance}; "
                "end it (nvidia-smi lists it), or run again when it has ended"
            )
        if result.winner is None:
            raise NoValidScheduleError(self._nothing_works(problem, tried))
        self.watcher.step(len(finalists))
        result = self._settled(result, finalists, problem, runner, deadline_s)
        assert result.winner is not None
        times_us = {each.schedule: each.median_us for each in result.outcomes if isinstance(each, Measurement)}
        plain_us = next((times_us.get(program.schedule) for program in finalists if default in program.schedules), None)
        measurement_id = self._measurement_ids[result.winner.schedule, self.regime]
        entry = self._entry(
            problem,
            result.winner.schedule,
            result.winner.fingerprint,
            provenance="measured",
            device_name=runner.device.name,
            regime=self.regime,
            measurement_id=measurement_id,
            runner_up=result.runner_up.schedule if result.runner_up else None,
            margin=result.margin,
            ties=result.ties,
            candidates=len(programs),
            rivals=self._race_rivals(problem, runner, result.winner, finalists),
        )
        return TuneResult(
            entry=entry,
            stored=self.db.put_entry(entry),
            schedules=len(tried),
            programs=len(programs),
            compiled=compiled,
            measured=measured,
            failed=failed,
            seconds=time.monotonic() - started,
            over_default=plain_us / result.winner.median_us - 1 if plain_us else None,
            over_runner_up=result.margin,
        )

    def _settled(
        self,
        result: RaceResult,
        finalists: Sequence[Program],
        problem: Problem,
        runner: Runner,
        deadline_s: float | None,
    ) -> RaceResult:
        """The verdict of the burst race, those near its winner timed in the sustained regime, too."""
        close = {each.schedule for each in near(result)}
        late = deadline_s is not None and time.monotonic() > deadline_s
        if (
            self.regime != "burst"
            or not self._effort.both_regimes
            or not runner.regimes >= set(REGIMES)
            or len(close) < 2
            or late
        ):
            return result
        self.watcher.stage(problem, "at the power cap", len(close))
        candidates = [each for each in self.builder.candidates(finalists) if each.schedule in close]
        sustained = race(
            runner,
            problem,
            candidates,
            rules=LOOKS["sustained"],
            regime="sustained",
            deadline_s=deadline_s,
            on_outcome=lambda outcome: self._keep(outcome, problem, runner),
        )
        self.watcher.step(len(close))
        return result if sustained.disturbance else settle(result, sustained)

    def _race_rivals(
        self, problem: Problem, runner: Runner, winner: Measurement, finalists: Sequence[Program]
    ) -> tuple[RivalTime, ...] | None:
        """What rivals take next to the winner. Where they are not timed, what was stored with an entry of the same machine
        code.
        """
        if self._rivals is not None:
            self.watcher.stage(problem, "rivals", 1)
            candidates = self.builder.candidates(finalists)
            candidate = next(
                each
                for each in candidates
                if each.artifact.fingerprint == winner.fingerprint and each.schedule == winner.schedule
            )
            found = self._rivals(problem, candidate)
            self.watcher.step(1)
            if found is not None:
                return tuple(found)
        known = self.db.entries(
            self.space.arch,
            self.kernel.name,
            problem=problem,
            device_name=runner.device.name,
            regime=self.regime,
            accum_mode=self.accum_mode,
        )
        return next((each.rivals for each in known if each.fingerprint == winner.fingerprint and each.rivals), None)

    def _incumbents(self, problem: Problem, device_name: str) -> list[Schedule]:
        """What would be served on a device without this run, from this database or any other source: it can only be beaten."""
        entries = (
            self.db.entries(
                self.space.arch,
                self.kernel.name,
                problem=problem,
                provenance="measured",
                device_name=device_name,
                regime=self.regime,
                accum_mode=self.accum_mode,
            )
            if device_name
            else []
        )
        incumbents = [entry.schedule for entry in for_compiler(entries, self.toolchain.tileiras)]
        if self._served is not None:
            incumbents += self._served(problem, device_name)
        incumbents = [self.space.complete(schedule) for schedule in incumbents]
        return [
            each
            for each in dict.fromkeys(incumbents)
            if fits(each, self._pinned) and not self.space.unworkable(each, problem)
        ]

    def _keep(self, outcome: Outcome, problem: Problem, runner: Runner) -> None:
        """Store one outcome, at once."""
        number = self.builder.keep(outcome, self.run_id, problem, runner.device)
        measured = outcome if isinstance(outcome, Measurement) else None
        elsewhere = measured is not None and (measured.conditions.concurrent_pids or measured.regime != self.regime)
        if self._live is not None and not elsewhere:
            built = self.builder.record(outcome.schedule, problem)
            self._live.add(outcome, built.facts if built else None)
        if measured is not None and number is not None:
            self._measurement_ids[measured.schedule, measured.regime] = number

    # Both

    def _default(self, problem: Problem) -> Schedule:
        return self.space.default(problem, pinned=self._pinned)

    def _build(self, order: Sequence[Schedule], problem: Problem, deadline_s: float | None) -> int:
        """Build the first of `order`, as many as the effort says; what is likely to be a program built already is put off."""
        spec, least = arch_spec(self.space.arch), math.inf
        most = len(order) if self._builds is None else min(self._builds, len(order))
        left, done, compiled = dict.fromkeys(order), 0, 0

        def built(count: int, record: BuildRecord) -> None:
            nonlocal least
            self.watcher.step(done + count)
            if record.facts is not None:
                us = self.kernel.cost.model(problem, record.schedule, record.facts, spec)
                if us < least:
                    least = us
                    self.watcher.best(us, record.schedule)

        while done < most and not (compiled and deadline_s is not None and time.monotonic() > deadline_s):
            chosen = order
            if most < len(order):
                batch = min(max(LEARNT_AT_ONCE, self.builder.jobs), most - done)
                chosen = self._inert.put_off(problem, list(left), batch)
            if not compiled and self.builder.missing(chosen, problem):
                self.watcher.stage(problem, "compiling", most)
            compiled += self.builder.build(chosen, problem, progress=built, deadline_s=deadline_s)
            learn(self._inert, problem, self.builder.programs(chosen, problem, spec))
            for schedule in chosen:
                del left[schedule]
            done += len(chosen)
        return compiled

    def _entry(self, problem: Problem, schedule: Schedule, fingerprint: str, **more: object) -> Entry:
        values: dict[str, object] = {
            "kernel": self.kernel.name,
            "arch": self.space.arch,
            "problem": problem,
            "schedule": schedule,
            "fingerprint": fingerprint,
            "accum_mode": self.accum_mode,
            "source": self._source,
            "toolchain": self.toolchain,
            "source_hash": self.builder.source_hash,
            "run_id": self.run_id,
            **more,
        }
        return Entry(**values)  # type: ignore[arg-type]

    def _build_failures(self, schedules: Sequence[Schedule], problem: Problem) -> int:
        records = (self.builder.record(schedule, problem) for schedule in schedules)
        return sum(record is not None and record.failure is not None for record in records)

    def _nothing_works(self, problem: Problem, schedules: Sequence[Schedule]) -> str:
        if not schedules:
            return f"{self.space.source} holds no valid schedule for {problem}; relax its constraints"
        reasons = {
            str(record.failure.kind)
            for schedule in schedules
            if (record := self.builder.record(schedule, problem)) and record.failure
        }
        reasons |= {str(failure.failure.kind) for failure in self.db.failures(self.space.arch, problem)}
        why = ", ".join(sorted(reasons)) or "the budget ended first"
        return (
            f"no schedule of {len(schedules)} works for {problem} on {self.space.arch}: {why}; run: tiledsched doctor"
        )


def expected_order(
    schedules: Sequence[Schedule], problem: Problem, spec: ArchSpec, *, first: Sequence[Schedule]
) -> list[Schedule]:
    """The order in which to build where the model ranks: `first`, then by the model's estimate before anything is built."""
    estimate = estimator(problem, spec)
    return list(dict.fromkeys([*first, *sorted(schedules, key=lambda each: (estimate(each, None), each.id))]))


def fits(schedule: Schedule, pinned: Mapping[str, KnobValue]) -> bool:
    """Whether a schedule has the pinned knobs at their values."""
    return all(schedule.get(name) == value for name, value in pinned.items())


def modelled_times(arch: str, kernel: KernelClass) -> Callable[[Problem, Sequence[BuildRecord]], dict[str, float]]:
    """The model's view of built schedules, for reports: maps a problem and builds to schedule id -> modelled us."""
    from tiledsched.core.launch import problem_class

    spec = arch_spec(arch)

    def times(problem: Problem, builds: Sequence[BuildRecord]) -> dict[str, float]:
        return {
            build.schedule.id: kernel.cost.model(problem, build.schedule, build.facts, spec)
            for build in builds
            if build.facts and build.problem_class == problem_class(kernel, problem, build.schedule, spec)
        }

    return times


def _late(deadline_s: float | None, *, share: float, started: float) -> bool:
    """Whether `share` of the time from `started` to the deadline has passed."""
    return deadline_s is not None and time.monotonic() - started > share * (deadline_s - started)
