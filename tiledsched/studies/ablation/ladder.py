"""The ladder from the plain schedule to the tuned one, a group of knobs at a time, and the tuned schedule without each
knob.

Which rung comes next is decided by measuring: of the groups not yet turned, the one that helps most from where the ladder
stands. Knobs interact, so that the order matters, and so that a knob can be worth nothing on the ladder and much when
it is turned back. Therefore both views are given. The rungs and the turned-back schedules are timed once more at the end, all
interleaved in one run: times of different runs are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.core.canonical import canonical_json
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.files import csv_text, write_whole
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Batch, Runner
from tiledsched.rivals.rows import OK, SIZES, StudyRow, rounded, timing_columns
from tiledsched.tuning.builder import Builder, Key, Program
from tiledsched.tuning.recording import NOT_RECORDED

LADDER, WITHOUT, TRIED = "ladder", "without", "tried"
FIRST_COLUMNS = ("dtype", "causal", *SIZES)
"""Values of attention with a column of their own; empty for a problem that has no such field."""


@dataclass(frozen=True, kw_only=True)
class AblationRow(StudyRow):
    """One schedule on the way from the plain schedule to the tuned one, or next to the tuned one. One without a time broke a
    constraint, failed to build or to launch, or was not recorded."""

    view: str
    """`ladder` for a rung; `without` for the tuned schedule with one knob changed back; `tried` for a possible rung, in
    the run that chose among several.
    """
    rung: int
    """Place on the ladder, where 0 is the plain schedule; for `tried`, the rung it might have been."""
    knob: str
    """The knobs changed, joined by +; empty for rung 0."""
    before: str
    """Their values before."""
    after: str
    """Their values after."""
    schedule_id: str
    """Id of the whole schedule."""
    speedup_over_previous: float | None = None
    """Time before the change over time after it. For `without`, the time before is the tuned schedule's."""
    speedup_over_plain: float | None = None
    """Time of rung 0 over its own time; None for `tried`, which ran in another run."""
    runner: str = ""
    """gpu or replay."""

    def to_csv(self) -> dict[str, Any]:
        """One cell for each column, also for `--json`."""
        p = self.problem.values
        return {
            "regime": self.regime,
            **{name: p.get(name, "") for name in FIRST_COLUMNS},
            "view": self.view,
            "rung": self.rung,
            "knob": self.knob,
            "from": self.before,
            "to": self.after,
            **timing_columns(self.timing, 4),
            "speedup_over_previous": rounded(self.speedup_over_previous, 4),
            "speedup_over_plain": rounded(self.speedup_over_plain, 4),
            "status": self.status,
            "schedule": self.schedule,
            "schedule_id": self.schedule_id,
            "alignment": p.get("alignment", ""),
            "value_dim": p.get("value_dim", ""),
            "device": self.device,
            "runner": self.runner,
            "kernel": self.problem.kernel,
            "problem": canonical_json(self.problem.to_json()),
            "taken": self.taken,
        }


TOGETHER = (("tile_m", "tile_n"), ("latency_k", "latency_v"), ("occupancy", "num_ctas"))
"""Knobs that are changed together; every other knob is a group of its own."""
LOOK_ROUNDS = 10
"""Samples of each schedule in the runs that choose the next rung."""
SUSTAINED_ROUNDS = 10
"""In the sustained regime, so many times as many samples: they follow each other at once and spread more."""

Group = tuple[str, ...]
"""Knobs that are changed together."""


Outcome = Timing | str
"""A time, or why there is none."""


def groups_between(plain: Schedule, tuned: Schedule) -> list[Group]:
    """The groups of knobs in which two schedules differ. Both schedules must have the same knobs."""
    differ = [name for name in tuned if tuned[name] != plain[name]]
    found: dict[str, Group] = {}
    for name in differ:
        together = next((group for group in TOGETHER if name in group), (name,))
        members = tuple(knob for knob in together if knob in differ)
        found[members[0]] = members
    return list(found.values())


def refusals(space: SearchSpace, schedule: Schedule, problem: Problem) -> list[str]:
    """The reasons of all constraints that a schedule breaks, except constraints that only keep the search small.

    Unlike `SearchSpace.violations` it takes hints left to the compiler, which no space lists as a choice.
    """
    values = space.constraint_values(problem) | dict(schedule)
    return [c.because for c in space.constraints if not c.exploring and not c.holds(values)]


class Ladder:
    """An ablation of one problem.

    Args:
        runner: what times; `begin` is called here.
        builder: builds programs with the compiler, or finds those that were recorded.
        space: whose constraints hold.
        problem: what is computed.
        regime: burst or sustained.
        rounds: samples of each in the final run.
        recorded: of a replay, whether a schedule is in the record: where there is a way to the tuned schedule with
            every rung in it, the ladder takes no other. None: everything can be timed.
        taken: the day on which it is timed, or was recorded.
        progress: called with a line for each rung.
    """

    def __init__(
        self,
        runner: Runner,
        builder: Builder,
        space: SearchSpace,
        problem: Problem,
        *,
        regime: str = "burst",
        rounds: int = 30,
        recorded: Callable[[Schedule], bool] | None = None,
        taken: str = "",
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._runner, self._builder, self._space = runner, builder, space
        self._problem, self._regime, self._rounds, self._progress = problem, regime, rounds, progress
        self._recorded, self._taken = recorded, taken
        self._checked: dict[Key, str] = {}
        self._rows: list[AblationRow] = []

    def climb(self, plain: Schedule, tuned: Schedule) -> list[AblationRow]:
        """Measure the ladder: returns its rungs, then the tuned schedule without each knob, then what else was tried.

        Args:
            plain: rung 0.
            tuned: the last rung; its knobs are those of `plain`.
        """
        self._runner.begin(self._problem)
        self._rows = []
        # The fastest of a problem's first run decides how all of it is timed, and a build that fails is best known early.
        self._time([plain, tuned], LOOK_ROUNDS, check=True)
        rungs: list[tuple[Group, Schedule]] = [((), plain)]
        left = groups_between(plain, tuned)
        while left:
            group, schedule = self._next_rung(rungs[-1][1], tuned, left, len(rungs))
            left = [other for other in left if not set(other) <= set(group)]
            rungs.append((group, schedule))
            self._progress(f"{self._problem}: rung {len(rungs) - 1}: {'+'.join(group)}: {schedule.short()}")
        turned_back = [((name,), tuned.replace(**{name: plain[name]})) for name in tuned if tuned[name] != plain[name]]
        schedules = [schedule for _, schedule in (*rungs, *turned_back)]
        outcomes = self._time(schedules, self._rounds, check=True)
        found = []
        for rung, (group, schedule) in enumerate(rungs):
            before = rungs[max(rung - 1, 0)][1]
            found.append(self._row(LADDER, rung, group, before, schedule, outcomes, plain))
        last = len(rungs) - 1
        found += [self._row(WITHOUT, last, group, tuned, each, outcomes, plain) for group, each in turned_back]
        return [*found, *self._rows]

    def _next_rung(
        self, current: Schedule, tuned: Schedule, left: Sequence[Group], rung: int
    ) -> tuple[Group, Schedule]:
        """The group that helps most, and its schedule. Where no group can be changed alone, all that are left are
        changed at once.
        """
        if len(left) == 1:
            return left[0], tuned
        options = {group: current.replace(**{name: tuned[name] for name in group}) for group in left}
        outcomes = self._time([current, *options.values()], LOOK_ROUNDS, check=False)
        self._rows += [self._row(TRIED, rung, group, current, each, outcomes) for group, each in options.items()]
        timed = [
            (not self._leads_on(schedule, tuned, frozenset(left) - {group}), outcome.median_us, group)
            for group, schedule in options.items()
            if isinstance(outcome := outcomes[schedule], Timing)
        ]
        for _, _, group in sorted(timed):
            (program,) = self._builder.programs([options[group]], self._problem, self._runner.device)
            if not self._failure(program, check=True):
                return group, options[group]
        return tuple(name for group in left for name in group), tuned

    def _leads_on(self, current: Schedule, tuned: Schedule, left: frozenset[Group]) -> bool:
        """Whether the groups left can be changed one by one with every schedule on the way recorded."""
        if self._recorded is None or len(left) <= 1:
            return True
        steps = ((current.replace(**{name: tuned[name] for name in group}), left - {group}) for group in left)
        return any(self._recorded(step) and self._leads_on(step, tuned, rest) for step, rest in steps)

    def _time(self, schedules: Sequence[Schedule], rounds: int, *, check: bool) -> dict[Schedule, Outcome]:
        """Time all schedules in one interleaved run. Schedules that build the same program share its time."""
        outcomes: dict[Schedule, Outcome] = {}
        wanted = []
        for schedule in dict.fromkeys(schedules):
            if broken := refusals(self._space, schedule, self._problem):
                outcomes[schedule] = f"not valid: {'; '.join(broken)}"
            else:
                wanted.append(schedule)
        self._builder.build(wanted, self._problem)
        outcomes |= {each: self._unbuilt(each) for each in wanted}
        ready = []
        for program in self._builder.programs(wanted, self._problem, self._runner.device):
            failure = self._failure(program, check=check)
            outcomes |= dict.fromkeys(program.schedules, failure)
            ready += [] if failure else [program]
        rounds *= SUSTAINED_ROUNDS if self._regime == "sustained" else 1
        candidates = self._builder.candidates(ready)
        batches = self._runner.sample(candidates, rounds=rounds, regime=self._regime) if ready else []
        for program, batch in zip(ready, batches, strict=True):
            outcomes |= dict.fromkeys(program.schedules, outcome_of(batch))
        return outcomes

    def _unbuilt(self, schedule: Schedule) -> str:
        """Why a schedule is no program; empty where it is one."""
        record = self._builder.record(schedule, self._problem)
        return said(record.failure) if record else "not built"

    def _failure(self, program: Program, *, check: bool) -> str:
        """Why a program has no time where a rung is chosen; why it may not be a rung, for which its results must be right, too.

        Each program is checked once.
        """
        for candidate in self._builder.candidates([program]):
            if not check:
                return said(self._runner.probe(candidate))
            if program.key not in self._checked:
                self._checked[program.key] = said(self._runner.check(candidate))
            return self._checked[program.key]
        return f"{FailureKind.ARTIFACT_CORRUPT}: run again to build it anew"

    def _row(
        self,
        view: str,
        rung: int,
        group: Group,
        before: Schedule,
        after: Schedule,
        outcomes: Mapping[Schedule, Outcome],
        plain: Schedule | None = None,
    ) -> AblationRow:
        """The row of a schedule: its speedup is over `before`, unless it is the same one, and over `plain`."""
        outcome = outcomes[after]
        return AblationRow(
            problem=self._problem,
            regime=self._regime,
            view=view,
            rung=rung,
            knob="+".join(group),
            before="+".join(str(before[name]) for name in group),
            after="+".join(str(after[name]) for name in group),
            schedule=after.short(),
            schedule_id=after.id,
            status=outcome if isinstance(outcome, str) else OK,
            timing=None if isinstance(outcome, str) else outcome,
            speedup_over_previous=_over(outcomes[before], outcome) if rung or view == TRIED else None,
            speedup_over_plain=_over(outcomes[plain], outcome) if plain else None,
            device=self._runner.device.name,
            runner=self._runner.name,
            taken=self._taken,
        )


def said(found: object) -> str:
    """A failure as the status of a row; empty for what is none."""
    if not isinstance(found, Failure):
        return ""
    return NOT_RECORDED if found.message == NOT_RECORDED else f"{found.kind}: {found.message}"


def outcome_of(batch: Batch | Failure) -> Outcome:
    """The time that samples give, or why they give none."""
    if isinstance(batch, Failure):
        return said(batch)
    if batch.conditions.concurrent_pids:
        return f"timed {batch.conditions.disturbance}"
    return Timing.of(batch.samples_us)


def _over(before: Outcome, after: Outcome) -> float | None:
    """Speedup from one time to the other; None where either is missing."""
    if isinstance(before, Timing) and isinstance(after, Timing):
        return before.median_us / after.median_us
    return None


def write_rows(rows: Sequence[AblationRow], path: Path) -> None:
    """Write all rows to a CSV file, in place of what it held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, csv_text([row.to_csv() for row in rows]))
