"""Draws the results of the replayed searches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docs.studies.search.scores import DEPTHS, Summary
from tiledsched.core.errors import ConfigError
from tiledsched.core.extras import installing
from tiledsched.core.files import write_whole
from tiledsched.report.document import as_png, as_svg
from tiledsched.report.vega import BLUE, RED, Spec, chart, quantity, word

OURS = "tiledsched-"


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Two panels: measurements to come within 1% of the best, with intervals, and mean regret after 10, 25, 50 and 100.

    Raises:
        ConfigError: vl-convert is not installed, the ending is neither .png nor .svg, or the file cannot be written.
    """
    drawing = {".png": as_png, ".svg": as_svg}.get(path.suffix)
    if drawing is None:
        raise ConfigError(f"cannot draw {path}: name a file that ends in .png or .svg")
    try:
        drawn = drawing(figure(summaries))
    except ImportError as error:
        raise ConfigError(f"a figure needs vl-convert-python; run: {installing('report')}") from error
    try:
        write_whole(path, drawn)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; give another path") from error


def figure(summaries: Sequence[Summary]) -> Spec:
    """The figure in Vega-Lite."""
    found = [line for line in summaries if line.measurements_to_1pct is not None]
    reached, regrets = [], []
    for line in found:
        who = {"sampler": line.sampler, "ours": line.sampler.startswith(OURS)}
        middle = line.measurements_to_1pct or 0.0
        low, high = (middle if end is None else end for end in line.measurements_to_1pct_interval)
        reached.append({**who, "middle": middle, "low": low, "high": high, "said": f"{middle:g}"})
        regrets += [
            {**who, "depth": depth, "regret": max(100.0 * getattr(line, f"regret_{depth}"), 0.01)} for depth in DEPTHS
        ]
    colour = {"condition": {"test": "datum.ours", "value": RED}, "value": BLUE}
    y = word("sampler", None, axis={"labelLimit": 240})
    title = ["distinct programs measured to come within 1% of the best", "(median; line: 95% bootstrap interval)"]
    left = [
        {
            "mark": {"type": "bar", "opacity": 0.8},
            "encoding": {"x": {"field": "middle", "type": "quantitative", "title": title}, "y": y, "color": colour},
        },
        {"mark": "rule", "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}, "y": y}},
        {
            "mark": {"type": "text", "align": "left", "dx": 4},
            "encoding": {"x": {"field": "high", "type": "quantitative"}, "y": y, "text": {"field": "said"}},
        },
    ]
    right = {
        "mark": {"type": "line", "opacity": 0.7},
        "encoding": {
            "x": quantity("depth", "distinct programs measured"),
            "y": quantity("regret", "mean regret, % (0.01 and below drawn at 0.01)", scale={"type": "log"}),
            "color": colour,
            "detail": {"field": "sampler"},
        },
    }
    height = 18 * max(1, len(found))
    return {
        "title": f"red: {OURS}*, blue: all others",
        "hconcat": [
            chart(reached, {"layer": left}, width=420, height=height),
            chart(regrets, right, width=300, height=height),
        ],
    }
