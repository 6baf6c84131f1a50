"""The data of the views of one problem: each view's rows are made by one function here, and are drawn as they are."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tiledsched.core.groups import grouped
from tiledsched.core.problem import unit_of
from tiledsched.core.schedule import Schedule
from tiledsched.core.text import change, code, joined, plural, show
from tiledsched.report.analysis import FEWEST_PROGRAMS, broad
from tiledsched.report.axes import cell
from tiledsched.report.effects import LEAST_PAIRS, value_effects
from tiledsched.report.records import AS_GOOD, MEASURED, ProblemReport, Report, TileTime, Timed, Untuned, ValueEffect

SCALE_END = 3.0
"""Times beyond this many times the best share one colour or one bar, so that one bad program does not grey out the rest."""
EDGES = (1.0, 1.01, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, SCALE_END)
"""Where the bars of the histogram of programs begin, as multiples of the best time."""
MOST_PROGRAMS = 5_000
"""Programs on a page, at most; where there are more, each problem shows the fastest and evenly spread others."""
FEWEST_DOTS = 40
"""Programs of a problem on a page, however many problems there are."""
FASTEST = 0.3
"""The share of the programs shown that are the fastest, where not all are shown."""
MOST_PROBLEMS = 150
"""Problems that a page lets its reader choose from, at most; those with the most programs are taken."""
CURVE_END = 10.0
"""Where the curve of costs ends: what takes longer is drawn there."""
SERVED, DEFAULTS, UNTUNED = "served", "compiler defaults", "served without tuning"
"""How marks are called, in every chart."""
MOST_UNTRIED = 6
"""Knobs with untried values that are named, at most."""
NEAR_END = 1.5
"""What takes longer counts as much as this where two knobs are looked for that depend on each other."""
KNOB = "k:"
"""Begins the field of a row that holds the value of a knob."""
RESOURCES = {
    "registers": "registers",
    "spilled": "spill_bytes",
    "blocks": "ctas_per_sm",
    "shared": "shared_bytes",
    "threads": "threads",
    "code": "code_bytes",
}
"""Field of a row -> the resource of its machine code."""

Row = dict[str, Any]


def explored(problems: Sequence[ProblemReport]) -> list[ProblemReport]:
    """The problems that show what the choice of schedule is worth: those with many programs or, where there is none, those
    with more than two.
    """
    found = broad(problems) or [one for one in problems if one.programs > 2]
    most = sorted(found, key=lambda one: -one.programs)[:MOST_PROBLEMS]
    return [one for one in found if one in most] if len(most) < len(found) else found


def source_of(report: Report, one: ProblemReport) -> str:
    """Where the times of a problem come from, for the title of a picture."""
    if one.device_name:
        return f"measured on {one.device_name} ({report.arch})" + (f", {one.taken:%Y-%m-%d}" if one.taken else "")
    return f"modelled for {report.arch}, not measured"


def listed(one: ProblemReport, most: int) -> dict[Schedule, int]:
    """The programs of a problem that a page draws: each schedule -> the place of its program, the fastest first.

    They are at most `most`, and besides them what is served, the defaults, what would be served without tuning, and the best of
    each tile.
    """
    programs = distinct(one)
    own = {timed.schedule: timed.program for timed in one.timed}
    named = [each.schedule for each in (*one.tiles, one.serves, one.default, one.untuned) if each]
    wanted = {timed.schedule for timed in sampled(programs, most)} | {own.get(each, each) for each in named}
    drawn = [timed.schedule for timed in programs if timed.schedule in wanted]
    places = {schedule: place for place, schedule in enumerate(drawn)}
    return {schedule: places[program] for schedule, program in own.items() if program in places}


def mark_of(one: ProblemReport, schedules: Collection[Schedule]) -> str:
    """What some schedules of a problem hold: `served`; `tie`, what cannot be told apart from it; `best`, where what is served has
    no time; or nothing of these.
    """
    chosen = one.serves or one.leader
    if chosen.schedule in schedules:
        return "served" if one.serves else "best"
    return "tie" if one.ties.intersection(schedules) else ""


def program_rows(one: ProblemReport, places: Mapping[Schedule, int]) -> list[Row]:
    """The programs that are drawn: their time, what they take of the GPU, and the value of each knob."""
    knobs = dict.fromkeys(knob for schedule in places for knob in schedule)
    alike = grouped((place, schedule) for schedule, place in places.items())
    shown = [timed for timed in distinct(one) if timed.schedule in places]
    return [
        {
            "us": round(timed.us, 2),
            "best_us": round(one.best.us, 2),
            "mark": mark_of(one, alike[place]),
            **{name: getattr(timed.facts, fact) if timed.facts else None for name, fact in RESOURCES.items()},
            **{f"{KNOB}{knob}": timed.schedule.get(knob) for knob in knobs},
        }
        for place, timed in enumerate(shown)
    ]


def tile_rows(one: ProblemReport, knobs: Sequence[str], places: Mapping[Schedule, int]) -> list[Row]:
    """Each tile size by its best schedule: the best is 1. A question mark stands by tiles of which too little was tried."""
    schedules = [timed.schedule for timed in one.timed if one.tiles]
    of = grouped(((each.number(knobs[0]), each.number(knobs[1])), each) for each in schedules)
    rows = [
        _square(
            one,
            *tile.tile,
            tile.relative,
            tile.us,
            tile.programs,
            tile.searched,
            of[tile.tile],
            places.get(tile.schedule),
        )
        for tile in one.tiles
    ]
    served = one.explained.schedule if one.explained else {}
    for row in rows if served and not one.serves else ():  # not timed with these, and nothing is known to tie with it
        row["mark"] = "served" if (row["rows"], row["columns"]) == tuple(map(served.get, knobs)) else ""
    return rows


def _square(
    one: ProblemReport,
    rows: object,
    columns: object,
    relative: float,
    us: float,
    programs: int,
    searched: bool,
    schedules: Collection[Schedule],
    at: int | None,
) -> Row:
    """A square of a heat map."""
    return {
        "rows": rows,
        "columns": columns,
        "relative": round(relative, 4),
        "said": f"{relative:.2f}" + ("" if searched else "?"),
        "us": round(us, 2),
        "programs": programs,
        "mark": mark_of(one, schedules),
        "at": at,
    }


def pair_rows(one: ProblemReport, pair: Sequence[str], places: Mapping[Schedule, int]) -> list[Row]:
    """Each two values of two knobs by the best of the programs drawn. A question mark stands by squares with few programs."""
    found = grouped(
        ((show(timed.schedule[pair[0]]), show(timed.schedule[pair[1]])), timed)
        for timed in distinct(one)
        if timed.schedule in places and {*pair} <= {*timed.schedule}
    )
    return [
        _square(
            one,
            *values,
            each[0].relative,
            each[0].us,
            len(each),
            len(each) >= FEWEST_PROGRAMS,
            [timed.schedule for timed in each],
            places[each[0].schedule],
        )
        for values, each in found.items()
    ]


def strongest_pair(one: ProblemReport, tile: Collection[str]) -> tuple[str, ...]:
    """The two knobs that depend most on each other, but for those of the tile map; none where no two do in enough programs.

    Over all two values of each: how far the best time with both changed is from what the changes of one multiply to. Only values
    count of which enough programs were timed together.
    """
    best: dict[tuple[str, str], dict[tuple[object, object], list[float]]] = defaultdict(lambda: defaultdict(list))
    programs = distinct(one)
    knobs = [
        knob for knob in sorted(one.best.schedule) if len({str(timed.schedule.get(knob)) for timed in programs}) > 1
    ]
    for timed in programs:
        slower = math.log(min(timed.relative, NEAR_END))
        values = [(knob, timed.schedule[knob]) for knob in knobs if knob in timed.schedule]
        for (first, a), (second, b) in itertools.combinations(values, 2):
            best[first, second][a, b].append(slower)
    worth = {}
    for pair, squares in best.items():
        least = {values: min(logs) for values, logs in squares.items() if len(logs) >= FEWEST_PROGRAMS}
        worth[pair] = max(
            (
                abs(least[a, b] + least[c, d] - least[a, d] - least[c, b])
                for (a, b), (c, d) in itertools.combinations(least, 2)
                if a != c and b != d and (a, d) in least and (c, b) in least
            ),
            default=0.0,
        )
    worth = {pair: value for pair, value in worth.items() if {*pair} != {*tile} and value > math.log(1 + AS_GOOD)}
    return max(worth, key=lambda pair: worth[pair], default=())


def judged_knobs(one: ProblemReport, tile: Collection[str]) -> list[ValueEffect]:
    """What values of knobs cost in a problem, without the knobs of the tile map, which chooses all others anew for each tile."""
    return [each for each in value_effects(one) if each.knob not in tile]


def knob_rows(effects: Iterable[ValueEffect], error: float = 0.0) -> list[Row]:
    """What each value of a knob costs in place of another, from matched pairs; values without enough pairs are left out. Only
    what takes longer by more than `error`, the model's where times are estimates, is called slower.
    """
    return [
        {
            "change": f"{each.knob}: {show(each.value)}, not {show(each.against)}",
            "relative": round(each.ratio, 4),
            "low": round(low := each.ci_low or each.ratio, 4),
            "high": round(high := each.ci_high or each.ratio, 4),
            "between": f"{low:.3f} to {high:.3f} ({'range of estimates' if each.estimated else '95% interval'})",
            "slower": min(low, each.ratio - error) > 1,
            "said": change(each.ratio - 1),
            "pairs": each.pairs,
            "problems": each.problems,
        }
        for each in effects
        if each.ratio is not None
    ]


def _faster_elsewhere(effect: ValueEffect) -> bool:
    """Whether a value is faster than the best schedule's in pairs: in schedules, that is, which differ from it in more knobs."""
    return effect.ratio is not None and effect.ratio < 1 - AS_GOOD


def not_drawn(effects: Sequence[ValueEffect]) -> str:
    """The values of knobs that are faster only elsewhere, and how many have too few matched pairs to be judged, in sentences."""
    said = []
    if elsewhere := [code(f"{each.knob}={show(each.value)}") for each in effects if _faster_elsewhere(each)]:
        said.append(
            f"Faster only in schedules that differ from the best in more knobs, and not drawn: {joined(elsewhere)}."
        )
    if few := [each.knob for each in effects if each.ratio is None]:
        knobs = [code(knob) for knob in dict.fromkeys(few)]
        more = [f"{len(knobs) - MOST_UNTRIED} more knobs"] if len(knobs) > MOST_UNTRIED else []
        of = joined([*knobs[:MOST_UNTRIED], *more])
        said.append(f"Fewer than {LEAST_PAIRS} pairs were tried of {plural(len(few), 'value')} of {of}.")
    return " ".join(said)


def distinct(one: ProblemReport) -> list[Timed]:
    """The distinct programs of a problem, fastest first."""
    return [timed for timed in one.timed if timed.same_program_as is None]


def sampled(programs: Sequence[Timed], most: int) -> list[Timed]:
    """At most `most` programs: the fastest, and of the rest evenly spread ones, the slowest included."""
    if len(programs) <= most:
        return list(programs)
    head = max(1, round(most * FASTEST))
    rest, places = programs[head:], most - head
    step = (len(rest) - 1) / max(1, places - 1)
    return [*programs[:head], *(rest[round(place * step)] for place in range(places))]


def histogram_rows(one: ProblemReport) -> list[Row]:
    """How many programs take how many times as long as the best; the last bar holds all that are slower."""
    programs = distinct(one)
    ends = (*EDGES[1:], float("inf"))
    counts = [sum(start < timed.relative <= end for timed in programs) for start, end in zip(EDGES, ends, strict=True)]
    counts[0] += sum(timed.relative <= EDGES[0] for timed in programs)
    so_far = list(itertools.accumulate(counts))
    return [
        {"start": start, "end": min(end, SCALE_END * 1.1), "programs": count, "so_far": f"{below} of {len(programs)}"}
        for start, end, count, below in zip(EDGES, ends, counts, so_far, strict=True)
        if count
    ]


def mark_rows(one: ProblemReport, places: Mapping[Schedule, int]) -> list[Row]:
    """What is served, the compiler defaults, and what would be served without tuning, as multiples of the best time."""
    named = [
        (SERVED if one.serves else "best", one.serves or one.leader),
        (DEFAULTS, one.default),
        (UNTUNED, one.untuned),
    ]
    timed = {each.schedule: each for each in one.timed}
    known = [(what, timed[each.schedule]) for what, each in named if each and each.schedule in timed]
    return [
        {
            "what": f"{what} {each.relative:.2f}" + (" →" if each.relative > SCALE_END else ""),
            "relative": round(min(each.relative, SCALE_END), 4),
            "us": round(each.us, 2),
            "height": 10 + 15 * place,
            "kind": SERVED if what == "best" else what,
            "at": places.get(each.schedule),
        }
        for place, (what, each) in enumerate(sorted(known, key=lambda mark: mark[1].relative))
    ]


def race_rows(one: ProblemReport) -> list[Row]:
    """Each other implementation and the schedule of this problem's own entry that it was timed in turn with, the fastest first:
    both times of that one run, as measured.
    """
    entry = one.served if one.provenance == MEASURED else None
    if entry is None:
        return []
    taken = entry.updated_at or (entry.measurement.created_at if entry.measurement else None)
    raced = [
        (each.ratio, each.name, each.median_us, each.ours_us, each)
        for each in entry.rivals or ()
        if each.ratio is not None and each.median_us is not None and each.ours_us is not None
    ]
    return [
        {
            "rival": name,
            "us": round(us, 2),
            "ours_us": round(ours_us, 2),
            "said": f"{ratio:.2f}x",
            "interval": f"{each.ratio_low or ratio:.3f} to {each.ratio_high or ratio:.3f}",
            "schedule": entry.schedule.short(),
            "day": f"{taken:%Y-%m-%d}" if taken else "",
            "version": each.version,
        }
        for ratio, name, us, ours_us, each in sorted(raced, key=lambda race: race[:2])
    ]


def curve_rows(problems: Iterable[ProblemReport], named: Callable[[Schedule], str]) -> list[Row]:
    """What each choice costs over the best time, and what is served or best, for each problem with several programs."""
    rows = []
    for one in (each for each in problems if each.programs > 1):
        choices: tuple[tuple[str, Timed | Untuned | TileTime | None], ...] = (
            (DEFAULTS, one.default),
            (UNTUNED, one.untuned if one.provenance == MEASURED else None),  # else it is what is served
            ("second best tile", one.second_tile),
        )
        rows += [
            {
                "size": one.size,
                "relative": round(min(chosen.relative, CURVE_END), 4),
                "what": what,
                "tile": named(chosen.schedule),
                "best": named((one.serves or one.leader).schedule),
                "problem": str(one.problem),
            }
            for what, chosen in choices
            if chosen and chosen.relative is not None
        ]
    return rows


def trace_rows(one: ProblemReport) -> list[Row]:
    """The best time so far over the number of programs measured, in the newest run; empty where no run is recorded."""
    if len(one.trace) < 3:
        return []
    return [
        {"measured": place + 1, "relative": round(min(so_far, SCALE_END), 4)}
        for place, so_far in enumerate(itertools.accumulate(one.trace, min))
    ]


def roofline_rows(one: ProblemReport, places: Mapping[Schedule, int]) -> list[Row]:
    """What is served and the compiler defaults under the ceilings; empty for problems without FLOPs and bytes."""
    if unit_of(one.problem) != "TFLOP/s" or not one.problem.min_bytes:
        return []
    intensity = one.problem.flops / one.problem.min_bytes
    both = [(SERVED, one.serves or one.leader), *([(DEFAULTS, one.default)] if one.default else [])]
    return [
        {
            "intensity": round(intensity, 3),
            "rate": round(timed.rate, 2),
            "kind": kind,
            "us": round(timed.us, 2),
            "at": places.get(timed.schedule),
        }
        for kind, timed in both
    ]


def choices_of(report: Report, one: ProblemReport, optional: Sequence[str]) -> dict[str, str]:
    """What a page's choices are for a problem: its GPU, its sizes and types, its accumulators and the optional fields named."""
    axes, problem = report.axes, one.problem
    return {
        "GPU": f"{one.device_name}, measured" if one.device_name else f"{report.arch}, modelled",
        **{title: cell(problem, fields) for title, fields in axes.columns.items()},
        **dict(zip(axes.titles.values(), map(show, one.shared), strict=True)),
        **{name: show(getattr(problem, name)) for name in optional},
        "accumulators": one.accum_mode,
    }


def views_of(
    one: ProblemReport, most: int, tile: Sequence[str]
) -> tuple[dict[str, Sequence[Row]], dict[str, str], Sequence[str]]:
    """All that a page shows of one problem: name of a data set -> its rows, name of a view -> what has to be said of it, and
    the two knobs of the map of pairs.

    Args:
        one: the problem.
        most: at most so many programs are drawn as dots.
        tile: the knobs of the tile map; empty where there is none.
    """
    places, effects = listed(one, most), judged_knobs(one, tile)
    programs, pair = program_rows(one, places), strongest_pair(one, tile)
    partly = f"{len(programs)} of {one.programs} programs are drawn." if len(programs) < one.programs else ""
    rows: dict[str, Sequence[Row]] = {
        "tiles": tile_rows(one, tile, places) if tile and one.programs > 1 else (),
        "effects": knob_rows(
            (each for each in effects if not _faster_elsewhere(each)), 0 if one.device_name else one.tolerance
        ),
        "pairs": pair_rows(one, pair, places) if pair else (),
        "bars": histogram_rows(one) if one.programs > 1 else (),
        "marks": mark_rows(one, places),
        "programs": programs,
        "resources": [{"known": True}]
        if any(row["registers"] is not None for row in programs) and one.programs > 1
        else (),
        "roofline": roofline_rows(one, places),
        "races": race_rows(one),
        "trace": trace_rows(one),
        "here": [{"size": one.size}],
    }
    within = "" if one.error is None else f"Differences below {one.tolerance * 100:.0f}% are within the model's error."
    notes = {
        "tile-map": within,
        "curve": within,
        "knob-effects": not_drawn(effects),
        "resources": partly,
        "pairs": partly,
    }
    return rows, notes, pair
