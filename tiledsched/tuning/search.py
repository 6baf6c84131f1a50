"""The tune of one problem: what it has in common with a GPU and without one, and the search with a GPU.

Schedules are proposed and built, and the most promising of them measured, in batches, until no more gain is expected or the
programs or the budget are used up; then the leaders race each other afresh, interleaved, because times of different batches are
never compared for the verdict.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from tiledsched.core.config import INVARIANT, Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import Failure, FailureKind, MeasureError, NoValidScheduleError, says_line
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import RACED, SearchSpace, accuracy_class
from tiledsched.measure.clocks import describe_throttling, summarise_throttling
from tiledsched.measure.runner import GIB, LAUNCHED, Candidate, Checked, Failed, Measurement, RivalTime, Runner
from tiledsched.store.evidence import clocks_of, for_compiler, of_kernel, timed_as_now
from tiledsched.store.records import Entry
from tiledsched.tuning.builder import Builder, Key, Program
from tiledsched.tuning.inert import SURE, InertChanges
from tiledsched.tuning.options import EFFORTS, TuneOptions
from tiledsched.tuning.prior import (
    Elsewhere,
    Shipped,
    estimator,
    judged,
    plain_schedules,
    promising_part,
    winners_nearby,
)
from tiledsched.tuning.race import RULES, Outcome, RaceResult, near, race, settle, time_ratio
from tiledsched.tuning.results import NumbersKept, TuneResult, WantedNumbers, Watcher
from tiledsched.tuning.samplers import OURS
from tiledsched.tuning.study import ScheduleStudy, Trials
from tiledsched.tuning.surrogate import Known

DEFAULTS = Settings()
"""What decides where neither the options nor the settings say it."""
MOST_WINNERS = 4
"""Winners of similar problems that are tried first where nothing else is known of those problems."""
Served = Callable[[Problem, str], "Sequence[Schedule]"]
"""What would be served for a problem on a device of this name were nothing tuned, and what came close to it where its time may
have changed since; none where this space knows nothing.
"""
Rivals = Callable[[Problem, Candidate], "list[RivalTime] | None"]
"""Times a kernel's rivals next to a winner, on the problem it won; None where they cannot be timed."""
LISTING, LEAST_LISTING_S = 0.5, 0.5
"""Schedules are listed and judged for at most this share of the time of a problem, and so many seconds in any case."""
OUT_OF_TIME = "the budget ended first"
"""Why a problem has no result that the budget did not reach."""
NO_SEARCH = "no search"
"""What the source of an entry says that stands on a race of what was served, without a search."""
MOST_OVERLAPPING = 4
"""Most programs that race because their launches overlap otherwise: the two other ways of the two fastest schedules."""
LOOKS = {
    regime: replace(rules, most_rounds=rules.opening_rounds + rules.heat_rounds) for regime, rules in RULES.items()
}
"""Rules by which a batch is measured: enough samples to learn from; the deciding race comes last."""


class TuneContext:
    """What the tunes of all problems of one kernel for one arch share.

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
    ) -> None:
        self.builder, self.space, self.options, self.run_id, self.runner = builder, space, options, run_id, runner
        self.served, self.shipped, self.rivals = served, shipped or Shipped(), rivals
        self.watcher = watcher or Watcher()
        self.regime = options.regime or DEFAULTS.regime
        invariant = options.numerics == INVARIANT
        self.accum_mode = INVARIANT if invariant else options.accum_mode or DEFAULTS.accum_mode
        self.pinned = accuracy_class(space, self.accum_mode)
        self.effort = EFFORTS[options.effort]
        self.most_programs = self.effort.programs if options.trials is None else options.trials
        self.most_builds = self.effort.modelled if options.trials is None else options.trials
        # The surrogate learns more from small batches, but every compile process should have something to do.
        self.guided = options.sampler == OURS
        guided_batch = max(self.effort.batch * self.effort.builds, builder.pool.jobs)
        self.propose_batch = guided_batch if self.guided else max(8, 2 * builder.pool.jobs)
        self.measure_batch = self.propose_batch // (self.effort.builds if self.guided else 1)
        # Of each batch the last to compile take several times as long as most: they go on while the others are measured,
        # where there are cores enough for both.
        self.leave = max(0, builder.pool.jobs - 4) // 2
        self.inert = InertChanges(space.knobs)
        self.elsewhere = Elsewhere(builder.db, space, self.regime, self.accum_mode, self.shipped)
        self.left: dict[Problem, str] = {}
        """Problems without a result, and why."""

    @cached_property
    def clocks(self) -> dict[str, int]:
        """By the name of each GPU, the highest clock at which it was measured for what is stored, in MHz."""
        return clocks_of(self.builder.db.entries(self.space.arch, self.builder.kernel.name))


class ProblemTune:
    """The tune of one problem: what it has in common with a GPU and without one."""

    def __init__(self, tuner: TuneContext, problem: Problem, deadline_s: float) -> None:
        self.tuner, self.problem, self.deadline_s, self.started = tuner, problem, deadline_s, time.monotonic()
        self.builder, self.space, self.watcher = tuner.builder, tuner.space, tuner.watcher
        self.db, self.kernel, self.spec = tuner.builder.db, tuner.builder.kernel, arch_spec(tuner.space.arch)
        self.compiled = self.failed = 0
        self._refused: dict[Schedule, None] = {}
        """What computes right, and not the numbers that are wanted."""

    @cached_property
    def default(self) -> Schedule:
        """The default schedule of the problem, in the accuracy class that is tuned."""
        return self.space.default(self.problem, pinned=self.tuner.pinned)

    def listed_s(self) -> float:
        """The `time.monotonic()` after which no more schedules are listed and judged: the rest is for building and measuring."""
        return max(self.started + LISTING * (self.deadline_s - self.started), time.monotonic() + LEAST_LISTING_S)

    def workable(self, schedule: Schedule) -> bool:
        """Whether a schedule is of the accuracy class that is tuned and can work for the problem."""
        return self.tuner.pinned.items() <= schedule.items() and not self.space.unworkable(schedule, self.problem)

    def find_incumbents(self, device_name: str) -> list[Schedule]:
        """What would be served on a device without this run, from this database or any other source: it can only be beaten."""
        found = for_compiler(self.entries(device_name) if device_name else [], self.builder.toolchain.tileiras)
        incumbents = [entry.schedule for entry in found if entry.provenance == "measured"]
        if self.tuner.served is not None:
            incumbents += self.tuner.served(self.problem, device_name)
        return [each for each in dict.fromkeys(map(self.space.complete, incumbents)) if self.workable(each)]

    def entries(self, device_name: str) -> list[Entry]:
        """The entries in the database for the problem on a device, in the regime and the accuracy class that are tuned."""
        found = self.db.entries(
            self.space.arch,
            self.kernel.name,
            problem=self.problem,
            device_name=device_name,
            regime=self.tuner.regime,
            accum_mode=self.tuner.accum_mode,
        )
        return of_kernel(found, self.kernel)

    def candidates(
        self, tried: Iterable[Schedule], worked: Container[Schedule], pinned: Mapping[str, KnobValue]
    ) -> dict[str, int] | None:
        """What became of the rows of the file of candidates; None where there is no file."""
        if not self.space.listed_in:
            return None
        reached = {each: RACED if each in worked else self._failure(each) for each in tried}
        return self.space.count_candidates(self.problem, pinned, reached)

    def _failure(self, schedule: Schedule) -> str:
        record = self.builder.record(schedule, self.problem)
        kind = record.failure.kind if record is not None and record.failure is not None else "failed on the GPU"
        return "differs from the incumbent's numbers" if schedule in self._refused else str(kind).replace("_", " ")

    def entry(self, schedule: Schedule, fingerprint: str, programs: int, **more: Any) -> Entry:
        """The entry that this tune writes for a winner among so many programs."""
        run, listed = f"tune run {self.tuner.run_id}", self.space.listed_in
        how = "neighbours" if self.tuner.options.neighbours else ""
        numbers, memory = more.pop("numbers", None), more.pop("memory", "")
        if not self.tuner.most_programs and not self.was_searched(more.get("device_name", "")):
            how = NO_SEARCH
        return Entry(
            kernel=self.kernel.name,
            arch=self.space.arch,
            problem=self.problem,
            schedule=schedule,
            fingerprint=fingerprint,
            accum_mode=self.tuner.accum_mode,
            candidates=programs,
            source=", ".join(filter(None, [run, listed, how, memory])) + (f"; {numbers}" if numbers else ""),
            toolchain=self.builder.toolchain,
            source_hash=self.builder.evidence_source,
            run_id=self.tuner.run_id,
            **more,
        )

    def was_searched(self, device_name: str) -> bool:
        """Whether what the database holds for the problem on a device, of this compiler and source, was found by a search."""
        now = self.builder.toolchain.tileiras, self.builder.evidence_source
        return any(
            NO_SEARCH not in each.source
            for each in self.entries(device_name)
            if each.provenance == "measured" and (each.compiler, each.source_hash) == now
        )

    def nothing_works(self, schedules: Sequence[Schedule]) -> NoValidScheduleError:
        """The error for a problem of which none of these schedules works."""
        if not schedules:
            return NoValidScheduleError(
                f"{self.space.source} holds no valid schedule for {self.problem}; relax its constraints"
            )
        failures = self.build_failures(schedules)
        failures += [each.failure for each in self.db.failures(self.space.arch, self.problem)]
        why = ", ".join(sorted({str(failure.kind) for failure in failures})) or OUT_OF_TIME
        commonest = commonest_message(failures)
        todo = "run: tiledsched doctor"
        if "UnsupportedFeatureError" in commonest:
            todo = f"cuTile has no such feature on {self.space.arch}; choose another type, or another GPU"
        elif commonest and says_line(commonest):
            todo = "correct that line, and check the kernel: tiledsched check"
        return NoValidScheduleError(
            f"no schedule of {len(schedules)} works for {self.problem} on {self.space.arch}: "
            f"{': '.join(filter(None, [why, commonest]))}; {todo}"
        )

    def build_failures(self, schedules: Iterable[Schedule]) -> list[Failure]:
        """Why schedules did not build, one failure for each of those that did not."""
        records = (self.builder.record(schedule, self.problem) for schedule in schedules)
        return [record.failure for record in records if record and record.failure]


class ProblemSearch(ProblemTune):
    """Tunes a problem with a GPU: proposes, builds and measures in batches, and lets the leaders race for the decision."""

    def __init__(self, tuner: TuneContext, runner: Runner, problem: Problem, deadline_s: float) -> None:
        super().__init__(tuner, problem, deadline_s)
        self.runner, self.spec = runner, arch_spec(tuner.space.arch, runner.device_name)
        self._measurement_ids: dict[tuple[Schedule, str], int] = {}
        self._taken: list[Measurement] = []
        self._known: list[Schedule] = []
        """What the store had a time of before this run."""
        self.wanted: WantedNumbers | None = None
        self.seen_mhz = 0
        """The highest clock of the GPU in earlier measurements."""

    def run(self) -> TuneResult:
        """Search, and let a race decide."""
        tuner, problem = self.tuner, self.problem
        self.runner.begin(problem)
        if not self.db.entries(self.space.arch, self.kernel.name, problem=problem, provenance="measured"):
            self.builder.pool.start()  # and both while we look up and judge what there is
        trials = self.begin()
        tried = self.search(trials)
        tuner.elsewhere.note(problem, trials.measured())
        return self.decide(trials, tried)

    def begin(self) -> Trials:
        """Look up what is known, and begin a study with it."""
        tuner, problem, space = self.tuner, self.problem, self.space
        estimate, among = estimator(problem, self.spec), None
        searches = tuner.most_programs > 0
        partly = searches and tuner.guided and not space.candidates
        listed_s = self.listed_s()
        plain = plain_schedules(space, problem, tuner.pinned, estimate, listed_s) if partly else []
        self.incumbents = self.find_incumbents(self.runner.device_name)
        self.wanted = self.find_wanted() if tuner.options.numerics == "same" else None
        evidence = self.evidence()
        self.rebuild(evidence)
        known_us = {
            schedule: us
            for (schedule, fingerprint), us in evidence.items()
            if self.builder.fingerprint(schedule, problem) == fingerprint
        }
        self._known = [schedule for schedule, us in known_us.items() if us is not None]
        # Times of other machine code are no verdict; they tell where to look.
        elsewhere: list[Known] = []
        if tuner.guided and searches:
            elsewhere = tuner.elsewhere.known(
                problem, self.runner.device_name, self.spec, itself=not known_us, deadline_s=listed_s
            )
        first = [self.default, *self.incumbents, *(self.winners_elsewhere() if searches and not elsewhere else [])]
        if partly:  # what is tried first is built while the rest is judged
            early = [each for each in first if each in self.incumbents or not space.violations(each, problem)]
            self.compiled += self.builder.build(early, problem, leave=len(early))
            leaders = [Schedule(known.candidates[0]) for known in elsewhere]
            among = promising_part(space, problem, tuner.pinned, plain, [*first, *leaders], listed_s)
            among = judged(among, estimate, listed_s) + self.incumbents
        elif not searches:
            among = first
        else:  # what is served was perhaps never a candidate here; it is not replaced by what it would beat
            space = space.including(self.incumbents)
            among, _ = space.listed(problem, pinned=tuner.pinned, deadline_s=listed_s)
            among = judged(among, estimate, listed_s) if tuner.guided else among
        self.study = ScheduleStudy(
            space.including(self.incumbents),
            problem,
            pinned=tuner.pinned,
            sampler=tuner.options.sampler,
            seed=tuner.options.seed,
            elsewhere=elsewhere,
            first=first,
            estimate=estimate,
            among=among,
            repeats=self.repeats,
        )
        # From here on the worker must have opened the device: all that comes before it is done meanwhile.
        return Trials(self.builder, problem, self.runner.device, self.study, known_us, tuner.inert)

    def evidence(self) -> dict[tuple[Schedule, str], float | None]:
        """Times in the store by schedule and machine code, on this device, at its clock and timed as now; the newest first.

        None, last, for what failed on this device and never ran since. Where the same numbers are wanted, None also for what is
        known to compute others, and nothing for what is not known to compute the same: it is measured again.
        """
        found: dict[tuple[Schedule, str], float | None] = {}
        device_name = self.runner.device_name
        known = self.db.measurements(self.problem, self.space.arch, device_name, self.tuner.regime)
        clocks = [stored.measurement.conditions.sm_clock_mhz for stored in known]
        self.seen_mhz = max([*clocks, self.tuner.clocks.get(device_name, 0)])
        for stored in known:
            taken = stored.measurement
            slowed = describe_throttling(taken.conditions, taken.device, taken.regime, self.seen_mhz)
            if timed_as_now(taken.regime, taken.conditions) and not slowed:
                key = self.space.complete(stored.measurement.schedule), stored.measurement.fingerprint
                wanted = True if self.wanted is None else self.wanted.known(taken)
                if wanted is not None:
                    found.setdefault(key, taken.median_us if wanted else None)
                if wanted is False:
                    self._refused[key[0]] = None
        for key in self.builder.broken(self.problem, device_name):
            found.setdefault(key, None)
        return {key: us for key, us in found.items() if self.workable(key[0])}

    def rebuild(self, evidence: Mapping[tuple[Schedule, str], float | None]) -> None:
        """Build what was measured of another compiler's or another source's machine code.

        The fastest first, in batches, for as long as some of it comes out the same: of that nothing is measured again.
        """
        allowed = set(self.space.candidates)
        ranked = sorted(evidence, key=lambda key: us if (us := evidence[key]) is not None else math.inf)
        left = [
            each
            for each in dict.fromkeys(schedule for schedule, _ in ranked)
            if self.builder.record(each, self.problem) is None and (not allowed or each in allowed)
        ][: self.tuner.most_programs]
        for start in range(0, len(left), self.tuner.propose_batch):
            batch = left[start : start + self.tuner.propose_batch]
            self.compiled += self.builder.build(batch, self.problem, deadline_s=self.deadline_s)
            if not any((each, self.builder.fingerprint(each, self.problem)) in evidence for each in batch):
                break

    def winners_elsewhere(self) -> list[Schedule]:
        """What won on similar problems, by the database and by what ships."""
        tuned = [
            *of_kernel(self.db.entries(self.space.arch, self.kernel.name, provenance="measured"), self.kernel),
            *self.tuner.shipped.winners,
        ]
        winners = winners_nearby(self.problem, for_compiler(tuned, self.builder.toolchain.tileiras))
        return list(dict.fromkeys(map(self.space.complete, winners)))[:MOST_WINNERS]

    def repeats(self, schedule: Schedule) -> bool:
        """Whether building it would most likely give a program that was tried already. What is built costs nothing."""
        built = self.builder.record(schedule, self.problem) is not None
        late = time.monotonic() > self.deadline_s
        return not built and not late and self.tuner.inert.equal(self.problem, schedule) >= SURE

    def search(self, trials: Trials) -> list[Schedule]:
        """Propose, build and measure until enough is known; what was tried, earlier runs included."""
        tuner, problem, study = self.tuner, self.problem, self.study
        tried, underway, followed = list(trials.times), list[Schedule](), set[Schedule]()
        searched_s = 0.8 * (self.deadline_s - self.started)  # the rest is left for the decision
        most = tuner.most_programs if tuner.options.neighbours else min(tuner.most_programs, study.size)
        self.watcher.stage(problem, "measuring", most)
        while (left := tuner.most_programs - trials.programs) > 0:
            if trials.programs and time.monotonic() - self.started > searched_s:
                break
            best, best_us = trials.best
            if tuner.options.neighbours and best is not None and best not in followed:
                followed.add(best)
                near = self.space.neighbours(best, problem, pinned=tuner.pinned)
                study.widen(itertools.takewhile(lambda _: time.monotonic() < self.deadline_s, near))
            if trials.programs and study.expected_gain() < tuner.effort.least_gain:
                break
            proposed = study.ask(tuner.propose_batch)
            # What is tried first is built in any case: a run out of time still serves something measured.
            deadline_s = self.deadline_s if trials.programs else math.inf
            late = [] if proposed else underway
            self.compiled += self.builder.build(
                [*proposed, *late], problem, leave=min(len(proposed) // 4, tuner.leave), deadline_s=deadline_s
            )
            tried += proposed
            underway += proposed
            reached = [each for each in underway if self.builder.record(each, problem)]
            underway = [each for each in underway if not self.builder.record(each, problem)]
            self.failed += trials.note_builds(reached)
            chosen = study.choose(min(tuner.measure_batch, left))
            if not proposed and not chosen and not underway:
                break
            result = self.race(
                self.builder.programs(chosen, problem, self.runner.device),
                rules=replace(LOOKS[tuner.regime], check_all=self.wanted is not None),
                known_us=best_us,
                deadline_s=deadline_s,
            )
            trials.note_outcomes(chosen, result.outcomes)
            self.failed += sum(
                isinstance(outcome, Failed) and outcome.failure.kind is not FailureKind.OTHER_NUMBERS
                for outcome in result.outcomes
            )
            self.watcher.step(trials.programs)
            best, best_us = trials.best
            if best is not None:
                self.watcher.best(best_us, best)
            if result.disturbance:
                break
        return tried

    def race(self, programs: Sequence[Program], *, regime: str = "", **how: Any) -> RaceResult:
        """Race programs in the regime that is tuned, or another; every outcome is stored at once."""
        candidates = self.builder.candidates(programs)
        regime = regime or self.tuner.regime
        if self.wanted is not None:
            how.setdefault("requires", self.wanted.why_not)
        return race(self.runner, self.problem, candidates, regime=regime, on_outcome=self.keep, **how)

    def keep(self, outcome: Outcome) -> None:
        """Store one outcome, at once."""
        number = self.builder.keep(outcome, self.tuner.run_id, self.problem, self.runner.device)
        if isinstance(outcome, Failed) and outcome.failure.kind is FailureKind.OTHER_NUMBERS:
            self._refused[outcome.schedule] = None
        if isinstance(outcome, Measurement):
            self._taken.append(outcome)
            if number is not None:
                self._measurement_ids[outcome.schedule, outcome.regime] = number

    def measurement_id(self, taken: Measurement) -> int:
        """The number under which an outcome of this tune is stored."""
        return self._measurement_ids[taken.schedule, taken.regime]

    def raced(self, incumbents: Sequence[Schedule]) -> list[Schedule]:
        """What races in any case: what is served and the default, or without finalists only what is served."""
        return [*incumbents, self.default][: None if self.tuner.effort.finalists else 1]

    def overlapping(self, schedules: Iterable[Schedule]) -> list[Schedule]:
        """The fastest of some schedules that have several launches, the fastest first, with these launches overlapping in other
        ways, which no search lists; none where only listed schedules may race, nothing is searched, or there is no time left."""
        if not self.tuner.most_programs or self.space.candidates or time.monotonic() > self.deadline_s:
            return []
        fixed = {*self.space.knobs, *self.tuner.pinned} - {"pdl"}
        others = (self.space.neighbours(each, self.problem, pinned=fixed, changes=1) for each in schedules)
        return list(itertools.islice(itertools.chain.from_iterable(others), MOST_OVERLAPPING))

    def decide(self, trials: Trials, tried: Sequence[Schedule]) -> TuneResult:
        """Race the leaders and the default afresh and store the winner. What is served already keeps its place in a tie."""
        problem, finalists_wanted = self.problem, self.tuner.effort.finalists
        preferred = self.raced(self.incumbents)
        unreached = [
            schedule for schedule in preferred if schedule not in trials.times
        ]  # time ran out before their turn
        ordered = [*trials.ranked, *unreached]
        always = {*preferred, *(overlapping := self.overlapping(ordered[:finalists_wanted]))}
        self.compiled += self.builder.build([*ordered[: 4 * finalists_wanted], *preferred, *overlapping], problem)
        programs = self.builder.programs([*ordered, *overlapping], problem, self.runner.device)
        finalists = programs[:finalists_wanted]
        finalists += [each for each in programs[finalists_wanted:] if always & set(each.schedules)]
        tried = tried or list(dict.fromkeys(preferred))
        if not finalists:
            raise self.nothing_works(tried)
        result = self.sound(finalists, preferred)
        if result.disturbance:
            raise MeasureError(
                f"nothing is decided for {problem}, and what is served stays: all was timed {result.disturbance}; "
                "end it (nvidia-smi lists it), or run again when it has ended"
            )
        if result.winner is None:
            raise self.nothing_works(tried)
        winner = result.winner
        measurement_id = self.measurement_id(winner)
        taken = [each.schedule for each in self._taken if each.regime == self.tuner.regime]
        timed, known = self.programs([*trials.ranked, *taken]), self.programs(self._known)
        numbers, memory = self.price_of_same_numbers(winner, finalists), self.memory(winner)
        times_us = {each.schedule: each.median_us for each in result.outcomes if isinstance(each, Measurement)}
        plain_us = next((times_us.get(each.schedule) for each in finalists if self.default in each.schedules), None)
        entry = self.entry(
            winner.schedule,
            winner.fingerprint,
            len(timed),
            provenance="measured",
            device_name=self.runner.device.name,
            regime=self.tuner.regime,
            measurement_id=measurement_id,
            runner_up=result.runner_up.schedule if result.runner_up else None,
            margin=result.margin,
            ties=result.ties,
            rivals=self.rival_times(winner, finalists),
            numbers=numbers,
            memory=memory,
        )
        return TuneResult(
            entry=entry,
            stored=self.db.put_entry(entry),
            schedules=len(tried),
            programs=len(timed),
            compiled=self.compiled,
            measured=len(timed - known),
            failed=self.failed,
            seconds=time.monotonic() - self.started,
            over_default=plain_us / winner.median_us - 1 if plain_us else None,
            over_runner_up=result.margin,
            held_down=summarise_throttling(self._taken, self.seen_mhz),
            candidates=self.candidates(trials.times, trials.ranked, self.tuner.pinned),
            numbers=numbers,
            memory=memory,
            why_failed=commonest_message(self.build_failures(tried)),
        )

    def memory(self, winner: Measurement) -> str:
        """What the search took of the memory that it might take, in words; empty where it had no limit."""
        peak, cap = max(each.conditions.memory_peak_bytes for each in self._taken), winner.conditions.memory_cap_bytes
        beside_gib = self.tuner.options.beside_gib
        return f"beside {beside_gib} GiB: took at most {peak / GIB:.2f} of {cap / GIB:.2f} GiB" if cap else ""

    def programs(self, schedules: Sequence[Schedule]) -> set[Key]:
        """The distinct programs among schedules that were built."""
        return {each.key for each in self.builder.programs(schedules, self.problem, self.runner.device)}

    def sound(self, finalists: list[Program], preferred: Sequence[Schedule]) -> RaceResult:
        """The verdict of a race, whose winner is also right on the sizes beside its tiles, which it will serve: one that is not
        fails, leaves `finalists`, and the others race again."""
        while True:
            order = [each.schedule for one in preferred for each in finalists if one in each.schedules]
            self.watcher.stage(self.problem, "deciding", len(finalists))
            result = self.race(finalists, preference=order)
            self.watcher.step(len(finalists))
            if result.winner is None:
                return result
            result = self.settled(result, finalists)
            winner = result.winner
            failure = self.failure_at_borders(winner) if winner is not None else None
            if winner is None or failure is None:
                return result
            self.keep(Failed(schedule=winner.schedule, fingerprint=winner.fingerprint, failure=failure))
            finalists[:] = [each for each in finalists if winner.schedule not in each.schedules]
            if not finalists:
                return RaceResult(winner=None, outcomes=())

    def failure_at_borders(self, winner: Measurement) -> Failure | None:
        """How a schedule fails the accuracy gate on small problems at the borders of its tiles; None where it passes on all that
        build."""
        # A recording holds no other problems, and without finalists nothing takes the place of what is served.
        if self.runner.name != "gpu" or not self.tuner.effort.finalists:
            return None
        from tiledsched.checking.sizes import neighbours  # imports cuTile

        near = neighbours(self.kernel, self.space, self.problem, winner.schedule)
        self.compiled += self.builder.build_for_each([(winner.schedule, each) for each in near])
        try:
            for problem in near:
                for program in self.builder.programs([winner.schedule], problem, self.runner.device):
                    self.runner.begin(problem)
                    checked = self.runner.check(self.builder.candidates([program])[0])
                    if isinstance(checked, Failure):
                        return replace(
                            checked, message=f"right on {self.problem}, wrong on {problem}: {checked.message}"
                        )
        finally:
            if near:
                self.runner.begin(self.problem)
        return None

    def find_wanted(self) -> WantedNumbers | None:
        """The numbers that a schedule must give to win: those of what is served, or else of the first that works of what could
        be, the default last; None where nothing of that works, so that any right numbers are the first.
        """
        served = self.tuner.served(self.problem, self.runner.device_name)[:1] if self.tuner.served is not None else []
        first = [each for each in map(self.space.complete, served) if each in self.incumbents]
        for schedule in dict.fromkeys([*first, *self.incumbents, self.default]):
            self.compiled += self.builder.build([schedule], self.problem)
            for program in self.builder.programs([schedule], self.problem, self.runner.device):
                for candidate in self.builder.candidates([program]):
                    checked = self.runner.check(candidate)
                    if isinstance(checked, Checked) and checked.accuracy is not None:
                        return WantedNumbers(program=program, accuracy=checked.accuracy, grids=self.grids_of)
        return None

    def grids_of(self, schedule: Schedule) -> tuple[tuple[int, int, int], ...]:
        """The grids of the launches of a schedule for the problem on this device."""
        return self.kernel.grids(self.problem, schedule, self.runner.device)

    def price_of_same_numbers(self, winner: Measurement, finalists: Sequence[Program]) -> NumbersKept | None:
        """What it costs that only the same numbers could win: the winner races what was refused for its numbers."""
        if self.wanted is None:
            return None
        own = next(each for each in finalists if winner.schedule in each.schedules)
        refused = self.builder.programs(list(self._refused), self.problem, self.runner.device)
        refused = [each for each in refused if each.key not in (own.key, self.wanted.program.key)]
        found = NumbersKept(
            incumbent=self.wanted.program.schedule,
            repeatable=self.wanted.accuracy.repeatable,
            refused=len(refused),
            gain=None,
        )
        if not refused or time.monotonic() > self.deadline_s:
            return found
        self.watcher.stage(self.problem, "what other numbers would win", len(refused))
        result = self.race([own, *refused], preference=[winner.schedule], requires=None, deadline_s=self.deadline_s)
        self.watcher.step(len(refused))
        ours = next((each for each in result.outcomes if each.schedule == own.schedule), None)
        if not isinstance(ours, Measurement) or result.winner is None or len(result.outcomes) < 2:
            return found
        if result.winner.schedule == own.schedule:
            return replace(found, gain=0.0)
        return replace(found, fastest=result.winner.schedule, gain=1 - time_ratio(result.winner, ours))

    def settled(self, result: RaceResult, finalists: Sequence[Program]) -> RaceResult:
        """The verdict of the burst race, those near its winner timed in the sustained regime, too."""
        close = {each.schedule for each in near(result)}
        both = self.tuner.regime == "burst" and self.tuner.effort.both_regimes and self.runner.regimes >= set(LAUNCHED)
        if not both or len(close) < 2 or time.monotonic() > self.deadline_s:
            return result
        self.watcher.stage(self.problem, "at the power cap", len(close))
        sustained = self.race(
            [each for each in finalists if each.schedule in close],
            regime="sustained",
            rules=LOOKS["sustained"],
            deadline_s=self.deadline_s,
        )
        self.watcher.step(len(close))
        return result if sustained.disturbance else settle(result, sustained)

    def rival_times(self, winner: Measurement, finalists: Sequence[Program]) -> tuple[RivalTime, ...] | None:
        """What rivals take next to the winner. Where they are not timed, what was stored with an entry of the same machine
        code. Where the numbers must stay, what is known of them next to what was served: whether one serves stays, too.
        """
        if self.tuner.rivals is not None:
            self.watcher.stage(self.problem, "rivals", 1)
            own = [each for each in finalists if each.schedule == winner.schedule]
            found = self.tuner.rivals(self.problem, self.builder.candidates(own)[0])
            self.watcher.step(1)
            if found is not None:
                return tuple(found)
        device, known, codes = self.runner.device.name, self.entries(self.runner.device.name), [winner.fingerprint]
        if self.wanted is not None:
            place = self.kernel.name, self.space.arch, self.problem, device, self.tuner.regime, self.tuner.accum_mode
            known += [each for each in self.tuner.shipped.winners if each.place == place]
            codes.insert(0, self.wanted.program.fingerprint)
        return next((each.rivals for code in codes for each in known if each.fingerprint == code and each.rivals), None)


def commonest_message(failures: Iterable[Failure]) -> str:
    """The commonest message of some failures; empty where there is none."""
    return next((message for message, _ in Counter(each.message for each in failures).most_common(1)), "")
