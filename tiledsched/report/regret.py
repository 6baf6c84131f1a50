"""Computes what a schedule costs on other problems than it was tuned for, and how few schedules are enough.

These are pure functions: no database is read.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.report.records import ProblemReport

LEAST_PROGRAMS = 20
"""A problem with fewer programs shows too little of what other schedules would cost."""
LIMITS = (0.01, 0.02, 0.05)


@dataclass(frozen=True, kw_only=True)
class Regret:
    """What it costs to serve one problem's winner on another problem."""

    tuned: Problem
    """The problem whose winner is served."""
    served: Problem
    """The problem that it is served on."""
    loss: float | None
    """Its time there over the best time there, minus 1; None where it was not timed there."""


@dataclass(frozen=True, kw_only=True)
class Enough:
    """How few schedules keep the loss within a limit."""

    limit: float
    """Largest loss that any problem may have."""
    schedules: tuple[Schedule, ...]
    """The schedules, in the order chosen: each brings the most problems within the limit that were not yet."""
    problems: int
    """How many problems there are."""


def broad(problems: Sequence[ProblemReport]) -> list[ProblemReport]:
    """The problems with enough programs to show what other schedules cost."""
    return [one for one in problems if one.programs >= LEAST_PROGRAMS]


def losses(one: ProblemReport) -> dict[Schedule, float]:
    """What each timed schedule costs: its time over the best time, minus 1."""
    return {timed.schedule: timed.relative - 1 for timed in one.timed}


def regret_map(problems: Sequence[ProblemReport]) -> list[Regret]:
    """The regret of every pair of problems."""
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
    """The best schedule, and all other schedules that build the same program."""
    best = one.best.schedule
    return [best, *(timed.schedule for timed in one.timed if timed.same_program_as == best)]


def enough(problems: Sequence[ProblemReport], limits: Sequence[float] = LIMITS) -> list[Enough]:
    """A small set of schedules for each limit, chosen greedily: next comes the schedule that covers most of the rest,
    then the cheaper one.

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
        found.append(Enough(limit=limit, schedules=tuple(chosen), problems=len(known)))
    return found
