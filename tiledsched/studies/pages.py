"""What the pages of all studies share: the first line, bars with their values, and what has no time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tiledsched.core.text import joined
from tiledsched.report.document import Block, Heading, Paragraph, Table
from tiledsched.report.vega import Spec, chart


def first_line(devices: Iterable[str], days: Iterable[str], what: str, timed: int) -> Paragraph:
    """The first line of a page: on which GPU and when it was measured, and what; or that nothing was.

    Args:
        devices: names of the GPUs.
        days: when each time was taken, as YYYY-MM-DD; empty where that was not recorded.
        what: what was measured, as the end of a sentence.
        timed: how many times there are.
    """
    if not timed:
        return Paragraph(text="Nothing was measured: every attempt failed, for the reasons below.", warning=True)
    known = sorted(filter(None, days))
    when = ", " + " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""
    return Paragraph(text=f"Measured on {joined(sorted({*devices}))}{when}: {what}.", measured=True)


def untimed(head: Sequence[str], rows: Sequence[Sequence[str]], *, folded: bool) -> list[Block]:
    """A table of what has no time, under its heading; nothing where there are no rows."""
    return [Heading(text="What has no time", folded=folded), Table(head=head, rows=rows)] if rows else []


def labelled_bars(
    rows: list[dict[str, Any]], place: Spec, colour: Spec, hover: list[Spec], height: int, **text: Any
) -> Spec:
    """Bars that run to the right, each with the text in its field `said` at its end.

    Args:
        rows: the data, a row for each bar.
        place: the channels x and y, with their fields.
        colour: the channel of colours.
        hover: the fields of the tooltip.
        height: of the chart, in pixels.
        text: more properties of the texts, such as `fontSize`.
    """
    layers = [
        {"mark": "bar", "encoding": {**place, "color": colour, "tooltip": hover}},
        {
            "mark": {"type": "text", "align": "left", **text},
            "encoding": {**place, "text": {"field": "said", "type": "nominal"}},
        },
    ]
    return chart(rows, {"layer": layers, "width": "container"}, height=height)
