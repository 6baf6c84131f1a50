"""Computes how few schedules serve several problems well. These are pure functions: no database is read."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tiledsched.core.schedule import Schedule
from tiledsched.report.records import ProblemReport

LEAST_PROGRAMS = 20
"""A problem with fewer programs shows too little of what other schedules would cost."""
LIMITS = (0.01, 0.02, 0.05)


@dataclass(frozen=True, kw_only=True)
class Enough:
    """A few schedules that serve every problem within a limit."""

    limit: float
    """How much longer than the problem's best any problem may take."""
    schedules: tuple[Schedule, ...]
    """The schedules, in the order chosen: each brings the most problems within the limit that were not yet."""


@dataclass(frozen=True, kw_only=True)
class FewSchedules:
    """How few schedules serve several problems, as far as it is known."""

    problems: int
    """How many problems there are."""
    shared: int
    """How many schedules have a time on every one of them; only these are considered."""
    worst: float
    """The least that the worst problem loses if each is served the best of these schedules; infinite where there are none."""
    sets: tuple[Enough, ...]
    """The sets found, for each limit that these schedules can keep."""
    sentence: str
    """The same in words; empty where there are fewer than two problems."""


def broad(problems: Sequence[ProblemReport]) -> list[ProblemReport]:
    """The problems with enough programs to show what other schedules cost."""
    return [one for one in problems if one.programs >= LEAST_PROGRAMS]


def few_schedules(problems: Sequence[ProblemReport], limits: Sequence[float] = LIMITS) -> FewSchedules:
    """How few schedules keep every problem within each limit of its best, chosen greedily from the schedules that have a time
    on all of them: next comes the schedule that serves most of the remaining problems, then the cheaper one.

    Where problems have several accuracy classes, those of the most frequent one are considered.
    """
    modes = Counter(one.accum_mode for one in problems)
    wanted = [one for one in problems if one.accum_mode == max(modes, key=lambda mode: modes[mode])]
    losses = [{timed.schedule: timed.relative - 1 for timed in one.timed} for one in wanted]
    shared = set.intersection(*(set(each) for each in losses)) if losses else set()
    worst = max((min((each[schedule] for schedule in shared), default=float("inf")) for each in losses), default=0.0)
    sets = tuple(
        Enough(limit=limit, schedules=_chosen([{each: loss[each] for each in shared} for loss in losses], limit))
        for limit in limits
        if shared and worst <= limit
    )
    return FewSchedules(
        problems=len(wanted),
        shared=len(shared),
        worst=worst,
        sets=sets,
        sentence=_sentence(wanted, len(shared), worst, sets) if len(wanted) > 1 else "",
    )


def _chosen(losses: Sequence[dict[Schedule, float]], limit: float) -> tuple[Schedule, ...]:
    left, chosen = list(losses), list[Schedule]()
    while left:
        covers: dict[Schedule, list[float]] = {}
        for each in left:
            for schedule, loss in each.items():
                if loss <= limit:
                    covers.setdefault(schedule, []).append(loss)
        best = min(covers, key=lambda each: (-len(covers[each]), statistics.fmean(covers[each]), each.id))
        chosen.append(best)
        left = [each for each in left if each[best] > limit]
    return tuple(chosen)


def _sentence(problems: Sequence[ProblemReport], shared: int, worst: float, sets: Sequence[Enough]) -> str:
    over, kernel = f"{len(problems)} problems", problems[0].problem.kernel
    if sets:
        found = "; ".join(f"{len(each.schedules)} within {each.limit * 100:.0f}%" for each in sets)
        verb = "was timed" if problems[0].provenance == "measured" else "has an estimate"
        return (
            f"So many schedules, or fewer, serve all {over} within a limit of each problem's best: {found}. Only a schedule that "
            f"{verb} on every one of them is considered ({shared:,})."
        )
    known = (
        f"{shared:,} schedules have a time on all of them, and with the best of these the worst problem takes "
        f"{worst * 100:.0f}% longer than with its own best"
        if shared
        else "no schedule has a time on all of them"
    )
    return (
        f"How few schedules would serve all {over} is not known: {known}. `tiledsched tune {kernel} --candidates winners.csv -p "
        "PROBLEM`, run for each problem with the file that lies beside this page, times every problem's winner on it."
    )
