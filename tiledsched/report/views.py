"""The data of the views of one problem: each view's rows are made by one function here, and are drawn as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tiledsched.core.problem import unit_of
from tiledsched.core.text import change
from tiledsched.report.analysis import broad
from tiledsched.report.axes import cell, show
from tiledsched.report.effects import LEAST_PAIRS, value_effects
from tiledsched.report.records import ProblemReport, Report, Timed, ValueEffect
from tiledsched.store.model_error import error_text

SCALE_END = 3.0
"""Times beyond this many times the best share one colour or one bar, so that one bad program does not grey out the rest."""
EDGES = (1.0, 1.01, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, SCALE_END)
"""Where the bars of the histogram of programs begin, as multiples of the best time."""
MOST_PROGRAMS = 12_000
"""Programs on a page, at most; where there are more, each problem shows the fastest and evenly spread others."""
FEWEST_DOTS = 40
"""Programs of a problem on a page, however many problems there are."""
FASTEST = 0.3
"""The share of the programs shown that are the fastest, where not all are shown."""
MOST_PROBLEMS = 150
"""Problems that a page lets its reader choose from, at most; those with the most programs are taken."""

Row = dict[str, Any]


def explored(problems: Sequence[ProblemReport]) -> list[ProblemReport]:
    """The problems that show what the choice of schedule is worth: those with many programs or, where there is none, those
    with more than two.
    """
    found = broad(problems) or [one for one in problems if one.programs > 2]
    most = sorted(found, key=lambda one: -one.programs)[:MOST_PROBLEMS]
    return [one for one in found if one in most] if len(most) < len(found) else found


def shown_problems(report: Report) -> list[ProblemReport]:
    """The problems of a report that a page explores one by one: measured ones, then modelled ones."""
    return [*explored(report.measured.problems), *explored(report.modelled.problems)]


def source_of(report: Report, one: ProblemReport) -> str:
    """Where the times of a problem come from, for the title of a picture."""
    if one.device_name:
        return f"measured on {one.device_name} ({report.arch})" + (f", {one.taken:%Y-%m-%d}" if one.taken else "")
    return f"modelled for {report.arch}, not measured; {error_text(one.error)}"


def tile_rows(one: ProblemReport) -> list[Row]:
    """Each tile size by its best schedule: the best is 1. A question mark stands by tiles of which too little was tried."""
    return [
        {
            "rows": tile.tile[0],
            "columns": tile.tile[1],
            "relative": round(tile.relative, 4),
            "said": f"{tile.relative:.2f}" + ("" if tile.searched else "?"),
            "us": round(tile.us, 2),
            "programs": tile.programs,
            "best": tile is one.tiles[0],
            "schedule": tile.schedule.short(),
        }
        for tile in one.tiles
    ]


def knob_rows(effects: Iterable[ValueEffect]) -> list[Row]:
    """What each value of a knob costs in place of another, from matched pairs; values without enough pairs are left out."""
    return [
        {
            "change": f"{each.knob}: {show(each.value)}, not {show(each.against)}",
            "relative": round(each.ratio, 4),
            "low": round(low := each.ci_low or each.ratio, 4),
            "high": round(high := each.ci_high or each.ratio, 4),
            "between": f"{low:.3f} to {high:.3f} ({'range of estimates' if each.estimated else '95% interval'})",
            "said": change(each.ratio - 1),
            "pairs": each.pairs,
            "problems": each.problems,
        }
        for each in effects
        if each.ratio is not None
    ]


def untried(effects: Iterable[ValueEffect]) -> str:
    """The values of knobs that have too few matched pairs to be judged, in a sentence; empty where there are none."""
    found = [f"`{each.knob}={show(each.value)}`" for each in effects if each.ratio is None]
    return f"Untried here (fewer than {LEAST_PAIRS} matched pairs): {', '.join(found)}." if found else ""


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


def mark_rows(one: ProblemReport) -> list[Row]:
    """The winner, the default schedule and the rivals, fastest first. Of a rival it is the ratio of its own race, and its
    measured time.
    """
    default = [("default schedule", one.default.relative, one.default.us)] if one.default else []
    rivals = [(race.name, race.ratio, race.us) for race in one.races]
    ordered = sorted([("best", 1.0, one.best.us), *default, *rivals], key=lambda mark: mark[1])
    return [
        {
            "what": f"{what} {relative:.2f}" + (" →" if relative > SCALE_END else ""),
            "at": round(min(relative, SCALE_END), 4),
            "us": round(us, 2),
            "height": 10 + 15 * place,
            "kind": what if what in ("best", "default schedule") else "rival",
        }
        for place, (what, relative, us) in enumerate(ordered)
    ]


def resource_rows(one: ProblemReport, most: int) -> list[Row]:
    """What programs take of the GPU, and their time."""
    found = sampled([timed for timed in distinct(one) if timed.facts], most)
    return [
        {
            "registers": timed.facts.registers,
            "spilled": timed.facts.spill_bytes,
            "blocks": timed.facts.ctas_per_sm,
            "relative": round(min(timed.relative, SCALE_END), 3),
            "us": round(timed.us, 2),
            "best": timed is one.best,
            "schedule": timed.schedule.short(),
        }
        for timed in found
        if timed.facts
    ]


def trace_rows(one: ProblemReport) -> list[Row]:
    """The best time so far over the number of programs measured, in the newest run; empty where no run is recorded."""
    if len(one.trace) < 3:
        return []
    return [
        {"measured": place + 1, "relative": round(min(so_far, SCALE_END), 4)}
        for place, so_far in enumerate(itertools.accumulate(one.trace, min))
    ]


def roofline_rows(one: ProblemReport) -> list[Row]:
    """The best and the default schedule of a problem under the ceilings; empty for problems without FLOPs and bytes."""
    if unit_of(one.problem) != "TFLOP/s" or not one.problem.min_bytes:
        return []
    intensity = one.problem.flops / one.problem.min_bytes
    both = [("best", one.best), *([("default schedule", one.default)] if one.default else [])]
    return [
        {"intensity": round(intensity, 3), "rate": round(timed.rate, 2), "what": what, "us": round(timed.us, 2)}
        for what, timed in both
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


def views_of(one: ProblemReport, most: int) -> tuple[dict[str, Sequence[Row]], dict[str, str]]:
    """All that a page shows of one problem: name of a data set -> its rows, and name of a view -> what has to be said of it.

    Args:
        one: the problem.
        most: at most so many programs are drawn as dots.
    """
    resources, effects = resource_rows(one, most), value_effects(one)
    partly = f"{len(resources)} of {one.programs} programs are drawn." if len(resources) < one.programs else ""
    rows: dict[str, Sequence[Row]] = {
        "tiles": tile_rows(one),
        "knobs": knob_rows(effects),
        "programs": histogram_rows(one),
        "marks": mark_rows(one),
        "resources": resources,
        "roofline": roofline_rows(one),
        "trace": trace_rows(one),
    }
    notes = {
        "knobs": untried(effects),
        "resources": partly if resources else "The resources of these programs are not known.",
        "trace": "" if one.trace else "No search of this problem is recorded in the database.",
    }
    return rows, notes
