"""Computes how few schedules serve several problems well. These are pure functions: no database is read."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tiledsched.core.schedule import Schedule
from tiledsched.report.records import MEASURED, ProblemReport

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
        sentence=_sentence(wanted, len(shared), worst, sets, limits) if len(wanted) > 1 else "",
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


def _sentence(
    problems: Sequence[ProblemReport], shared: int, worst: float, sets: Sequence[Enough], limits: Sequence[float]
) -> str:
    one = shared == 1
    if problems[0].provenance == MEASURED:
        has, nothing = "was timed" if one else "were timed", "was timed"
    else:
        has, nothing = "has an estimate" if one else "have an estimate", "has an estimate"
    known, over = (
        f"{shared:,} schedule{'' if one else 's'} that {has} on every problem",
        f"all {len(problems)} problems",
    )
    lines = []
    if sets:
        (limit, first), *rest = [(f"within {each.limit * 100:.0f}%", len(each.schedules)) for each in sets]
        serve = f"{first} schedule{'s serve' if first > 1 else ' serves'} {over} {limit} of each problem's best"
        lines.append(
            f"{', '.join([serve, *(f'{number} {limit}' for limit, number in rest)])}; only the {known} may be chosen."
        )
    if missing := [f"{limit * 100:.0f}%" for limit in limits if limit not in [each.limit for each in sets]]:
        *most, last = missing
        within = f"{', '.join(most)} or {last}" if most else last
        why = (
            f"with the best of the {known}, the worst problem takes {worst * 100:.0f}% longer than its own best"
            if shared
            else f"no schedule {nothing} on all of them"
        )
        lines.append(f"How few schedules would serve {'them' if sets else over} within {within} is not known: {why}.")
        if problems[0].provenance == MEASURED:
            command = ["tiledsched", "tune", problems[0].problem.kernel, "--candidates", "winners.csv", "-p", "PROBLEM"]
            lines.append(
                f"`{shlex.join(command)}`, run for each problem with the file beside this page, times every problem's best "
                "schedule on it."
            )
    return " ".join(lines)
