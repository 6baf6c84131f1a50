"""From timed schedules to tiles and knobs: pure functions, no database."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tiledsched.report.records import (
    KnobImportance,
    KnobValueRatio,
    ProblemReport,
    Tile,
    TileSensitivity,
    TileTime,
    Timed,
)
from tiledsched.schedule import KnobValue, Schedule

T = TypeVar("T")
REGIMES = (("short", 1024), ("medium", 4096))
"""Longest sequence of each regime; what is longer is `long`. Table 4 of TiledAttention has the same three."""


def seq_regime(seq_len: int) -> str:
    """short up to 1024 tokens, medium up to 4096, long above."""
    return next((name for name, longest in REGIMES if seq_len <= longest), "long")


def tile_of(schedule: Schedule) -> Tile | None:
    """(tile_m, tile_n), or None where the schedule has no such knobs."""
    if not {"tile_m", "tile_n"} <= set(schedule):
        return None
    return schedule.number("tile_m"), schedule.number("tile_n")


def tile_times(timed: Sequence[Timed]) -> tuple[TileTime, ...]:
    """The best of each tile, best tile first. `timed` is fastest first."""
    best: dict[Tile, Timed] = {}
    for one in timed:
        tile = tile_of(one.schedule)
        if tile is not None:
            best.setdefault(tile, one)
    fastest = min((one.us for one in best.values()), default=0.0)
    return tuple(TileTime(tile=tile, us=one.us, relative=one.us / fastest, schedule=one.schedule)
                 for tile, one in best.items())  # fmt: skip


def sensitivity(problems: Sequence[ProblemReport]) -> tuple[TileSensitivity, ...]:
    """One line for each group and regime of sequence lengths.

    Where a regime holds several problems, a tile's figure is the geometric mean over them of its best time relative to
    the best tile's; only tiles timed in all of them are compared.
    """
    cells: dict[tuple[tuple[str, int, str, bool, str], str], list[ProblemReport]] = defaultdict(list)
    for report in problems:
        if report.tiles:
            cells[report.group, seq_regime(report.seq_len)].append(report)
    lines = []
    for (group, regime), members in cells.items():
        tables = [{tile.tile: tile.relative for tile in member.tiles} for member in members]
        shared = sorted(set.intersection(*(set(table) for table in tables)))
        if not shared:
            continue
        means = {tile: statistics.geometric_mean([table[tile] for table in tables]) for tile in shared}
        ranked = sorted(shared, key=lambda tile: (means[tile], tile))
        runner_up = ranked[1] if len(ranked) > 1 else None
        device_name, head_dim, dtype, causal, accum_mode = group
        lines.append(TileSensitivity(
            device_name=device_name, head_dim=head_dim, dtype=dtype, causal=causal, accum_mode=accum_mode,
            regime=regime, seq_lens=tuple(sorted({member.seq_len for member in members})), problems=len(members),
            best=ranked[0], runner_up=runner_up, drop=means[runner_up] / means[ranked[0]] - 1 if runner_up else None,
            spread=means[ranked[-1]] / means[ranked[0]] - 1,
        ))  # fmt: skip
    return tuple(lines)


def knob_importance(timed: Sequence[Timed]) -> tuple[KnobImportance, ...]:
    """How much each knob with more than one value matters in one problem, the most important first."""
    schedules = [one.schedule for one in timed]
    fastest = min(one.us for one in timed)
    effects = []
    for knob in _varying(schedules):
        changes = [max(a.us, b.us) / min(a.us, b.us) - 1
                   for a, b in matched_pairs([(one.schedule, one) for one in timed], knob)]  # fmt: skip
        best: dict[tuple[type, KnobValue], float] = {}
        for one in timed:
            if knob in one.schedule:
                key = (type(one.schedule[knob]), one.schedule[knob])
                best[key] = min(one.us, best.get(key, one.us))
        values = [KnobValueRatio(value=value, ratio=us / fastest, problems=1) for (_, value), us in best.items()]
        effects.append(_importance(knob, changes, values))
    return tuple(sorted(effects, key=_order))


def joined_importance(problems: Sequence[ProblemReport]) -> tuple[KnobImportance, ...]:
    """The effects of several problems joined: changes averaged over all pairs, ratios by geometric mean."""
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
        values = [KnobValueRatio(value=value, ratio=statistics.geometric_mean(found), problems=len(found))
                  for (_, value), found in ratios.items()]  # fmt: skip
        joined.append(KnobImportance(knob=knob, pairs=pairs, mean_change=total / pairs if pairs else None,
                                 largest_change=max(largest, default=None), values=_by_ratio(values)))  # fmt: skip
    return tuple(sorted(joined, key=_order))


def matched_pairs(items: Sequence[tuple[Schedule, T]], knob: str) -> Iterator[tuple[T, T]]:
    """What belongs to every pair of schedules that have `knob` and differ in it alone."""
    groups: dict[tuple[tuple[str, type, KnobValue], ...], list[T]] = defaultdict(list)
    for schedule, value in items:
        if knob in schedule:
            rest = tuple((name, type(own), own) for name, own in schedule.items() if name != knob)
            groups[rest].append(value)
    for members in groups.values():
        yield from itertools.combinations(members, 2)


def _varying(schedules: Sequence[Schedule]) -> list[str]:
    """Knobs with more than one value, in the order of the schedules' names."""
    seen: dict[str, set[tuple[type, KnobValue]]] = defaultdict(set)
    for schedule in schedules:
        for knob, value in schedule.items():
            seen[knob].add((type(value), value))
    return [knob for knob, values in seen.items() if len(values) > 1]


def _importance(knob: str, changes: Sequence[float], values: Sequence[KnobValueRatio]) -> KnobImportance:
    return KnobImportance(knob=knob, pairs=len(changes), mean_change=statistics.fmean(changes) if changes else None,
                      largest_change=max(changes, default=None), values=_by_ratio(values))  # fmt: skip


def _by_ratio(values: Sequence[KnobValueRatio]) -> tuple[KnobValueRatio, ...]:
    return tuple(sorted(values, key=lambda line: (line.ratio, str(line.value))))


def _order(effect: KnobImportance) -> tuple[float, float, str]:
    return -(effect.mean_change or 0.0), -max(line.ratio for line in effect.values), effect.knob
