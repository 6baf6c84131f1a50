"""The charts of the report, except those of rates, which are in :mod:`rate_charts`. Heat maps use viridis, which
colour-blind people can read.
"""

from __future__ import annotations

import itertools
import statistics

from tiledsched.report.axes import show
from tiledsched.report.rate_charts import rates, roofline, said_of_roofs
from tiledsched.report.records import ProblemReport, Report, Section
from tiledsched.report.regret import broad, regret_map
from tiledsched.report.vega import BLUE, GREEN, ORANGE, RED, Spec, chart, quantity, tips, word

SCALE_END = 3.0
"""Times beyond this many times the best share one colour, or are not drawn; otherwise one bad tile would grey out the
rest.
"""
MOST_POINTS = 600
"""Points of a scatter plot, at most; they are drawn evenly from all, so that a page stays below 5 MB."""
MOST_TRACES = 24
"""Searches drawn, at most; the newest are taken."""
GOLDEN = 0.618034
"""Multiples of the golden ratio modulo 1 are spread evenly. They move dots apart that would hide each other."""
SWEPT = 12
"""Knobs whose sweeps are drawn, at most; the most important are taken."""
REGRETS = 40
"""Problems on each side of the regret map, at most."""


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss * 100:+.1f}%"


def costs(section: Section) -> Spec | None:
    """What a choice costs: a dot for each problem, a tick for the geometric mean."""
    rows = []
    for place, one in enumerate(section.problems):
        choices = (
            ("runner-up", one.runner_up_drop),
            ("second best tile", one.tile_drop),
            ("default schedule", one.default_drop),
            ("median program", one.median_drop if one.programs > 2 else None),
        )
        rows += [
            {
                "choice": choice,
                "relative": 1 + drop,
                "loss": _loss(drop),
                "problem": str(one.problem),
                "best": one.best.schedule.short(),
                "us": round(one.best.us, 1),
                "jitter": round(place * GOLDEN % 1, 3),
            }
            for choice, drop in choices
            if drop is not None
        ]
    if not rows:
        return None
    means = {
        choice: statistics.geometric_mean([float(str(row["relative"])) for row in rows if row["choice"] == choice])
        for choice in dict.fromkeys(row["choice"] for row in rows)
    }
    x = quantity(
        "relative",
        f"{section.provenance} time / best time",
        scale={"type": "log", "domainMin": 1, "nice": False},
        axis={"values": [1, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000], "format": "~r"},
    )
    y = word("choice", None, axis={"labelLimit": 200, "labelFontSize": 13})
    dots = {
        "mark": {"type": "circle", "size": 70, "opacity": 0.55, "color": BLUE},
        "encoding": {
            "x": x,
            "y": y,
            "yOffset": {"field": "jitter", "type": "quantitative", "scale": {"domain": [-0.6, 1.6]}},
            "tooltip": tips(
                choice="instead of the best", loss="loses", problem="problem", us="best, us", best="best schedule"
            ),
        },
    }
    mean = {
        "data": {
            "values": [
                {"choice": choice, "relative": value, "said": _loss(value - 1)} for choice, value in means.items()
            ]
        }
    }
    ticks = {
        **mean,
        "mark": {"type": "tick", "thickness": 3, "size": 42, "color": RED},
        "encoding": {"x": x, "y": y, "tooltip": tips(choice="instead of the best", said="geometric mean")},
    }
    text = {
        **mean,
        "mark": {"type": "text", "dy": -28, "fontSize": 13, "fontWeight": "bold", "color": RED},
        "encoding": {"x": x, "y": y, "text": {"field": "said", "type": "nominal"}},
    }
    return chart(rows, {"layer": [dots, ticks, text]}, width=860, height=66 * len(means))


def knobs(section: Section) -> Spec | None:
    """What each value of a knob costs beside the value to leave it at, or the one that most problems prefer."""
    shares = {one.knob: one.share for one in section.shares}
    rows = []
    for verdict in section.knobs:
        known = [(each.value, each.ratio) for each in verdict.effects if each.ratio is not None]
        rows += [
            {
                "knob": verdict.knob,
                "value": show(value),
                "relative": round(ratio, 4),
                "said": _loss(ratio - 1),
                "best": value == verdict.value,
                "share": f"{shares[verdict.knob] * 100:.0f}%" if verdict.knob in shares else "not computed",
            }
            for value, ratio in [(verdict.value, 1.0), *known]
            if known
        ]
    if not rows:
        return None
    x = quantity(
        "relative",
        f"{section.provenance} time / time of the program that has the green value instead, geometric mean",
        scale={"type": "log", "nice": False},
        axis={"values": [1, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100], "format": "~r"},
    )
    y = word("knob", None, axis={"labelLimit": 220, "labelFontSize": 12, "grid": True})
    marks = [
        {
            "mark": {"type": "line", "color": BLUE, "opacity": 0.5},
            "encoding": {"x": x, "y": y, "detail": {"field": "knob"}},
        },
        {
            "mark": {"type": "circle", "size": 80, "opacity": 1},
            "encoding": {
                "x": x,
                "y": y,
                "color": {"condition": {"test": "datum.best", "value": GREEN}, "value": BLUE},
                "tooltip": tips(knob="knob", value="held at", said="costs", share="share of what makes programs good"),
            },
        },
        {
            "mark": {"type": "text", "dy": -9, "fontSize": 9.5},
            "encoding": {"x": x, "y": y, "text": {"field": "value", "type": "nominal"}},
            "transform": [{"filter": "datum.relative > 1.03 || datum.best"}],
        },
    ]
    return chart(rows, {"layer": marks}, width=820, height=28 * len({row["knob"] for row in rows}))


def _explored(section: Section) -> list[ProblemReport]:
    return [one for one in section.problems if len(one.tiles) > 1]


def tiles(section: Section, report: Report) -> Spec | None:
    """Small heat maps on one scale: a panel for each problem, with a square for each tile size."""
    problems = _explored(section)
    if not problems or report.tile_knobs is None:
        return None
    first, second = report.tile_knobs
    several = len({(report.group_text(one), one.size) for one in problems}) < len(problems)
    rows = []
    for one in problems:
        for tile in one.tiles:
            rows.append(
                {
                    "rows": tile.tile[0],
                    "columns": tile.tile[1],
                    "relative": round(min(tile.relative, SCALE_END), 4),
                    "said": f"{tile.relative:.2f}",
                    "us": round(tile.us, 2),
                    "problem": str(one.problem),
                    "tile": tile is one.tiles[0],
                    "panel": str(one.problem) if several else f"{report.axes.swept_title}={one.size}",
                    "group": report.group_text(one),
                    "schedule": tile.schedule.short(),
                }
            )
    encoding = {
        "x": {"field": "columns", "type": "ordinal", "title": second, "axis": {"labelAngle": 0}},
        "y": {"field": "rows", "type": "ordinal", "title": first, "sort": "descending"},
        "color": quantity(
            "relative",
            f"{section.provenance} time / best",
            scale={"scheme": "viridis", "reverse": True, "domain": [1, SCALE_END]},
        ),
        "tooltip": tips(
            problem="problem",
            rows=first,
            columns=second,
            said="time / best tile",
            us=f"{section.provenance} us",
            schedule="its best schedule",
        ),
    }
    layers = [
        {"mark": {"type": "rect"}, "encoding": encoding},
        {
            "mark": {"type": "rect", "filled": False, "stroke": RED, "strokeWidth": 2.5},
            "encoding": encoding | {"color": {"value": RED}},
            "transform": [{"filter": "datum.tile"}],
        },
        {
            "mark": {"type": "text", "fontSize": 9},
            "encoding": encoding
            | {
                "text": {"field": "said", "type": "nominal"},
                "color": {"condition": {"test": "datum.relative > 1.9", "value": "white"}, "value": "black"},
            },
        },
    ]
    size = {"width": {"step": 44}, "height": {"step": 28}}
    if several:
        facet: Spec = {"facet": word("panel", None, header={"labelFontSize": 11}), "columns": 4}
    else:
        facet = {
            "facet": {
                "row": word("group", None, header={"labelAngle": 0, "labelAlign": "left", "labelLimit": 160}),
                "column": {
                    "field": "panel",
                    "type": "nominal",
                    "title": None,
                    "sort": [f"{report.axes.swept_title}={size}" for size in sorted({one.size for one in problems})],
                },
            }
        }
    return chart(
        rows,
        {**facet, "spec": {"layer": layers, **size}, "resolve": {"axis": {"x": "independent", "y": "independent"}}},
    )


def sweeps(section: Section, report: Report) -> Spec | None:
    """For each knob, what its values cost beside the best schedule's value, with a line for each problem."""
    rows = []
    for verdict in section.knobs[:SWEPT]:
        for one in section.problems:
            known = [
                (effect.value, effect.ratio)
                for effect in one.effects
                if effect.knob == verdict.knob and effect.ratio is not None
            ]
            rows += [
                {
                    "knob": verdict.knob,
                    "value": show(value),
                    "order": value if type(value) is int else 0,
                    "relative": round(min(ratio, SCALE_END), 4),
                    "said": _loss(ratio - 1),
                    "problem": str(one.problem),
                    "group": report.group_text(one),
                }
                for value, ratio in [(one.best.schedule[verdict.knob], 1.0), *known]
                if known
            ]
    if not rows:
        return None
    line = {
        "mark": {"type": "line", "point": {"size": 25}, "opacity": 0.65, "strokeWidth": 1.5},
        "encoding": {
            "x": {
                "field": "value",
                "type": "ordinal",
                "title": None,
                "sort": {"field": "order"},
                "axis": {"labelAngle": 0, "labelLimit": 60},
            },
            "y": quantity(
                "relative",
                "time / best",
                scale={"type": "log", "nice": False, "domainMin": 1},
                axis={"values": [1, 1.1, 1.2, 1.5, 2, 3], "format": "~r"},
            ),
            "color": word(
                "group",
                None,
                scale={"scheme": "tableau10"},
                legend={"orient": "bottom", "columns": 3, "labelLimit": 260},
            ),
            "detail": {"field": "problem", "type": "nominal"},
            "tooltip": tips(problem="problem", knob="knob", value="held at", said="costs"),
        },
        "width": 170,
        "height": 110,
    }
    return chart(
        rows,
        {
            "facet": word("knob", None),
            "columns": 4,
            "spec": line,
            "resolve": {"scale": {"x": "independent"}, "axis": {"x": "independent"}},
        },
    )


def spread(section: Section, report: Report) -> Spec | None:
    """The share of all programs that are within a factor of the best time."""
    rows = []
    for one in broad(section.problems):
        times = sorted(timed.relative for timed in one.timed if timed.same_program_as is None)
        steps = {round(each, 2): (place + 1) / len(times) for place, each in enumerate(times) if each <= SCALE_END}
        rows += [
            {
                "relative": at,
                "share": round(share, 4),
                "problem": str(one.problem),
                "group": report.group_text(one),
                "programs": len(times),
            }
            for at, share in steps.items()
        ]
    if not rows:
        return None
    lines = {
        "mark": {"type": "line", "interpolate": "step-after", "opacity": 0.7, "strokeWidth": 1.5},
        "encoding": {
            "x": quantity(
                "relative",
                "time / best",
                scale={"type": "log", "domain": [1, SCALE_END], "nice": False},
                axis={"values": [1, 1.01, 1.05, 1.1, 1.25, 1.5, 2, 3]},
            ),
            "y": quantity("share", "share of the programs", axis={"format": "%"}),
            "color": word("group", None, scale={"scheme": "tableau10"}),
            "detail": {"field": "problem", "type": "nominal"},
            "tooltip": tips(problem="problem", relative="within", share="share", programs="programs"),
        },
    }
    rules = {
        "data": {"values": [{"at": at} for at in (1.01, 1.05, 1.1)]},
        "mark": {"type": "rule", "strokeDash": [4, 3], "opacity": 0.6},
        "encoding": {"x": {"field": "at", "type": "quantitative"}},
    }
    return chart(rows, {"layer": [lines, rules]}, width=700, height=280)


def regret(section: Section, report: Report) -> Spec | None:
    """What it costs to serve the winner of one problem (rows) on another problem (columns)."""
    problems = broad(section.problems)[:REGRETS]
    if len(problems) < 2:
        return None
    rows = [
        {
            "tuned": str(one.tuned),
            "served": str(one.served),
            "loss": None if one.loss is None else round(min(one.loss, 1.0), 4),
            "said": "not timed" if one.loss is None else _loss(one.loss),
        }
        for one in regret_map(problems)
    ]
    order = [str(one.problem) for one in problems]
    squares = {
        "mark": {"type": "rect", "invalid": None},
        "encoding": {
            "x": word("served", "served on", axis={"labelAngle": -60, "labelLimit": 230, "labelFontSize": 9})
            | {"sort": order},
            "y": word("tuned", "winner of", axis={"labelLimit": 230, "labelFontSize": 9}) | {"sort": order},
            "color": {
                "condition": {"test": "datum.loss === null", "value": "#bbbbbb"},
                **quantity(
                    "loss",
                    "loss",
                    scale={"scheme": "viridis", "reverse": True, "domain": [0, 0.5], "clamp": True},
                    legend={"format": "%"},
                ),
            },
            "tooltip": tips(tuned="winner of", served="served on", said="loses"),
        },
    }
    return chart(rows, squares, width=15 * len(order), height=15 * len(order))


def regimes(report: Report) -> Spec | None:
    """What the winner of one regime costs in the other."""
    rows = []
    for one in report.regimes:
        for way, loss, sure in (
            ("burst winner at the power cap", one.burst_loss, one.burst_loss_distinct),
            ("sustained winner in a burst", one.sustained_loss, one.sustained_loss_distinct),
        ):
            rows.append(
                {
                    "way": way,
                    "loss": loss,
                    "said": _loss(loss),
                    "sure": "yes" if sure else "no",
                    "problem": str(one.problem),
                    "programs": one.programs,
                }
            )
    if not rows:
        return None
    dots = {
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {
            "x": quantity("loss", "loss against that regime's own winner", axis={"format": "%"}),
            "y": word("problem", None, axis={"labelLimit": 260}),
            "color": word("way", None, scale={"range": [BLUE, ORANGE]}),
            "shape": word("sure", "intervals apart"),
            "tooltip": tips(
                problem="problem", way="served", said="loses", sure="intervals apart", programs="programs in both"
            ),
        },
    }
    return chart(rows, dots, width=560, height=17 * len(report.regimes))


def trace(section: Section, report: Report) -> Spec | None:
    """The best time found so far over the number of measurements, with a line for each search."""
    searched = [one for one in section.problems if len(one.trace) > 2][:MOST_TRACES]
    rows = [
        {
            "group": report.group_text(one),
            "problem": str(one.problem),
            "measured": place + 1,
            "relative": round(min(so_far, SCALE_END), 4),
            "noise": f"{one.noise * 100:.2f}%",
        }
        for one in searched
        for place, so_far in enumerate(itertools.accumulate(one.trace, min))
    ]
    if not rows:
        return None
    line = {
        "mark": {"type": "line", "interpolate": "step-after", "opacity": 0.7, "strokeWidth": 1.5},
        "encoding": {
            "x": quantity("measured", "programs measured"),
            "y": quantity("relative", "best so far / best", scale={"zero": False, "type": "log"}),
            "color": word("group", None, scale={"scheme": "tableau10"}, legend={"labelLimit": 260}),
            "detail": {"field": "problem", "type": "nominal"},
            "tooltip": tips(
                problem="problem", measured="programs measured", relative="best so far / best", noise="noise floor"
            ),
        },
    }
    floor = statistics.median(1 + one.noise for one in searched)
    rule = {
        "data": {"values": [{"at": floor}]},
        "mark": {"type": "rule", "strokeDash": [4, 3], "color": RED},
        "encoding": {"y": {"field": "at", "type": "quantitative"}},
    }
    return chart(rows, {"layer": [line, rule]}, width=640, height=240)


def resources(section: Section) -> Spec | None:
    """Registers, CTAs per SM and spills of programs over their time."""
    found = [
        (one, timed)
        for one in section.problems
        for timed in one.timed
        if timed.facts and timed.same_program_as is None and timed.relative <= SCALE_END and one.programs > 2
    ]
    step = max(1, -(-len(found) // MOST_POINTS))
    rows = [
        {
            "what": what,
            "value": value,
            "relative": round(timed.relative, 3),
            "problem": str(one.problem),
            "schedule": timed.schedule.short(),
        }
        for one, timed in found[::step]
        if timed.facts
        for what, value in (
            ("registers per thread", timed.facts.registers),
            ("CTAs per SM", timed.facts.ctas_per_sm),
            ("bytes spilled", timed.facts.spill_bytes),
        )
    ]
    if not rows:
        return None
    dots = {
        "mark": {"type": "circle", "size": 18, "opacity": 0.35, "color": BLUE},
        "width": 260,
        "height": 200,
        "encoding": {
            "x": quantity("value", ""),
            "y": quantity("relative", f"{section.provenance} time / best", scale={"zero": False}),
            "tooltip": tips(problem="problem", value="value", relative="time / best", schedule="schedule"),
        },
    }
    return chart(
        rows, {"facet": word("what", None), "columns": 3, "spec": dots, "resolve": {"scale": {"x": "independent"}}}
    )


def of_section(section: Section, report: Report) -> dict[str, tuple[str, str, Spec]]:
    """Chart name -> heading, text and chart, for all charts that have something to show."""
    kind = section.provenance
    wanted = {
        "knobs": (
            "Knobs",
            "What one value of a knob costs beside the green one, in programs that differ in that knob alone.",
            knobs(section),
        ),
        "tiles": (
            "Tiles",
            "Each tile by its best schedule over all other knobs; outlined the best. One scale for all panels, which ends at "
            f"{SCALE_END:g} times the best.",
            tiles(section, report),
        ),
        "sweeps": (
            "Each knob, problem by problem",
            "What one value of a knob costs beside the best schedule's, in programs that differ in that knob alone. A line is "
            "a problem.",
            sweeps(section, report),
        ),
        "spread": (
            "All programs",
            "The share of all programs tried that come within a factor of the best; dashed at 1, 5 and 10%.",
            spread(section, report),
        ),
        "regret": (
            "Regret",
            "What serving the winner of one problem costs on another. Grey: not timed there; `tiledsched tune --candidates FILE` "
            "with the winners in a file times them everywhere.",
            regret(section, report),
        ),
        "trace": (
            "The searches",
            "The best program so far against the number measured, in the order of the newest run. Dashed: the noise floor, "
            "half the 95% interval of the best.",
            trace(section, report),
        ),
        "rates": ("Rates of the best schedules", "A dot is a problem.", rates(section, report)),
        "roofline": ("Roofline", said_of_roofs(section, report), roofline(section, report)),
        "resources": ("Resources and time", "Programs by what their machine code takes.", resources(section)),
    }
    return {
        f"{name}-{kind}": (f"{heading}, {kind}", text, spec)
        for name, (heading, text, spec) in wanted.items()
        if spec is not None
    }
