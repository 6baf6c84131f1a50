"""The parts that every chart is made of, in Vega-Lite. Nothing is drawn here: see :mod:`document`.

Colours are Okabe and Ito's (2008), which the colour-blind can tell apart. Text and axes have no colour of their own, so that they
follow the page, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Spec = dict[str, Any]
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
BINARY = {"type": "log", "base": 2}
SIZES = {
    "tickCount": 5,
    "labelExpr": "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : datum.value",
}


def chart(
    values: Iterable[dict[str, Any]], layers: Spec, *, width: int | None = None, height: int | None = None
) -> Spec:
    """A chart over rows of data."""
    sized = {key: value for key, value in (("width", width), ("height", height)) if value}
    return {"data": {"values": list(values)}, **sized, **layers}


def quantity(field: str, title: str, **more: Any) -> Spec:
    """A channel that shows numbers."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def word(field: str, title: str | None, **more: Any) -> Spec:
    """A channel that shows words, in the order of the rows."""
    return {"field": field, "type": "nominal", "title": title, "sort": None, **more}


def tips(**titles: str) -> list[Spec]:
    """The fields that a tooltip shows, each with a title."""
    return [{"field": field, "title": title} for field, title in titles.items()]


def titled(spec: Spec, title: str, *lines: str) -> Spec:
    """The chart with a title and smaller lines beneath it, so that a picture of it explains itself.

    The lines say of which problem it is, on which GPU or for which arch, measured or modelled, and when.
    """
    return {
        **spec,
        "title": {"text": title, "subtitle": [line for line in lines if line], "anchor": "start", "offset": 12},
    }
