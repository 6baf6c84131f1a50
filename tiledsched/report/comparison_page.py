"""The page of `tiledsched compare`: the verdict, a slope chart, and what became slower, faster, or another winner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiledsched.core.files import csv_text
from tiledsched.core.text import code, microseconds, plural
from tiledsched.report.compare import ESTIMATED, Compared, Comparison, KnownTime
from tiledsched.report.comparison_text import (
    conditions_of,
    drift_of,
    excess,
    label_of,
    reasons_of,
    side_facts,
    unlike_in_a,
    verdict_of,
)
from tiledsched.report.document import Block, Chart, Heading, Paragraph, Table, write_document
from tiledsched.report.vega import BLUE, ORANGE, RED, Spec, chart, quantity, tips, titled

GREY = "#878D96"
"""Between the colours of text on a light and on a dark page."""
OPEN_ROWS = 12
"""A longer table is folded."""
MOST_DRAWN = 1_000
"""Lines of the chart and rows of a table, at most: a page of more is too large to open."""
VERDICTS = {
    "slower": ("slower", RED, (1, 0)),
    "faster": ("faster", BLUE, (1, 0)),
    "same": ("the same", GREY, (1, 0)),
    "tied": ("a tie", GREY, (4, 3)),
    ESTIMATED: ("estimated", ORANGE, (2, 2)),
}
"""How each verdict is called and drawn: its name, colour and dashes."""
SECTIONS: dict[str, Callable[[Compared], bool]] = {
    "What became slower": lambda row: row.verdict == "slower",
    "What became faster": lambda row: row.verdict == "faster",
    "What is a tie": lambda row: row.verdict == "tied",
    "What is the same, with another best schedule": lambda row: row.verdict == "same" and row.winner_differs,
    "All problems": lambda row: row.verdict == ESTIMATED,
}
"""The tables of the page, and which problems each of them lists."""
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 5, 10, 20, 50, 100)
FINE_TICKS = (0.98, 0.99, 1.01, 1.02)


def write_comparison(found: Comparison, folder: Path) -> list[Path]:
    """Write the comparison as comparison.html, .md and .csv, with its chart as SVG and PNG; returns all files.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    return write_document(
        folder,
        comparison_blocks(found),
        title=f"{found.b} against {found.a}",
        markdown="comparison.md",
        page="comparison.html",
        more={"comparison.csv": csv_text([row.to_json() for row in found.rows], None if found.rows else ["problem"])},
    )


def comparison_blocks(found: Comparison) -> list[Block]:
    """The page: the verdict first, then what must be known of it, then the chart and the tables."""
    a, b = (_shortened(name) for name in (found.a, found.b))
    blocks: list[Block] = [
        Heading(text=f"{b} against {a}", level=1),
        Paragraph(text=verdict_of(found), warning=found.modelled, answer=not found.modelled),
        *(Paragraph(text=text, warning=True) for text in conditions_of(found)),
        *(Paragraph(text=f"{name}: {text}.", measured="measured" in text) for name, text in side_facts(found)),
    ]
    if drawn := drawn_rows(found):
        blocks.append(Paragraph(text=_caption(found)))
        blocks.append(
            Chart(
                name="comparison",
                spec=slopes(found),
                text=f"Time in B over time in A, of {plural(len(drawn), 'problem')}",
            )
        )
    for title, shown in SECTIONS.items():
        blocks += _times([row for row in found.rows if shown(row)], title, found)
    blocks += _unpaired(found)
    if drift := drift_of(found):
        blocks += [
            Heading(text="How far the two sessions are apart"),
            Paragraph(text=f"{drift[0].upper()}{drift[1:]}."),
        ]
    return blocks


def drawn_rows(found: Comparison) -> list[Compared]:
    """The rows that have a line in the chart: all except those for which nothing was timed anew; of too many, as many of each
    ratio.
    """
    rows = [row for row in found.rows if not row.one_measurement]
    if len(rows) <= MOST_DRAWN:
        return rows
    ordered = sorted(range(len(rows)), key=lambda place: rows[place].ratio)
    taken = {ordered[number * (len(rows) - 1) // (MOST_DRAWN - 1)] for number in range(MOST_DRAWN)}
    return [row for place, row in enumerate(rows) if place in taken]


def _caption(found: Comparison) -> str:
    left = sum(row.one_measurement for row in found.rows)
    others = len(found.rows) - left - len(drawn_rows(found))
    text = (
        "Each line is one problem. It starts at 1, its time in A, and ends at its time in B over that: a line that rises to 1.10 "
        "takes 10% longer in B. "
    )
    if found.modelled:
        return text + "The lines are dotted because at least one of the two times is an estimate."
    if found.noise is not None:
        return text + "The bar at its end is the 95% interval of that ratio, which follows from how much runs differ."
    text += (
        "The bar at its end is the 95% interval of that ratio. "
        f"Slower and faster are differences of more than {found.threshold * 100:g}% whose two 95% intervals are apart; the same "
        "is what surely differs by less; all else is a tie, and dashed. Two schedules tie where A or B timed both and their "
        "intervals overlap, or where a tune could not tell them apart."
    )
    if others:
        text += f" {others:,} more problems are not drawn, evenly spread over the ratios; comparison.csv has all."
    return text + (f" {left} of the problems are not drawn: both sides hold the very same measurement." if left else "")


def slopes(found: Comparison) -> Spec:
    """A line for each problem from 1 to B's time over A's, coloured by verdict."""
    values = [
        {
            "ratio": round(row.ratio, 5),
            "low": round(row.low, 5),
            "high": round(row.high, 5),
            "verdict": VERDICTS[row.verdict][0],
            "problem": label_of(row.b, found),
            "a": _time(row.a),
            "b": _time(row.b),
            "change": _change(row),
            "was": row.a.schedule,
            "now": row.b.schedule if row.winner_differs else "the same schedule",
        }
        for row in reversed(drawn_rows(found))
    ]
    taken = [VERDICTS[each] for each in VERDICTS if any(row.verdict == each for row in drawn_rows(found))]
    names = [name for name, _, _ in taken]
    colour = {
        "field": "verdict",
        "type": "nominal",
        "title": "B is",
        "scale": {"domain": names, "range": [colour for _, colour, _ in taken]},
    }
    dash = {**colour, "scale": {"domain": names, "range": [list(dashes) for _, _, dashes in taken]}}
    hover = tips(problem="problem", change="B takes", a="A", b="B", was="schedule in A", now="schedule in B")
    ends = {
        "values": [0, 1],
        "labelExpr": "datum.value ? 'B' : 'A'",
        "labelFontSize": 13,
        "grid": False,
        "ticks": False,
    }
    x = {"type": "quantitative", "axis": ends, "title": None, "scale": {"domain": [0, 1], "nice": False}}
    y = {
        "axis": {"values": _ticks(values), "format": ".3~g"},
        "scale": {"type": "log", "nice": False, "zero": False, "padding": 12},
    }
    width = {"condition": [{"param": "hovered", "empty": False, "value": 4}], "value": 1.5}
    layers = [
        {
            "mark": {"type": "rule", "opacity": 0.75},
            "params": [{"name": "hovered", "select": {"type": "point", "on": "pointerover", "clear": "pointerout"}}],
            "encoding": {
                "x": {"datum": 1, **x},
                "x2": {"datum": 0},
                "y": quantity("ratio", "time in B / time in A", **y),
                "y2": {"datum": 1},
                "color": colour,
                "strokeDash": dash,
                "strokeWidth": width,
                "tooltip": hover,
            },
        },
        {
            "mark": {"type": "rule", "opacity": 0.4},
            "encoding": {
                "x": {"datum": 1, **x},
                "y": quantity("low", "time in B / time in A", **y),
                "y2": {"field": "high"},
                "color": colour,
            },
        },
        {
            "mark": {"type": "circle", "size": 45, "opacity": 1},
            "encoding": {
                "x": {"datum": 1, **x},
                "y": quantity("ratio", "time in B / time in A", **y),
                "color": colour,
                "tooltip": hover,
            },
        },
    ]
    facts = [f"{side}: {_shortened(text, 90)}" for side, text in side_facts(found)]
    whole = chart(values, {"width": "container", "layer": layers}, height=380)
    return titled(whole, f"Time of {plural(len(values), 'problem')} in B against A", *facts)


def _ticks(values: Sequence[Mapping[str, Any]]) -> list[float]:
    """The ratios named at the axis: fine ones only where the chart shows a narrow range."""
    low, high = min(each["low"] for each in values), max(each["high"] for each in values)
    fine = [*FINE_TICKS] if max(high, 1) / min(low, 1) < 1.15 else []
    return sorted(tick for tick in (1.0, *TICKS, *fine) if tick == 1 or low <= tick <= high)


def _shortened(name: str, most: int = 40) -> str:
    """A name with its middle left out where it is long: of a path, both ends tell it apart."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def _time(one: KnownTime) -> str:
    us, low, high = (microseconds(each) for each in (one.us, one.timing.ci_low_us, one.timing.ci_high_us))
    return f"{us} µs, estimated" if one.modelled else f"{us} µs [{low}, {high}]"


def _change(row: Compared) -> str:
    if row.one_measurement:
        return "the same time"
    return f"{excess(row.ratio)} longer" if row.ratio >= 1 else f"{excess(1 / row.ratio)} less (A takes it longer)"


def _times(rows: Sequence[Compared], title: str, found: Comparison) -> list[Block]:
    """A table of times, or nothing without rows."""
    cells = [
        (label_of(row.b, found), f"{row.ratio:.3f}: {_time(row.a)}, {_time(row.b)}", _schedules(row))
        for row in rows[:MOST_DRAWN]
    ]
    head = ("problem", "B / A, and both times", "best in B, and what A's has in its place")
    heading = Heading(text=f"{title} ({len(rows)})", folded=len(rows) > OPEN_ROWS)
    text = f"These are the first {MOST_DRAWN:,} of {len(rows):,} problems; comparison.csv has all."
    more = [Paragraph(text=text)] if len(rows) > MOST_DRAWN else []
    return [heading, *more, Table(head=head, rows=cells)] if rows else []


def _schedules(row: Compared) -> str:
    """Both best schedules, and how much longer A's takes in B, where B timed it."""
    costs = f", {excess(row.old_winner.us / row.b.us)} longer in B" if row.old_winner else ""
    cost = ", a tie" if row.winner_tied else costs
    return f"{code(row.b.schedule)}; A: {code(unlike_in_a(row)) + cost if row.winner_differs else 'the same'}"


def _unpaired(found: Comparison) -> list[Block]:
    """What only one side knows, by the reason for which it could not be compared."""
    cells = [(side, str(count), f"{why}.", example) for side, count, why, example in reasons_of(found)]
    heading = Heading(text=f"What could not be compared, and why ({len(found.unpaired)})")
    return [heading, Table(head=("only in", "problems", "why", "for example"), rows=cells)] if cells else []
