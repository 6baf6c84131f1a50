"""What tuning the problems that programs were seen to call would win, and tuning them, the most worthwhile first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiledsched.core.device import ARCHS, arch_spec
from tiledsched.core.errors import CompilerError, ConfigError, TiledschedError
from tiledsched.core.groups import grouped
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.rivals.offers import pays
from tiledsched.rivals.races import can_race
from tiledsched.serve.chain import Served
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import log_us
from tiledsched.store.captured_calls import SeenProblem
from tiledsched.store.records import Entry
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.results import TuneReport, Watcher
from tiledsched.tuning.search import NO_SEARCH, OUT_OF_TIME
from tiledsched.tuning.session import Session

ASSUMED_LOSSES = {"measured": 0.05, "transferred": 0.1, "modelled": 0.25, "default": 0.25, "forced": 0.1}
"""By provenance, how much slower than the best schedule what is served is taken to be where that is unknown. What a search found,
of the machine code here, loses nothing."""
RIVAL_LOSS = 0.05
"""How much slower than our best schedule a rival is taken to be that serves a problem on which nothing was timed."""


@dataclass(frozen=True, kw_only=True)
class SeenWorth:
    """What tuning one problem would win."""

    seen: SeenProblem
    """The problem, and how often it was called."""
    served: Served | None = None
    """What is served for it today; None where its kernel is not known here, or the arch has no search space."""
    us: float | None = None
    """Time of a call of our own kernel, in microseconds; None where nothing tells it."""
    is_measured: bool = False
    """Whether that time was measured, for this very problem; otherwise it is modelled."""
    loss: float = 0.0
    """How much slower than the best schedule ours is, as a part of the best one's time."""
    is_known: bool = False
    """Whether that is known, from a search or from problems like this one; otherwise it is assumed."""
    is_tuned: bool = False
    """Whether nothing is left to win: a search found the schedule, and rivals were timed."""
    rival: str = ""
    """The rival that eager calls run where it is installed; empty where there is none."""
    rival_ratio: float = 1.0
    """Its time over ours."""

    @property
    def calls(self) -> int:
        """Calls, at least one for each process: a killed one left no count."""
        return max(self.seen.calls, self.seen.processes)

    @property
    def call_us(self) -> float | None:
        """Time of a call as it is served, by the rival where there is one."""
        return None if self.us is None else self.us * self.rival_ratio

    @property
    def served_loss(self) -> float:
        """How much slower than our best schedule a call is as it is served."""
        return max(0.0, self.rival_ratio * (1 + self.loss) - 1)

    @property
    def win_us(self) -> float:
        """What tuning would win in all calls together, in microseconds."""
        return self.calls * (self.call_us or 0.0) * self.served_loss / (1 + self.served_loss)

    def raced(self, entry: Entry) -> SeenWorth:
        """This problem's worth, with the times of a race of what is served and the rivals."""
        paying = [each for each in entry.rivals or () if pays(each, entry.problem.declaration)]
        fastest = min(paying, key=lambda each: each.ratio or 1.0, default=None)
        return replace(
            self,
            us=entry.median_us or self.us,
            is_measured=entry.median_us is not None or self.is_measured,
            rival=fastest.name if fastest else "",
            rival_ratio=fastest.ratio or 1.0 if fastest else 1.0,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        served = self.served
        return {
            **self.seen.to_json(),
            "now": None
            if served is None
            else {"provenance": served.provenance, "schedule": served.schedule, "stale": served.stale or None},
            "us": self.call_us,
            "us_is": None if self.us is None else "measured" if self.is_measured else "modelled",
            "now_rival": self.rival or None,
            "loss": None if served is None else self.served_loss,
            "loss_is": None if served is None else "known" if self.is_known else "assumed",
            "win_us": self.win_us if served else None,
        }


def rank(seen: Iterable[SeenProblem], table_of: Callable[[KernelClass], LookupTable]) -> list[SeenWorth]:
    """Problems by what tuning them would win, the most first; where that is equal, those that take the most time.

    Args:
        seen: the problems.
        table_of: gives the lookup table of a kernel.
    """
    rows = list(seen)
    tables = {kernel: table_of(kernel) for kernel in {each.problem.declaration for each in rows if each.problem.known}}
    found = (
        worth_of(each, tables[each.problem.declaration]) if each.problem.known else SeenWorth(seen=each)
        for each in rows
    )
    return sorted(found, key=_order)


def _order(each: SeenWorth) -> tuple[Any, ...]:
    return -each.win_us, -each.calls * (each.call_us or 0.0), -each.calls, each.seen.problem.id


def worth_of(seen: SeenProblem, table: LookupTable) -> SeenWorth:
    """What tuning one problem of a known kernel would win."""
    problem = seen.problem
    try:
        served = table.resolve(problem, seen.arch, seen.device)
    except TiledschedError:  # the arch has no search space, or a forced knob makes the schedule invalid
        return SeenWorth(seen=seen)
    entry, offer = served.entry, next((each for each in served.rivals if not each.only_captured), None)
    us, searched = None, False
    if entry is not None and (entry.problem, entry.schedule) == (problem, served.schedule) and entry.median_us:
        us = entry.median_us
        searched = (
            served.provenance == "measured"
            and entry.regime == table.regime
            and not served.stale
            and NO_SEARCH not in entry.source
        )
    expected = served.expected_loss if us is None else None
    loss = 0.0 if searched else expected.mean if expected else ASSUMED_LOSSES[served.provenance]
    if offer and us is None:  # what ours would lose does not matter
        expected, loss = None, (1 + RIVAL_LOSS) / offer.ratio - 1
    return SeenWorth(
        seen=seen,
        served=served,
        us=us or _modelled_us(problem, served, seen),
        is_measured=us is not None,
        loss=loss,
        is_known=searched or (expected is not None and expected.arch == seen.arch),
        is_tuned=searched and entry is not None and (entry.rivals is not None or not can_race(problem.declaration)),
        rival=offer.name if offer else "",
        rival_ratio=offer.ratio or 1.0 if offer else 1.0,
    )


def _modelled_us(problem: Problem, served: Served, seen: SeenProblem) -> float | None:
    """The model's estimate; where the same schedule was measured on a similar problem, in proportion to that."""
    if seen.arch not in ARCHS:
        return None
    spec, entry = arch_spec(seen.arch, seen.device), served.entry
    try:
        us = math.exp(log_us(problem, served.schedule, spec))
        if entry is not None and entry.median_us and entry.schedule == served.schedule:
            us *= entry.median_us / math.exp(log_us(entry.problem, entry.schedule, spec))
    except (ArithmeticError, ValueError):
        return None
    return us


@dataclass(frozen=True, kw_only=True)
class SeenTune:
    """What a tune of the problems that were seen found."""

    reports: Sequence[TuneReport]
    """One for each kernel; a problem that was raced first and searched later has the later result."""
    left: Mapping[Problem, str]
    """The problems of which nothing was decided, and why."""
    raced: Sequence[Problem]
    """The problems that were only raced against rivals: the budget ended before they were searched."""


def tune_by_worth(
    session: Session,
    ranked: Sequence[SeenWorth],
    options: TuneOptions,
    *,
    watcher: Watcher | None = None,
    command: Mapping[str, Any] | None = None,
) -> SeenTune:
    """Tune problems within one budget, of any kernels.

    First what is served today races the rivals on every problem, which makes serving no slower than the fastest of them. Then
    problems are searched, the most worthwhile first, until the budget ends. Without a GPU there are no races, and the model
    ranks. What is found is stored at once.

    Args:
        session: of the arch on whose GPUs the problems were seen.
        ranked: problems of kernels that are known here.
        options: how much each search does; `budget_s` is for all problems together.
        watcher: who is told of progress.
        command: what to note as the command of the runs.

    Raises:
        TiledschedError: of a wrong option, a missing compiler, or a GPU that cannot be used; or only a race is wanted, and there
            is no GPU.
    """
    ends = math.inf if options.budget_s is None else time.monotonic() + options.budget_s
    found: dict[Problem, tuple[Any, Entry]] = {}
    left: dict[Problem, str] = {}
    of_kernel: dict[KernelClass, TuneReport] = {}

    def run(group: Sequence[SeenWorth], budget_s: float, **changes: Any) -> list[SeenWorth]:
        """Tune the problems of a kernel; what is known of them now."""
        problems = [each.seen.problem for each in group]
        kernel = problems[0].declaration
        chosen = replace(options, budget_s=None if budget_s == math.inf else budget_s, **changes)
        try:
            report = session.tune(
                kernel,
                problems,
                chosen,
                watcher=watcher,
                command=command,
                worths=[1.0 if changes else each.win_us for each in group],
            )
        except (CompilerError, ConfigError):
            raise
        except TiledschedError as error:  # of one kernel; the others go on
            left.update(dict.fromkeys(problems, str(error)))
            return []
        of_kernel[kernel] = report
        pairs = {pair[0].entry.problem: pair for pair in zip(report.results, report.entries, strict=True)}
        found.update(pairs)
        left.update({problem: why for problem, why in report.left.items() if problem not in found})
        return [each.raced(pairs[each.seen.problem][1]) for each in group if each.seen.problem in pairs]

    wanted = ranked = [each for each in ranked if not each.is_tuned]
    measures = options.runner != "none" and bool(session.device_names())
    if options.effort == "served":
        raise ConfigError(
            "--seen tunes, and --effort served tunes nothing; name what is to be measured with -p or --suite"
        )
    if options.effort == "race" and not measures:
        raise ConfigError(f"a race needs a GPU of {session.arch}, and none measures here; leave out --effort race")
    if measures:
        for group in _groups(ranked):
            if (left_s := ends - time.monotonic()) > 0 or not found:
                run(group, max(0.0, left_s), effort="race", trials=None, candidates=None, neighbours=False)
            else:
                left.update(dict.fromkeys((each.seen.problem for each in group), OUT_OF_TIME))
        wanted = [each.raced(found[each.seen.problem][1]) for each in ranked if each.seen.problem in found]
    searched: set[Problem] = set()
    groups = _groups(sorted(wanted, key=_order))
    for place, group in enumerate(groups if options.effort != "race" else ()):
        left_s = ends - time.monotonic()
        if left_s <= 0 and found:
            left.update({each.seen.problem: OUT_OF_TIME for each in group if each.seen.problem not in found})
            continue
        share = _worth(group) / (sum(map(_worth, groups[place:])) or 1.0)
        searched |= {each.seen.problem for each in run(group, max(0.0, left_s * (share or 1.0)))}
    reports = [
        replace(
            report,
            results=[pair[0] for problem, pair in found.items() if problem.declaration is kernel],
            entries=[pair[1] for problem, pair in found.items() if problem.declaration is kernel],
        )
        for kernel, report in of_kernel.items()
    ]
    raced = [each.seen.problem for each in wanted if each.seen.problem not in searched]
    return SeenTune(reports=reports, left=left, raced=[each for each in raced if each in found])


def _worth(group: Iterable[SeenWorth]) -> float:
    return math.fsum(each.win_us for each in group)


def _groups(ranked: Iterable[SeenWorth]) -> list[list[SeenWorth]]:
    """The problems of each kernel, the kernel with the most to win first."""
    groups = grouped((each.seen.problem.declaration, each) for each in ranked)
    return sorted(groups.values(), key=_worth, reverse=True)
