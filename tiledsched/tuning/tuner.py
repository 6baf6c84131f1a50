"""Tune problems one by one: build, measure or model, and store what should be served.

With a runner, schedules are proposed and built, and the most promising of them measured, in batches, until no more gain is
expected or the programs or the budget are used up; then the leaders race each other afresh, interleaved, because times of
different batches are never compared for the verdict.
Without one, the schedules that the model likes best are built, as many as the effort says, and it ranks the distinct
programs. Everything is stored as it happens, so that an interrupted run loses nothing and the next one goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from tiledsched.core.config import INVARIANT
from tiledsched.core.device import arch_spec, spilled
from tiledsched.core.errors import ConfigError, MeasureError, NoValidScheduleError
from tiledsched.core.groups import grouped
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import DRAWN
from tiledsched.measure.runner import GRAPHS, RowRunner, Runner
from tiledsched.store.records import BuildRecord
from tiledsched.tuning.builder import Program, deadlines
from tiledsched.tuning.invariant import InvariantTune
from tiledsched.tuning.prior import estimator, judged
from tiledsched.tuning.results import TuneResult
from tiledsched.tuning.search import OUT_OF_TIME, ProblemSearch, ProblemTune, TuneContext, commonest_message
from tiledsched.tuning.study import learn

LEARNT_AT_ONCE = 8
"""Schedules built, where there is no GPU, before the first look at which changes of knobs leave the machine code as it is."""
LEAST_S, LEAST_SEARCH_S = 2.0, 15.0
"""Where problems share a budget by what they are worth: none is begun with less than so many seconds left, and a search gets so
many where they are left: in less time hardly anything is built."""
MOST_IN_A_ROW = 3
"""So many problems that fail one after the other end such a tune: the problems are not the cause."""


class Tuner(TuneContext):
    """Tunes problems of one kernel for one arch; see :class:`TuneContext` for the arguments."""

    def tune(self, problems: Sequence[Problem], worths: Sequence[float] | None = None) -> list[TuneResult]:
        """Tune every problem in turn.

        Args:
            problems: what is tuned.
            worths: what tuning each of them is worth. What is left of the budget is shared by worth then. Without it, all
                problems get the same part. A problem that the budget does not reach, or of which nothing is decided, has no
                result and is in `left`.

        Raises:
            NoValidScheduleError: for some problem no schedule is valid, or none of them works; the problems before it
                are stored.
            MeasureError: the GPU cannot be used, or was never alone long enough; the problems before are stored.
            ConfigError: neighbours, the same numbers, graphs or a full memory are wanted, and nothing is measured that would tell
                them; or the runner does not tell whether outputs are the same.
        """
        replays = self.runner is not None and self.runner.name == "replay"
        for wanted, why, flag in (
            (
                self.options.neighbours,
                "neighbours of the fastest schedule are known only where it is measured",
                "neighbours",
            ),
            (not self.effort.finalists, "an effort of `served` measures what is served", "effort served"),
            (
                self.options.numerics != "any",
                "only a GPU tells whether results are the same bit for bit",
                f"numerics {self.options.numerics}",
            ),
            (self.regime in GRAPHS, "what a graph takes is known only where it is replayed", "deploy graph"),
            (self.options.beside_gib is not None, "only a GPU has memory to take", "beside"),
        ):
            if wanted and (self.runner is None or (replays and flag in ("deploy graph", "beside"))):
                raise ConfigError(f"{why}, and no GPU of {self.space.arch} is used here; leave out --{flag}")
        if self.options.numerics == INVARIANT:
            return self._tune_in_one_order(problems)
        ends = math.inf if self.options.budget_s is None else time.monotonic() + self.options.budget_s
        if self.runner is not None and not self.most_programs:
            self._build_served(problems, self.runner, ends)
        if worths is not None:
            return self._tune_by_worth(problems, worths, ends)
        results: list[TuneResult] = []
        for problem, deadline_s in zip(problems, deadlines(self.options.budget_s, len(problems)), strict=True):
            if results and time.monotonic() > ends:
                self.left[problem] = OUT_OF_TIME
            else:
                results.append(self._run(problem, deadline_s))
        return results

    def _tune_in_one_order(self, problems: Sequence[Problem]) -> list[TuneResult]:
        """Tune the problems that differ in their batch dims alone together."""
        if not isinstance(self.runner, RowRunner):
            raise ConfigError("recorded measurements hold no digests of rows; leave out --numerics invariant")
        if self.regime in GRAPHS:
            raise ConfigError(
                "a batch-invariant choice serves eager and captured calls alike; leave out --deploy graph"
            )
        if not self.effort.finalists:
            raise ConfigError("an effort of `served` proves no order; leave out --numerics invariant")
        families = grouped((each.declaration.representative(each), each) for each in problems)
        ends = deadlines(self.options.budget_s, len(families))
        return [
            result
            for family, deadline_s in zip(families.values(), ends, strict=True)
            for result in InvariantTune(self, self.runner, family, deadline_s).run()
        ]

    def _tune_by_worth(self, problems: Sequence[Problem], worths: Sequence[float], ends: float) -> list[TuneResult]:
        results: list[TuneResult] = []
        in_a_row = 0
        for place, problem in enumerate(problems):
            now = time.monotonic()
            if (results or self.left) and ends - now < LEAST_S:
                self.left[problem] = OUT_OF_TIME
                continue
            all_left = sum(worths[place:])
            part_s = (ends - now) * (worths[place] / all_left) if worths[place] else 0.0
            deadline_s = min(ends, now + max(LEAST_SEARCH_S, part_s)) if ends < math.inf else ends
            try:
                results.append(self._run(problem, deadline_s))
                in_a_row = 0
            except (NoValidScheduleError, MeasureError) as error:
                self.left[problem], in_a_row = str(error), in_a_row + 1
                if in_a_row >= MOST_IN_A_ROW:
                    self.left |= dict.fromkeys(problems[place + 1 :], str(error))
                    break
        return results

    def _run(self, problem: Problem, deadline_s: float) -> TuneResult:
        if self.runner is None:
            return Ranking(self, problem, deadline_s).run()
        return ProblemSearch(self, self.runner, problem, deadline_s).run()

    def _build_served(self, problems: Sequence[Problem], runner: Runner, deadline_s: float) -> None:
        """Build what is to race on all problems at once, so that every compile process has something to do."""
        searches = [ProblemSearch(self, runner, problem, deadline_s) for problem in problems]
        pairs = [
            (schedule, each.problem)
            for each in searches
            for schedule in each.raced(each.find_incumbents(runner.device_name))
        ]
        self.watcher.stage(problems[0], "building what is served", len(pairs))
        self.builder.build_for_each(pairs, progress=lambda done, _: self.watcher.step(done), deadline_s=deadline_s)


class Ranking(ProblemTune):
    """Tunes a problem without a GPU: the model ranks the programs of the schedules it likes best."""

    def run(self) -> TuneResult:
        """Build, rank, and store the best. The default and what is served now are among what is ranked, however little time
        there is: a winner that was not compared with them would be no reason to serve something else.
        """
        problem, builder = self.problem, self.builder
        self.incumbents = self.find_incumbents("")
        first = list(dict.fromkeys([*self.incumbents, self.default]))
        # The model cannot tell what such knobs do: they stay as they are until something is measured.
        pinned = self.tuner.pinned | self.space.modelled_pins()
        listed_s = self.listed_s()
        # What is served comes first, so that a program is known by it where others build to the same.
        listed, whole = self.space.listed(problem, pinned=pinned, deadline_s=listed_s)
        estimate = estimator(problem, self.spec)
        known = judged(listed, estimate, listed_s)
        schedules = list(dict.fromkeys([*first, *known]))
        by_estimate = sorted(schedules, key=lambda each: (estimate(each, None), each.id))
        self.build(list(dict.fromkeys([*first, *by_estimate])), first)
        reached = {each: record for each in schedules if (record := builder.record(each, problem))}
        programs = builder.programs(list(reached), problem, self.spec)
        if not programs:
            raise self.nothing_works(list(reached))
        ranked = self.ranked(programs)
        best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
        least_us = self.estimate(best)
        plain = next((program for program in programs if self.default in program.schedules), None)
        entry = self.entry(
            best.schedule,
            best.fingerprint,
            len(programs),
            provenance="modelled",
            model_us=least_us,
            runner_up=second.schedule if second else None,
        )
        return TuneResult(
            entry=entry,
            stored=self.db.put_entry(entry),
            schedules=len(reached),
            programs=len(programs),
            compiled=self.compiled,
            measured=0,
            failed=sum(record.failure is not None for record in reached.values()),
            seconds=time.monotonic() - self.started,
            left=len(schedules) - len(reached),
            more=not whole or len(known) < len(listed),
            over_default=self.estimate(plain) / least_us - 1 if plain else None,
            over_runner_up=self.estimate(second) / least_us - 1 if second else None,
            candidates=self.candidates(reached, {each for one in programs for each in one.schedules}, pinned),
            why_failed=commonest_message(self.build_failures(reached)),
        )

    def build(self, order: Sequence[Schedule], first: Sequence[Schedule]) -> None:
        """Build the first of `order`, as many as the effort says; what is likely to be a program built already is put off.
        Neither the effort nor the deadline leaves out the schedules that `order` begins with, `first`.
        """
        left, done, least = dict.fromkeys(order), 0, (True, math.inf)
        most = (
            len(order) if self.tuner.most_builds is None else min(max(self.tuner.most_builds, len(first)), len(order))
        )

        def built(count: int, record: BuildRecord) -> None:
            nonlocal least
            self.watcher.step(done + count)
            if record.facts is not None:
                us = self.kernel.cost.model(self.problem, record.schedule, record.facts, self.spec)
                if (its := (spilled(record.facts.spill_bytes) > 0, us)) < least:
                    least = its
                    self.watcher.best(us, record.schedule)

        alone = self.deadline_s - time.monotonic() < LEAST_S  # no time for more than must be built
        while done < most:
            if self.compiled and time.monotonic() > self.deadline_s and (least[1] < math.inf or done > len(first)):
                break
            chosen: Sequence[Schedule] = list(left)
            if alone and not done:
                chosen = first
            elif most < len(order):
                batch = min(max(LEARNT_AT_ONCE, self.builder.pool.jobs, len(first)), most - done)
                begin = [] if done else list(first)
                others = [each for each in left if each not in begin]
                chosen = [*begin, *self.tuner.inert.put_off(self.problem, others[:DRAWN], batch - len(begin))]
            if not self.compiled and self.builder.missing(chosen, self.problem):
                self.watcher.stage(self.problem, "compiling", most)
            self.compiled += self.builder.build(
                chosen, self.problem, progress=built, deadline_s=self.deadline_s, needed=first
            )
            learn(self.tuner.inert, self.problem, self.builder.programs(chosen, self.problem, self.spec))
            for schedule in chosen:
                del left[schedule]
            done += len(chosen)

    def ranked(self, programs: Sequence[Program]) -> list[Program]:
        """Programs by the model's estimate; of equal estimates, what is served first, then fewest knobs off their default,
        then by id. What spills registers is left out where anything does not.
        """

        def order(program: Program) -> tuple[float, bool, int, str]:
            schedule = program.schedule
            changed = sum(schedule[name] != self.default[name] for name in self.default)
            return self.estimate(program), schedule not in self.incumbents, changed, schedule.id

        sound = [program for program in programs if not spilled(program.facts.spill_bytes)]
        return sorted(sound or programs, key=order)

    def estimate(self, program: Program) -> float:
        """The model's least estimate for any schedule of a program, in microseconds."""
        model = self.kernel.cost.model
        return min(model(self.problem, schedule, program.facts, self.spec) for schedule in program.schedules)


def modelled_times(arch: str, kernel: KernelClass) -> Callable[[Problem, Sequence[BuildRecord]], dict[str, float]]:
    """The model's view of builds that can serve a problem, for reports: maps both to schedule id -> modelled us."""
    spec = arch_spec(arch)

    def times(problem: Problem, builds: Sequence[BuildRecord]) -> dict[str, float]:
        return {
            build.schedule.id: kernel.cost.model(problem, build.schedule, build.facts, spec)
            for build in builds
            if build.facts
        }

    return times
