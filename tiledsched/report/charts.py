"""The charts of the report: those over all problems, and the views of one problem, whose rows are in :mod:`views`.

Heat maps use viridis, which colour-blind people can read.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiledsched.core.cost import tensor_rate
from tiledsched.core.device import ARCHS, arch_spec
from tiledsched.core.problem import unit_of
from tiledsched.core.schedule import named_tile
from tiledsched.core.text import change, plural
from tiledsched.report.analysis import FEWEST_PROGRAMS
from tiledsched.report.document import View
from tiledsched.report.effects import joined_effects
from tiledsched.report.records import ProblemReport, Report
from tiledsched.report.vega import BINARY, BLUE, GREEN, ORANGE, RED, SIZES, Spec, chart, quantity, tips, titled, word
from tiledsched.report.views import DEFAULTS, SCALE_END, SERVED, UNTUNED, knob_rows, source_of

GOLDEN = 0.618034
"""Multiples of the golden ratio modulo 1 are spread evenly. They move dots apart that would hide each other."""
LEAST_OF_GROUP = 3
"""Where any group has at least this many problems, only groups with as many get a panel of rates."""
RATIOS: Spec = {
    "scale": {"type": "log", "nice": False},
    "axis": {
        "values": [0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100],
        "format": "~r",
        "labelOverlap": True,
        "labelSeparation": 5,
    },
}
"""An axis of times relative to another time."""
COST: Spec = {"scheme": "viridis", "reverse": True, "domain": [1, SCALE_END], "clamp": True}
"""The colours of times relative to the best."""


def costs(report: Report, problems: Sequence[ProblemReport]) -> Spec | None:
    """What a choice costs: a dot for each problem, a tick for the median."""
    rows: list[dict[str, Any]] = [
        {
            "choice": choice,
            "relative": 1 + drop,
            "loss": change(drop),
            "problem": str(one.problem),
            "best": one.best.schedule.short(),
            "us": round(one.best.us, 1),
            "jitter": round(place * GOLDEN % 1, 3),
        }
        for place, one in enumerate(problems)
        for choice, drop in (
            ("second best tile", one.tile_drop),
            (UNTUNED, one.untuned.relative - 1 if one.untuned and one.untuned.relative else None),
            (DEFAULTS, one.default_drop),
            ("median program", one.median_us / one.best.us - 1 if one.programs > 2 else None),
        )
        if drop is not None
    ]
    if not rows:
        return None
    medians = {
        name: statistics.median(row["relative"] for row in rows if row["choice"] == name)
        for name in dict.fromkeys(row["choice"] for row in rows)
    }
    x = quantity(
        "relative",
        f"{problems[0].provenance} time / best time",
        scale={**RATIOS["scale"], "domainMin": 1},
        axis=RATIOS["axis"],
    )
    y = word("choice", None, axis={"labelLimit": 140}) | {"sort": [*COSTS, "median program"]}
    dots = {
        "mark": {"type": "circle", "size": 55, "opacity": 0.5, "color": BLUE},
        "encoding": {
            "x": x,
            "y": y,
            "yOffset": {"field": "jitter", "type": "quantitative", "scale": {"domain": [-0.6, 1.6]}},
            "tooltip": tips(
                choice="instead of the best",
                loss="takes longer by",
                problem="problem",
                us="best, µs",
                best="best schedule",
            ),
        },
    }
    middle = {
        "data": {"values": [{"choice": name, "relative": at, "said": change(at - 1)} for name, at in medians.items()]}
    }
    ticks = {
        **middle,
        "mark": {"type": "tick", "thickness": 3, "size": 36, "color": RED},
        "encoding": {"x": x, "y": y, "tooltip": tips(choice="instead of the best", said="median")},
    }
    text = {
        **middle,
        "mark": {"type": "text", "dy": -25, "fontSize": 12, "fontWeight": "bold", "color": RED},
        "encoding": {"x": x, "y": y, "text": {"field": "said", "type": "nominal"}},
    }
    return titled(
        chart(rows, {"layer": [dots, ticks, text], "width": "container"}, height=62 * len(medians)),
        "What another choice costs",
        source_of_problems(report, problems),
    )


def heat_map(first: str | None, second: str | None) -> Spec:
    """A square for each two values of two knobs, coloured by its best time. What is served is outlined, and ties are dashed."""
    bare = {"domain": False, "ticks": False, "labelPadding": 5}  # lines of axes would cut outlines
    encoding: Spec = {
        "x": {"field": "columns", "type": "ordinal", "title": second, "axis": {"labelAngle": 0, **bare}},
        "y": {"field": "rows", "type": "ordinal", "title": first, "sort": "descending", "axis": bare},
        "tooltip": tips(
            said="time / best",
            us="µs",
            programs="programs tried",
            mark="this is",
            differs="its best differs from what is served in",
        ),
    }
    outline: Spec = {"type": "rect", "filled": False, "stroke": RED, "strokeWidth": 3}
    return {
        "layer": [
            {
                "mark": {"type": "rect"},
                "encoding": {**encoding, "color": quantity("relative", "time / best", scale=COST)},
            },
            {
                "mark": {**outline, "strokeDash": [4, 3]},
                "encoding": encoding,
                "transform": [{"filter": "datum.mark == 'tie'"}],
            },
            {"mark": outline, "encoding": encoding, "transform": [{"filter": "datum.mark && datum.mark != 'tie'"}]},
            {
                "mark": {"type": "text", "fontSize": 11},
                "encoding": encoding
                | {
                    "text": {"field": "said", "type": "nominal"},
                    "color": {"condition": {"test": "datum.relative > 1.9", "value": "white"}, "value": "black"},
                },
            },
        ]
    }


ADVICE = {
    "choose": ("choose it for each problem", ORANGE),
    "leave": ("leave it", BLUE),
    "same": ("no difference that matters", BLUE),
    "few": ("compared for too few problems", "#888888"),
    "unclear": ("no value known to be good for all", "#888888"),
    "untried": ("untried", "#888888"),
}


def knobs(report: Report, problems: Sequence[ProblemReport]) -> Spec | None:
    """What each value of a knob costs over several problems, from matched pairs."""
    rows = [
        row | {"advice": ADVICE[verdict.advice][0]}
        for verdict in joined_effects(problems)
        if verdict.knob not in report.tile_knobs
        for row in knob_rows(verdict.effects)
    ]
    if not rows:
        return None
    words = dict(ADVICE.values())
    shown = [advice for advice in words if any(row["advice"] == advice for row in rows)]
    colour = word(
        "advice",
        "this knob",
        scale={"domain": shown, "range": [words[each] for each in shown]},
        legend={"orient": "bottom", "labelLimit": 320},
    )
    spec = effects_chart(f"{problems[0].provenance} time / time with the other value", colour)
    return titled(
        chart(rows, {**spec, "width": "container"}, height=17 * len(rows)),
        "What each value of a knob costs, over all problems",
        source_of_problems(report, problems),
    )


def effects_chart(title: str, colour: Spec) -> Spec:
    """A line for each change of a knob: its mean effect with its 95% interval or the range of estimates, the percentage at its
    right.
    """
    x = quantity("relative", title, scale={**RATIOS["scale"], "padding": 40}, axis=RATIOS["axis"])
    y = word("change", None, axis={"labelLimit": 260, "labelFontSize": 10.5})
    hover = tips(change="knob", said="changes the time by", between="time over time, from", pairs="matched pairs")
    return {
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.6}, "encoding": {"x": {"datum": 1}}},
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y, "color": colour},
            },
            {
                "mark": {"type": "circle", "size": 55, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": colour, "tooltip": hover},
            },
            *(
                {
                    "transform": [{"filter": f"datum.high {sign} 1"}],
                    "mark": {"type": "text", "align": align, "dx": away, "fontSize": 9.5},
                    "encoding": {"x": x | {"field": end}, "y": y, "text": {"field": "said", "type": "nominal"}},
                }
                for sign, end, align, away in ((">=", "high", "left", 5), ("<", "low", "right", -5))
            ),
        ]
    }


def rates(reports: Sequence[Report]) -> Spec | None:
    """The best rate of every problem over its size, with a panel for each group; several archs in colours."""
    rows: list[dict[str, Any]] = [
        {
            "group": report.axes.describe_shared(one.problem) or report.kernel,
            "source": f"{one.device_name or report.arch}, {section.provenance}",
            "size": one.size,
            "rate": round(one.best.rate, 1),
            "unit": unit_of(one.problem),
            "problem": str(one.problem),
            "us": round(one.best.us, 2),
            "schedule": one.best.schedule.short(),
        }
        for report in reports
        for section in (report.measured, report.modelled)
        for one in section.problems
        if one.best.rate and one.accum_mode == "fp32"
    ]
    if not rows:
        return None
    unit = Counter(row["unit"] for row in rows).most_common(1)[0][0]
    rows = [row for row in rows if row["unit"] == unit]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    groups = Counter((row["group"], row["source"]) for row in rows)
    least = min(LEAST_OF_GROUP, max(groups.values()))
    if len(reports) > 1:
        known = Counter(problem for problem, _ in {(row["problem"], row["source"]) for row in rows})
        rows = [row for row in rows if known[row["problem"]] > 1]
    else:
        rows = [row for row in rows if groups[row["group"], row["source"]] >= least]
    if not rows:
        return None
    ordered = sorted({str(row["group"]) for row in rows}, key=_by_numbers)
    axes = reports[0].axes
    dots = {
        "mark": {"type": "point", "filled": True, "size": 45, "opacity": 0.7},
        "width": 190,
        "height": 120,
        "encoding": {
            "x": quantity("size", axes.swept_title, scale=BINARY, axis=SIZES),
            "y": quantity(
                "rate", unit, axis={"tickCount": 4}, **({"scale": {"type": "log"}} if len(sources) > 1 else {})
            ),
            "color": word(
                "source",
                None,
                scale={"range": [BLUE, ORANGE, GREEN, RED]},
                legend={"orient": "bottom"} if len(sources) > 1 else None,
            ),
            "shape": word("source", None, legend={"orient": "bottom"} if len(sources) > 1 else None),
            "tooltip": tips(problem="problem", source="source", rate=unit, us="µs", schedule="schedule"),
        },
    }
    return titled(
        chart(rows, {"facet": word("group", None) | {"sort": ordered}, "columns": 4, "spec": dots}),
        "Rates of the best schedules",
        "; ".join(sources),
    )


def _by_numbers(text: str) -> list[tuple[int, str]]:
    """What sorts texts by the numbers in them: `D=64` before `D=128`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]+)", text)]


def regimes(report: Report) -> Spec | None:
    """What the winner of one regime costs in the other."""
    rows = [
        {
            "way": way,
            "loss": loss,
            "said": change(loss),
            "sure": "yes" if sure else "no",
            "problem": str(one.problem),
            "programs": one.programs,
        }
        for one in report.regimes
        for way, loss, sure in (
            ("burst winner at the power cap", one.burst_loss, one.burst_loss_distinct),
            ("sustained winner in a burst", one.sustained_loss, one.sustained_loss_distinct),
        )
    ]
    if not rows:
        return None
    dots = {
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {
            "x": quantity("loss", "how much longer it takes than that regime's own winner", axis={"format": "%"}),
            "y": word("problem", None, axis={"labelLimit": 240}),
            "color": word("way", None, scale={"range": [BLUE, ORANGE]}, legend={"orient": "bottom", "columns": 1}),
            "shape": word("sure", "intervals apart", legend={"orient": "bottom"}),
            "tooltip": tips(
                problem="problem",
                way="served",
                said="takes longer by",
                sure="intervals apart",
                programs="programs in both",
            ),
        },
    }
    devices = ", ".join(sorted({one.device_name for one in report.regimes}))
    return titled(
        chart(rows, {**dots, "width": "container"}, height=19 * len(report.regimes)),
        "Burst against sustained",
        f"measured on {devices}",
    )


def ceilings_of(report: Report, one: ProblemReport) -> dict[str, tuple[float, float]]:
    """The ceilings of a GPU: what they are -> (TFLOP/s, GB/s). Those computed for it come first, then the highest measured."""
    if report.arch not in ARCHS:
        return {}
    spec = arch_spec(report.arch, one.device_name)
    clocks = [
        each.sm_clock_mhz[1] for each in report.conditions if each.sm_clock_mhz and each.device.name == one.device_name
    ]
    ghz = max(clocks) / 1e3 if clocks else spec.clock_ghz
    per_cycle = spec.tensor_flops * tensor_rate(one.problem)
    peak = per_cycle * spec.sm_count * ghz / 1e3
    rates = f"{spec.sm_count} SMs x {per_cycle:g} FLOP x {ghz:.2f} GHz; {spec.dram_gbps:.0f} GB/s"
    found = {f"computed: {rates}": (peak, spec.dram_gbps)}
    measured = {each.unit: each for each in report.ceilings if each.device_name == one.device_name}
    if one.device_name and len(measured) == 2:
        flops, memory = measured["TFLOP/s"], measured["GB/s"]
        found[f"measured: {flops}; {memory}"] = (flops.rate, memory.rate)
    return found


def roofs(report: Report, one: ProblemReport) -> list[dict[str, Any]]:
    """The ceilings of a problem's GPU over arithmetic intensity, as lines."""
    known = [each.problem for each in report.problems]
    intensities = [each.flops / each.min_bytes for each in known if unit_of(each) == "TFLOP/s" and each.min_bytes]
    if not intensities:
        return []
    low, high = min(intensities) / 2, max(intensities) * 2
    return [
        {"intensity": at, "rate": min(flops, at * gbps / 1e3), "said": said, "ceiling": said.partition(":")[0]}
        for said, (flops, gbps) in ceilings_of(report, one).items()
        for at in sorted({low, high, min(max(flops * 1e3 / gbps, low), high)})
    ]


def share_of_ceiling(report: Report, one: ProblemReport) -> str:
    """How much of the highest rate that its GPU allows the best schedule reaches, in a sentence; empty where it is not known."""
    ceilings = ceilings_of(report, one)
    if not ceilings or unit_of(one.problem) != "TFLOP/s" or not one.problem.min_bytes:
        return ""
    said, (flops, gbps) = list(ceilings.items())[-1]
    roof = min(flops, one.problem.flops / one.problem.min_bytes * gbps / 1e3)
    return f"The best schedule reaches {one.best.rate / roof * 100:.0f}% of the ceiling {said}."


KINDS = {"domain": [SERVED, DEFAULTS, UNTUNED], "range": [GREEN, RED, ORANGE]}
"""The colours of marks."""
COSTS = {DEFAULTS: RED, UNTUNED: ORANGE, "second best tile": BLUE}
"""The lines of the curve of costs, and their colours."""


def views(reports: Sequence[Report]) -> list[View]:
    """The views of one problem, those of the first screen first."""
    report = reports[0]
    knobs = report.tile_knobs or ("", "")
    size = report.axes.swept_title
    dashes = {"measured": [1, 0], "computed": [4, 4]}
    lines = [each for each in dashes if each == "computed" or any(report.measured.problems for report in reports)]
    relative = quantity("relative", "time / best time", scale=RATIOS["scale"], axis=RATIOS["axis"])
    grey = {"condition": {"test": "datum.slower", "value": RED}, "value": "#888888"}
    kind = word("kind", None, scale=KINDS, legend=None)
    named = named_tile(knobs)
    curve = {
        "x": quantity("size", size, scale=BINARY, axis={**SIZES, **({"labelPadding": 17} if named else {})}),
        "y": {**relative, "scale": {**RATIOS["scale"], "domainMin": 1}, "title": "time / best time"},
        "color": word(
            "what", None, scale={"domain": [*COSTS], "range": [*COSTS.values()]}, legend={"orient": "bottom"}
        ),
    }
    hover = tips(problem="problem", what="choice", relative="time / best time", tile="tile" if named else "schedule")
    return [
        View(
            name="tile-map",
            heading="Which tile is best" if named else f"{' and '.join(knobs)} together",
            caption=f"Each square is one value of {' and '.join(knobs)} with its best schedule over all other knobs; "
            "1.10 takes 10% longer than the best. Outlined: what is served; dashed, if any: what cannot be told apart from it. "
            "A question mark: too few programs of this square were tried to judge it.",
            spec={**heat_map(*knobs), "width": "container", "height": {"step": 40}, "data": {"name": "tiles"}},
            main="tiles",
        ),
        View(
            name="curve",
            heading=f"Served tile, and what other choices cost, over {size}"
            if named
            else f"What other choices cost, over {size}",
            caption="Each point is the mean over the problems of one size, which differ from this one in sizes alone; the "
            "vertical line is this problem. Where a point is missing, that choice has no time."
            + (
                " Each size has its tile below the axis: what is served, or the fastest where that has no time."
                if named
                else ""
            ),
            spec={
                "width": "container",
                "height": 190,
                "data": {"name": "curve"},
                "layer": [
                    {
                        "data": {"name": "here"},
                        "mark": {"type": "rule", "strokeWidth": 6, "opacity": 0.15},
                        "encoding": {"x": {"field": "size", "type": "quantitative"}},
                    },
                    {
                        "mark": {"type": "line", "strokeWidth": 1.5},
                        "encoding": {**curve, "y": {**curve["y"], "aggregate": "mean"}},
                    },
                    {
                        "mark": {"type": "point", "filled": True, "size": 40, "opacity": 0.8},
                        "encoding": {**curve, "tooltip": hover},
                    },
                    *(
                        [
                            {
                                "transform": [
                                    {
                                        "aggregate": [{"op": "argmin", "field": "relative", "as": "first"}],
                                        "groupby": ["size"],
                                    },
                                    {"calculate": "datum.first.best", "as": "best"},
                                ],
                                "mark": {"type": "text", "fontSize": 10, "dy": 11},
                                "encoding": {
                                    "x": {"field": "size", "type": "quantitative"},
                                    "y": {"datum": 1},
                                    "text": {"field": "best", "type": "nominal"},
                                },
                            }
                        ]
                        if named
                        else []
                    ),
                ],
            },
            main="curve",
        ),
        View(
            name="knob-effects",
            heading="What another value of a knob costs",
            caption="Each line is the mean over pairs of programs that differ in this knob alone, with its 95% interval (of "
            "estimates: their range): how much longer they take than with the best schedule's value. Orange is surely slower; of "
            "estimates, by more than the model's error."
            + (" The tile's knobs are in the map above." if report.tile_knobs else ""),
            spec={
                **effects_chart("time / time with the best schedule's value", grey),
                "width": "container",
                "height": {"step": 17},
                "data": {"name": "effects"},
            },
            main="effects",
            tall=True,
        ),
        View(
            name="pairs",
            heading="Two knobs together",
            caption="As the map of tiles, for the two knobs that depend most on each other here, or for two that you choose. A "
            f"question mark: fewer than {FEWEST_PROGRAMS} programs were tried.",
            spec={**heat_map(None, None), "width": "container", "height": {"step": 34}, "data": {"name": "pairs"}},
            main="pairs",
        ),
        View(
            name="programs",
            heading="How many programs are good enough",
            caption=f"Bars count the programs tried, by their time over the best time; all slower than "
            f"{SCALE_END:g} times are in the last bar or at its edge.",
            spec={
                "width": "container",
                "height": 190,
                "layer": [
                    {
                        "data": {"name": "bars"},
                        "mark": {"type": "rect", "color": "#9aa7b5"},
                        "encoding": {
                            "x": quantity("start", "time / best time", scale={**RATIOS["scale"]}, axis=RATIOS["axis"]),
                            "x2": {"field": "end"},
                            "y": quantity("programs", "programs"),
                            "y2": {"datum": 0},
                            "tooltip": tips(start="from", end="to", programs="programs", so_far="this fast or faster"),
                        },
                    },
                    {
                        "data": {"name": "marks"},
                        "mark": {"type": "rule", "strokeWidth": 2},
                        "encoding": {
                            "x": {"field": "relative", "type": "quantitative"},
                            "color": kind,
                            "tooltip": tips(what="time / best", us="µs"),
                        },
                    },
                    {
                        "data": {"name": "marks"},
                        "mark": {
                            "type": "text",
                            "align": {"expr": "datum.relative > 2 ? 'right' : 'left'"},
                            "dx": {"expr": "datum.relative > 2 ? -5 : 5"},
                            "fontSize": 11,
                        },
                        "encoding": {
                            "x": {"field": "relative", "type": "quantitative"},
                            "y": {"field": "height", "type": "quantitative", "scale": None, "axis": None},
                            "text": {"field": "what", "type": "nominal"},
                        },
                    },
                ],
            },
            main="bars",
        ),
        View(
            name="resources",
            heading="Registers, spills and occupancy against time",
            caption="Each dot is a program; a triangle spills registers to memory. What is served has a "
            "thick ring, what cannot be told apart from it a thin one.",
            spec={
                "width": "container",
                "height": 220,
                "data": {"name": "programs"},
                "transform": [
                    {"filter": "datum.registers != null"},
                    {"calculate": "datum.us / datum.best_us", "as": "relative"},
                    {"calculate": f"min(datum.relative, {SCALE_END})", "as": "drawn"},
                ],
                "layer": [
                    {
                        "mark": {"type": "point", "filled": True, "size": 40, "opacity": 0.6},
                        "encoding": {
                            "x": quantity(
                                "registers", "registers per thread", scale={"zero": False}, axis={"tickCount": 6}
                            ),
                            "y": {**relative, "field": "drawn"},
                            "color": {
                                "field": "blocks",
                                "type": "ordinal",
                                "title": "blocks per SM",
                                "scale": {"scheme": "viridis"},
                                "legend": {"orient": "bottom"},
                            },
                            "shape": {
                                "condition": {"test": "datum.spilled > 0", "value": "triangle-up"},
                                "value": "circle",
                            },
                            "tooltip": tips(
                                us="µs",
                                relative="time / best",
                                registers="registers",
                                spilled="bytes spilled",
                                blocks="blocks per SM",
                                mark="this is",
                                differs="differs from what is served in",
                            ),
                        },
                    },
                    {
                        "transform": [{"filter": "datum.mark"}],
                        "mark": {"type": "point", "size": 160, "color": RED},
                        "encoding": {
                            "x": quantity("registers", ""),
                            "y": {"field": "drawn", "type": "quantitative"},
                            "strokeWidth": {"condition": {"test": "datum.mark == 'tie'", "value": 1}, "value": 3},
                        },
                    },
                ],
            },
            main="resources",
        ),
        View(
            name="roofline",
            heading="How close it comes to the GPU's limits",
            caption="Grey lines are the highest rates that memory (slanted) and arithmetic (flat) allow: "
            "computed from the GPU's rates, or the "
            "highest that any kernel was measured at.",
            spec={
                "width": "container",
                "height": 220,
                "layer": [
                    {
                        "data": {"name": "roofs"},
                        "mark": {"type": "line", "strokeWidth": 2, "color": "#888888"},
                        "encoding": {
                            "x": quantity(
                                "intensity",
                                "FLOP per byte of input and output",
                                scale={"type": "log", "nice": False},
                                axis={"format": "~s", "tickCount": 6},
                            ),
                            "y": quantity(
                                "rate", "TFLOP/s", scale={"type": "log"}, axis={"format": "~s", "tickCount": 5}
                            ),
                            "detail": {"field": "said", "type": "nominal"},
                            "strokeDash": word(
                                "ceiling",
                                "ceiling",
                                scale={"domain": lines, "range": [dashes[each] for each in lines]},
                                legend={"orient": "bottom"},
                            ),
                            "tooltip": tips(said="ceiling"),
                        },
                    },
                    {
                        "data": {"name": "roofline"},
                        "mark": {"type": "point", "filled": True, "size": 110},
                        "encoding": {
                            "x": {"field": "intensity", "type": "quantitative"},
                            "y": {"field": "rate", "type": "quantitative"},
                            "color": word(
                                "kind", None, scale=KINDS, legend={"orient": "bottom", "values": KINDS["domain"][:2]}
                            ),
                            "tooltip": tips(kind="schedule", rate="TFLOP/s", us="µs"),
                        },
                    },
                ],
            },
            main="roofline",
        ),
        View(
            name="races",
            heading="Other implementations, timed in turn with ours",
            caption="Each line is one race: green is our schedule's time in it, blue the other's, and the number "
            "how many times as long "
            "the other takes, the median over the rounds. Times of two races are never mixed.",
            spec={
                "width": "container",
                "height": {"step": 30},
                "data": {"name": "races"},
                "encoding": {
                    "y": word("rival", None, axis={"labelLimit": 190}),
                    "tooltip": tips(
                        rival="other implementation",
                        version="version",
                        us="its µs",
                        ours_us="our µs in the same run",
                        interval="its time / ours, 95% interval",
                        schedule="our schedule in it",
                        day="day",
                    ),
                },
                "layer": [
                    {
                        "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6},
                        "encoding": {"x": quantity("us", "µs", scale={"zero": False}), "x2": {"field": "ours_us"}},
                    },
                    *(
                        {
                            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1, "color": colour},
                            "encoding": {"x": {"field": field, "type": "quantitative"}},
                        }
                        for field, colour in (("us", BLUE), ("ours_us", GREEN))
                    ),
                    {
                        "mark": {"type": "text", "dy": -10, "fontSize": 10.5},
                        "encoding": {
                            "x": {"field": "us", "type": "quantitative"},
                            "text": {"field": "said", "type": "nominal"},
                        },
                    },
                ],
            },
            main="races",
        ),
        View(
            name="search",
            heading="How the search went",
            caption="The best time so far, of the first times of the newest run, against the number of programs measured.",
            spec={
                "width": "container",
                "height": 190,
                "data": {"name": "trace"},
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2, "color": BLUE},
                "encoding": {
                    "x": quantity("measured", "programs measured"),
                    "y": quantity(
                        "relative", "best so far / best", scale={"type": "log", "nice": False}, axis=RATIOS["axis"]
                    ),
                    "tooltip": tips(measured="programs measured", relative="best so far / best"),
                },
            },
            main="trace",
        ),
    ]


def source_of_problems(report: Report, problems: Sequence[ProblemReport]) -> str:
    """Where the times of problems come from, for the titles of pictures."""
    days = sorted(f"{one.taken:%Y-%m-%d}" for one in problems if one.taken)
    where = list(dict.fromkeys(source_of(report, replace(one, taken=None)) for one in problems))
    when = f", {' to '.join(dict.fromkeys([days[0], days[-1]]))}" if days else ""
    return f"{report.kernel}, {plural(len(problems), 'problem')}, {'; '.join(where)}{when}"
