"""Computes what tiles, knobs and few schedules are worth from the times of schedules. These are pure functions: no database is
read.
"""

from __future__ import annotations

import itertools
import math
import operator
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from tiledsched.core.groups import grouped
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.report.records import MEASURED, ProblemReport, TileTime

T = TypeVar("T")
WITHIN = 1.3
"""A matched pair counts only if its faster program takes at most this many times the best time; others never win."""
ENOUGH_PROGRAMS = 12
"""A tile with this many programs is searched enough, or with half as many as the tile with the most. On an H200 the best of
12 programs, drawn at random from all of a tile, takes 5% longer than the tile's best (median of 67 tiles of attention), of 6
programs 14%.
"""
FEWEST_PROGRAMS = 4
"""A tile with fewer programs is never searched enough, unless the values tried of other knobs allow no more."""


def tile_times(one: ProblemReport, knobs: tuple[str, ...]) -> tuple[TileTime, ...]:
    """The best time of each tile, that of the leader first, and then the fastest. Where all of the search space has a time, every
    tile is searched enough.
    """
    tiled = [each for each in one.timed if knobs and {*knobs} <= {*each.schedule}]
    members = grouped(((each.schedule.number(knobs[0]), each.schedule.number(knobs[1])), each) for each in tiled)
    programs = {tile: len({each.program for each in of}) for tile, of in members.items()}
    values = grouped(item for each in one.timed for item in each.schedule.items())
    possible = math.prod(len({*each}) for knob, each in values.items() if knob not in knobs)
    enough = min(ENOUGH_PROGRAMS, max(max(programs.values(), default=0) / 2, min(FEWEST_PROGRAMS, possible)))
    leader = one.leader
    ordered = sorted(members.items(), key=lambda item: (all(each is not leader for each in item[1]), item[1][0].us))
    return tuple(
        TileTime(
            tile=tile,
            us=of[0].us,
            relative=of[0].relative,
            schedule=of[0].schedule,
            programs=programs[tile],
            searched=one.whole or place == 0 or programs[tile] >= enough,
            ties=place > 0 and any(each.schedule in one.level for each in of),
        )
        for place, (tile, of) in enumerate(ordered)
    )


def neighbours(items: Sequence[tuple[Schedule, T]], close: Sequence[bool]) -> Iterator[tuple[str, T, T]]:
    """Every pair of items whose schedules differ in one knob alone, with that knob, by knob.

    Args:
        items: schedules, each with what belongs to it.
        close: for each item whether it is close to the best; pairs of which neither member is are left out.
    """
    # Each value of each knob has a number. Schedules that differ in one knob alone have the same sum over the hashes of all
    # other numbers. Equal sums are only a hint; what is found is compared number by number.
    numbers: dict[tuple[str, type, KnobValue], int] = {}
    coded = [
        [numbers.setdefault((name, type(value), value), len(numbers)) for name, value in schedule.items()]
        for schedule, _ in items
    ]
    hashes = [*map(hash, numbers)]
    sums = [sum(map(hashes.__getitem__, each)) for each in coded]
    places = {names: {name: i for i, name in enumerate(names)} for names in {tuple(schedule) for schedule, _ in items}}
    place_of = [places[tuple(schedule)] for schedule, _ in items]
    for knob in dict.fromkeys(name for schedule, _ in items for name in schedule):
        rests = [
            whole - hashes[each[place[knob]]] if knob in place else None
            for whole, each, place in zip(sums, coded, place_of, strict=True)
        ]
        wanted = {rest for rest, near in zip(rests, close, strict=True) if near and rest is not None}
        alike = grouped((rest, i) for i, rest in enumerate(rests) if rest in wanted)
        for members in alike.values():
            for first, second in itertools.combinations(members, 2):
                if (close[first] or close[second]) and _differ_in(
                    place_of[first].get(knob), coded[first], coded[second]
                ):
                    yield knob, items[first][1], items[second][1]


def _differ_in(place: int | None, first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two lists of numbers differ at one place alone."""
    return (
        place is not None
        and len(first) == len(second)
        and first[place] != second[place]
        and sum(map(operator.ne, first, second)) == 1
    )


LEAST_PROGRAMS = 20
"""A problem with fewer programs shows too little of what other schedules would cost."""
LIMITS = (0.01, 0.02, 0.05)


def broad(problems: Sequence[ProblemReport]) -> list[ProblemReport]:
    """The problems with enough programs to show what other schedules cost, or with all programs that there are."""
    return [one for one in problems if one.programs >= LEAST_PROGRAMS or one.whole]


def few_schedules(problems: Sequence[ProblemReport]) -> tuple[dict[float, tuple[Schedule, ...]], str]:
    """Few schedules that keep every problem within each limit of its best, and the same in words, which are empty where there are
    fewer than two problems.

    The schedules are chosen greedily: next comes the schedule that serves most of the remaining problems, then the cheaper one.
    A schedule serves only problems on which it was timed, so that each set is enough, and a smaller one may exist. Where
    problems have several accuracy classes, those of the most frequent one are considered.
    """
    modes = Counter(one.accum_mode for one in problems)
    wanted = [one for one in problems if one.accum_mode == max(modes, key=lambda mode: modes[mode])]
    losses = [{timed.schedule: timed.relative - 1 for timed in one.timed} for one in wanted]
    sets = {limit: _chosen(losses, limit) for limit in LIMITS}
    return sets, _sentence(wanted, losses, sets) if len(wanted) > 1 else ""


def _chosen(losses: Sequence[dict[Schedule, float]], limit: float) -> tuple[Schedule, ...]:
    left, chosen = list(losses), list[Schedule]()
    while left:
        covers = grouped(item for each in left for item in each.items() if item[1] <= limit)
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
