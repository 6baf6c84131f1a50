"""Computes how few schedules serve several problems well. These are pure functions: no database is read."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from tiledsched.core.schedule import Schedule
from tiledsched.report.records import MEASURED, ProblemReport

LEAST_PROGRAMS = 20
"""A problem with fewer programs shows too little of what other schedules would cost."""
LIMITS = (0.01, 0.02, 0.05)


def broad(problems: Sequence[ProblemReport]) -> list[ProblemReport]:
    """The problems with enough programs to show what other schedules cost, or with all programs that there are."""
    return [one for one in problems if one.programs >= LEAST_PROGRAMS or one.whole]


def few_schedules(
    problems: Sequence[ProblemReport], limits: Sequence[float] = LIMITS
) -> tuple[dict[float, tuple[Schedule, ...]], str]:
    """Few schedules that keep every problem within each limit of its best, and the same in words, which are empty where there are
    fewer than two problems.

    The schedules are chosen greedily: next comes the schedule that serves most of the remaining problems, then the cheaper one.
    A schedule serves only problems on which it was timed, so that each set is enough, and a smaller one may exist. Where
    problems have several accuracy classes, those of the most frequent one are considered.
    """
    modes = Counter(one.accum_mode for one in problems)
    wanted = [one for one in problems if one.accum_mode == max(modes, key=lambda mode: modes[mode])]
    losses = [{timed.schedule: timed.relative - 1 for timed in one.timed} for one in wanted]
    sets = {limit: _chosen(losses, limit) for limit in limits}
    return sets, _sentence(wanted, losses, sets) if len(wanted) > 1 else ""


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
        left = [each for each in left if each.get(best, limit + 1) > limit]
    return tuple(chosen)


def _sentence(
    problems: Sequence[ProblemReport],
    losses: Sequence[Mapping[Schedule, float]],
    sets: Mapping[float, Sequence[Schedule]],
) -> str:
    """The sets in words, with how often their schedules were timed, and how to time them more often."""
    *others, (limit, widest) = sets.items()
    number = len(widest)
    enough = f"{number} schedule{' is' if number == 1 else 's are'} enough"
    serve = f"{enough} to keep all {len(problems)} problems within {limit * 100:.0f}% of their best"
    more = [f"{len(chosen)} within {limit * 100:.0f}%" for limit, chosen in reversed(others)]
    known = statistics.fmean(sum(each in loss for loss in losses) for each in widest)
    kind = "timed" if problems[0].provenance == MEASURED else "estimated"
    said = (
        f"{', '.join([serve, *more])}. A schedule counts only for problems on which it was {kind}; each of the {number} was on "
        f"{known:.0f} of the {len(problems)} on average."
    )
    if known == len(problems) or kind == "estimated":
        return said
    command = ["tiledsched", "tune", problems[0].problem.kernel, "--candidates", "winners.csv", "-p", "PROBLEM"]
    return (
        f"{said} Fewer may be enough: `{shlex.join(command)}`, run for each problem with the file beside this page, times every "
        "problem's best schedule on it, where it is valid."
    )
