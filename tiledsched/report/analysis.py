"""Computes what tiles and knobs are worth from the times of schedules. These are pure functions: no database is read."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tiledsched.core.schedule import HINT_KNOBS, KnobValue, Schedule
from tiledsched.report.records import (
    KnobImportance,
    KnobValueRatio,
    ProblemReport,
    Tile,
    TileSensitivity,
    TileTime,
    Timed,
)

T = TypeVar("T")
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


def tile_knobs(problems: Sequence[ProblemReport]) -> tuple[str, str] | None:
    """The two knobs over which heat maps are drawn; None where fewer than two knobs are integers, or none of them varies.

    Knobs that are named like a tile's rows and columns come first; otherwise the two knobs that matter most, constants
    of the kernel before compiler hints.
    """
    timed = [one.schedule for report in problems for one in report.timed]
    integers = dict.fromkeys(name for schedule in timed for name, value in schedule.items() if type(value) is int)
    place = {effect.knob: place for place, effect in enumerate(joined_importance(problems))}
    ranked = sorted(integers, key=lambda knob: (knob not in place, knob in HINT_KNOBS, place.get(knob, 0), knob))
    found = (ranked[0], ranked[1]) if len(ranked) > 1 and ranked[0] in place else None
    return named_tile(integers) or found


def tile_times(timed: Sequence[Timed], knobs: tuple[str, str] | None) -> tuple[TileTime, ...]:
    """The best time of each tile, best tile first. `timed` must be sorted, fastest first."""
    best: dict[Tile, Timed] = {}
    for one in timed:
        if knobs is not None and {*knobs} <= {*one.schedule}:
            best.setdefault((one.schedule.number(knobs[0]), one.schedule.number(knobs[1])), one)
    fastest = min((one.us for one in best.values()), default=0.0)
    return tuple(
        TileTime(tile=tile, us=one.us, relative=one.us / fastest, schedule=one.schedule) for tile, one in best.items()
    )


def sensitivity(problems: Sequence[ProblemReport]) -> tuple[TileSensitivity, ...]:
    """What the choice of tile is worth, for each group of problems and each regime of sizes.

    Where a regime holds several problems, a tile's figure is the geometric mean over them of its best time relative to
    the best tile's; only tiles timed in all of them are compared.
    """
    cells: dict[tuple[Any, str], list[ProblemReport]] = defaultdict(list)
    for report in problems:
        if report.tiles:
            cells[report.group, size_regime(report.size)].append(report)
    lines = []
    for (_, regime), members in cells.items():
        tables = [{tile.tile: tile.relative for tile in member.tiles} for member in members]
        shared = sorted(set.intersection(*(set(table) for table in tables)))
        if not shared:
            continue
        means = {tile: statistics.geometric_mean([table[tile] for table in tables]) for tile in shared}
        ranked = sorted(shared, key=lambda tile: (means[tile], tile))
        runner_up = ranked[1] if len(ranked) > 1 else None
        lines.append(
            TileSensitivity(
                device_name=members[0].device_name,
                shared=members[0].shared,
                accum_mode=members[0].accum_mode,
                regime=regime,
                sizes=tuple(sorted({member.size for member in members})),
                problems=len(members),
                best=ranked[0],
                runner_up=runner_up,
                drop=means[runner_up] / means[ranked[0]] - 1 if runner_up else None,
                spread=means[ranked[-1]] / means[ranked[0]] - 1,
            )
        )
    return tuple(lines)


def knob_importance(timed: Sequence[Timed]) -> tuple[KnobImportance, ...]:
    """How much each knob that varies matters in one problem, the most important knob first."""
    schedules = [one.schedule for one in timed]
    fastest = min(one.us for one in timed)
    effects = []
    for knob in _varying(schedules):
        changes = [
            max(a.us, b.us) / min(a.us, b.us) - 1
            for a, b in matched_pairs([(one.schedule, one) for one in timed], knob)
        ]
        best: dict[tuple[type, KnobValue], float] = {}
        for one in timed:
            if knob in one.schedule:
                key = (type(one.schedule[knob]), one.schedule[knob])
                best[key] = min(one.us, best.get(key, one.us))
        values = [KnobValueRatio(value=value, ratio=us / fastest) for (_, value), us in best.items()]
        effects.append(_importance(knob, changes, values))
    return tuple(sorted(effects, key=_order))


def fixed_knob_costs(problems: Sequence[ProblemReport]) -> dict[str, dict[KnobValue, float]]:
    """What fixing a knob at one value costs while all other knobs stay free: knob -> value -> cost.

    A cost is the best time with the value over the best time of all, as the geometric mean over the problems. Only values that
    every problem timed are given, and only knobs with at least two of them. The knob whose wrong value costs most stands first.
    """
    found = {}
    for effect in joined_importance(problems):
        costs = {line.value: line.ratio for line in effect.values if line.problems == len(problems)}
        if len(costs) > 1:
            found[effect.knob] = costs
    return dict(sorted(found.items(), key=lambda item: (-max(item[1].values()), item[0])))


def joined_importance(problems: Sequence[ProblemReport]) -> tuple[KnobImportance, ...]:
    """The importance of knobs over several problems: changes are averaged over all pairs, ratios by geometric mean."""
    names = list(dict.fromkeys(effect.knob for report in problems for effect in report.knobs))
    joined = []
    for knob in names:
        parts = [effect for report in problems for effect in report.knobs if effect.knob == knob]
        pairs = sum(part.pairs for part in parts)
        total = sum(part.mean_change * part.pairs for part in parts if part.mean_change is not None)
        largest = [part.largest_change for part in parts if part.largest_change is not None]
        ratios: dict[tuple[type, KnobValue], list[float]] = defaultdict(list)
        for part in parts:
            for line in part.values:
                ratios[type(line.value), line.value].append(line.ratio)
        values = [
            KnobValueRatio(value=value, ratio=statistics.geometric_mean(found), problems=len(found))
            for (_, value), found in ratios.items()
        ]
        joined.append(
            KnobImportance(
                knob=knob,
                pairs=pairs,
                mean_change=total / pairs if pairs else None,
                largest_change=max(largest, default=None),
                values=_by_ratio(values),
            )
        )
    return tuple(sorted(joined, key=_order))


def matched_pairs(items: Sequence[tuple[Schedule, T]], knob: str) -> Iterator[tuple[T, T]]:
    """Pairs of items whose schedules both have `knob` and differ in nothing else."""
    groups: dict[tuple[tuple[str, type, KnobValue], ...], list[T]] = defaultdict(list)
    for schedule, value in items:
        if knob in schedule:
            rest = tuple((name, type(own), own) for name, own in schedule.items() if name != knob)
            groups[rest].append(value)
    for members in groups.values():
        yield from itertools.combinations(members, 2)


def _varying(schedules: Sequence[Schedule]) -> list[str]:
    """The knobs with more than one value, in the order in which schedules name them."""
    seen: dict[str, set[tuple[type, KnobValue]]] = defaultdict(set)
    for schedule in schedules:
        for knob, value in schedule.items():
            seen[knob].add((type(value), value))
    return [knob for knob, values in seen.items() if len(values) > 1]


def _importance(knob: str, changes: Sequence[float], values: Sequence[KnobValueRatio]) -> KnobImportance:
    return KnobImportance(
        knob=knob,
        pairs=len(changes),
        mean_change=statistics.fmean(changes) if changes else None,
        largest_change=max(changes, default=None),
        values=_by_ratio(values),
    )


def _by_ratio(values: Sequence[KnobValueRatio]) -> tuple[KnobValueRatio, ...]:
    return tuple(sorted(values, key=lambda line: (line.ratio, str(line.value))))


def _order(effect: KnobImportance) -> tuple[float, float, str]:
    return -(effect.mean_change or 0.0), -max(line.ratio for line in effect.values), effect.knob
