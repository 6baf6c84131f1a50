"""What one schedule costs where another was tuned, and how few schedules are enough: pure functions, no database."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.report.records import ProblemReport

LEAST_PROGRAMS = 20
"""Of a problem whose landscape is broad enough to ask what another schedule would cost."""
LIMITS = (0.01, 0.02, 0.05)


@dataclass(frozen=True, kw_only=True)
class Regret:
    """What serving one problem's winner on another costs."""

    tuned: Problem
    """Whose winner is served."""
    served: Problem
    """Where."""
    loss: float | None
    """Its time there / the best time there - 1; None where it was not timed there."""


@dataclass(frozen=True, kw_only=True)
class Enough:
    """How few schedules keep the loss within a limit."""

    limit: float
    """Largest loss of any problem."""
    schedules: tuple[Schedule, ...]
    """Chosen one after the other, each the one that brings most problems within the limit."""
    covered: int
    """Problems they keep within it."""
    problems: int
    """Problems asked about."""


def broad(problems: Sequence[ProblemReport]) -> list[ProblemReport]:
    """Those whose landscape says what other schedules would cost."""
    return [one for one in problems if one.programs >= LEAST_PROGRAMS]


def losses(one: ProblemReport) -> dict[Schedule, float]:
    """Each schedule timed, with what it costs."""
    return {timed.schedule: timed.relative - 1 for timed in one.timed}


def regret_map(problems: Sequence[ProblemReport]) -> list[Regret]:
    """Every pair of problems."""
    known: Mapping[Problem, Mapping[Schedule, float]] = {one.problem: losses(one) for one in problems}
    winners = {one.problem: _winner(one) for one in problems}
    return [
        Regret(
            tuned=tuned,
            served=served,
            loss=min((known[served][each] for each in winners[tuned] if each in known[served]), default=None),
        )
        for tuned in known
        for served in known
    ]


def _winner(one: ProblemReport) -> list[Schedule]:
    """The best schedule, under all the names that its program goes by."""
    best = one.best.schedule
    return [best, *(timed.schedule for timed in one.timed if timed.same_program_as == best)]


def enough(problems: Sequence[ProblemReport], limits: Sequence[float] = LIMITS) -> list[Enough]:
    """For each limit a small set of schedules, found greedily: each next one covers most of what is left, then costs least.

    Only what was timed counts: a schedule that was not timed on a problem does not cover it.
    """
    known = {one.problem: losses(one) for one in problems}
    found = []
    for limit in limits:
        left, chosen = set(known), list[Schedule]()
        while left:
            covers: dict[Schedule, list[float]] = {}
            for problem in left:
                for schedule, loss in known[problem].items():
                    if loss <= limit:
                        covers.setdefault(schedule, []).append(loss)
            best = min(covers, key=lambda each: (-len(covers[each]), statistics.fmean(covers[each]), each.id))
            chosen.append(best)
            left -= {problem for problem in left if known[problem].get(best, limit + 1) <= limit}
        found.append(Enough(limit=limit, schedules=tuple(chosen), covered=len(known), problems=len(known)))
    return found
