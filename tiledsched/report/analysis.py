"""Computes what tiles and knobs are worth from the times of schedules. These are pure functions: no database is read."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tiledsched.core.schedule import Schedule
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


def tile_times(timed: Sequence[Timed], knobs: tuple[str, str] | None) -> tuple[TileTime, ...]:
    """The best time of each tile, best tile first. `timed` must be sorted, fastest first."""
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
            searched=place == 0 or programs[tile] >= enough,
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


def matched_pairs(items: Sequence[tuple[Schedule, T]], knob: str) -> Iterator[tuple[T, T]]:
    """Pairs of items whose schedules both have `knob` and differ in nothing else."""
    return ((first, second) for name, first, second in neighbours(items, [True] * len(items)) if name == knob)


def neighbours(items: Sequence[tuple[Schedule, T]], close: Sequence[bool]) -> Iterator[tuple[str, T, T]]:
    """Every pair of items whose schedules differ in one knob alone, with that knob, by knob.

    Args:
        items: schedules, each with what belongs to it.
        close: for each item whether it is close to the best; pairs of which neither member is are left out.
    """
    import numpy as np

    # Schedules that differ in one knob alone have the same sum over the hashes of all other knobs. Equal sums are only a
    # hint; what is found is compared value by value.
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, (schedule, _) in enumerate(items):
        kinds[tuple(schedule)].append(place)
    for knobs, members in kinds.items():
        each = itertools.chain.from_iterable(items[place][0].items() for place in members)
        hashes = np.fromiter(map(hash, each), np.int64, len(members) * len(knobs)).reshape(len(members), len(knobs))
        rests = hashes.sum(axis=1, keepdims=True) - hashes
        near = np.array([close[place] for place in members])
        for column, (knob, rest) in enumerate(zip(knobs, rests.T, strict=True)):
            hits = np.flatnonzero(np.isin(rest, rest[near]))
            _, group, size = np.unique(rest[hits], return_inverse=True, return_counts=True)
            groups: dict[int, list[int]] = defaultdict(list)
            for hit, own in zip(hits[size[group] > 1].tolist(), group[size[group] > 1].tolist(), strict=True):
                groups[own].append(members[hit])
            for alike in groups.values():
                for first, second in itertools.combinations(alike, 2):
                    if (close[first] or close[second]) and _differ_in(column, items[first][0], items[second][0]):
                        yield knob, items[first][1], items[second][1]


def _differ_in(column: int, first: Schedule, second: Schedule) -> bool:
    """Whether two schedules with the same knobs differ in the knob in that place alone."""
    one, other = [*first.values()], [*second.values()]
    a, b = one.pop(column), other.pop(column)
    return (type(a), a) != (type(b), b) and one == other and [*map(type, one)] == [*map(type, other)]
