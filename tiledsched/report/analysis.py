"""Computes what tiles and knobs are worth from the times of schedules. These are pure functions: no database is read."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.report.records import ProblemReport, Tile, TileSensitivity, TileTime, Timed

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
REGIMES = (("short", 1024), ("medium", 4096))
"""The largest size of each regime; larger sizes are `long`. Table 4 of TiledAttention has the same three regimes."""


def size_regime(size: int) -> str:
    """The regime of a size: `short` up to 1024, `medium` up to 4096, `long` above."""
    return next((name for name, largest in REGIMES if size <= largest), "long")


def named_tile(knobs: Iterable[str]) -> tuple[str, str] | None:
    """The two knobs whose names say that they are a tile's rows and columns, such as tile_m and tile_n, or BLOCK_M and
    BLOCK_N; None where there are none.
    """
    known = list(knobs)
    pairs = ((name, name[:-1] + ("n" if name.endswith("m") else "N")) for name in known if name.lower().endswith("_m"))
    return next((pair for pair in pairs if pair[1] in known), None)


def tile_times(timed: Sequence[Timed], knobs: tuple[str, str] | None, *, whole: bool = False) -> tuple[TileTime, ...]:
    """The best time of each tile, best tile first. `timed` must be sorted, fastest first; with `whole` it is all of the search
    space, so that every tile is searched enough.
    """
    members: dict[Tile, list[Timed]] = defaultdict(list)
    for one in timed:
        if knobs is not None and {*knobs} <= {*one.schedule}:
            members[one.schedule.number(knobs[0]), one.schedule.number(knobs[1])].append(one)
    programs = {tile: len({one.same_program_as or one.schedule for one in each}) for tile, each in members.items()}
    values: dict[str, set[object]] = defaultdict(set)
    for one in timed:
        for knob, value in one.schedule.items():
            values[knob].add(value)
    possible = math.prod(len(each) for knob, each in values.items() if knob not in (knobs or ()))
    enough = min(ENOUGH_PROGRAMS, max(max(programs.values(), default=0) / 2, min(FEWEST_PROGRAMS, possible)))
    ordered = sorted(members.items(), key=lambda item: item[1][0].us)
    return tuple(
        TileTime(
            tile=tile,
            us=each[0].us,
            relative=each[0].us / ordered[0][1][0].us,
            schedule=each[0].schedule,
            programs=programs[tile],
            searched=whole or place == 0 or programs[tile] >= enough,
        )
        for place, (tile, each) in enumerate(ordered)
    )


def sensitivity(problems: Sequence[ProblemReport]) -> tuple[TileSensitivity, ...]:
    """What the choice of tile is worth, for each group of problems and each regime of sizes.

    Problems with fewer than two tiles that were searched enough are left out. Where a regime holds several problems, a
    tile's figure is the geometric mean over them of its best time relative to the best tile's; only tiles searched enough
    in all of them are compared.
    """
    cells: dict[tuple[Any, str], list[ProblemReport]] = defaultdict(list)
    for report in problems:
        if sum(tile.searched for tile in report.tiles) > 1:
            cells[report.group, size_regime(report.size)].append(report)
    lines = []
    for (_, regime), members in cells.items():
        tables = [{tile.tile: tile.relative for tile in member.tiles if tile.searched} for member in members]
        shared = set.intersection(*(set(table) for table in tables))
        means = {tile: statistics.geometric_mean([table[tile] for table in tables]) for tile in shared}
        ranked = sorted(shared, key=lambda tile: (means[tile], tile))
        if len(ranked) > 1:
            lines.append(
                TileSensitivity(
                    device_name=members[0].device_name,
                    shared=members[0].shared,
                    accum_mode=members[0].accum_mode,
                    regime=regime,
                    sizes=tuple(sorted({member.size for member in members})),
                    problems=len(members),
                    best=ranked[0],
                    runner_up=ranked[1],
                    drop=means[ranked[1]] / means[ranked[0]] - 1,
                    spread=means[ranked[-1]] / means[ranked[0]] - 1,
                    tiles=len(ranked),
                )
            )
    return tuple(lines)


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
        wanted = {rest for rest, kept in zip(rests, close, strict=True) if kept and rest is not None}
        groups: dict[int, list[int]] = defaultdict(list)
        for i, rest in enumerate(rests):
            if rest is not None and rest in wanted:
                groups[rest].append(i)
        for members in groups.values():
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
