"""The bench as a picture, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from tiledsched.errors import ConfigError
from tiledsched.files import write_whole
from tiledsched.studies.search.scores import DEPTHS, Summary

OURS = "tiledsched-"


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Two panels: measurements to come within 1% of the best, with intervals, and mean regret after 10, 25, 50 and 100.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib.figure
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError("a figure needs matplotlib; pip install 'tiledsched[report]'") from error
    figure = matplotlib.figure.Figure(figsize=(11.0, 0.6 + 0.28 * len(summaries)))
    FigureCanvasAgg(figure)  # no pyplot: nothing global, no display
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    shown = [line for line in summaries if line.measurements_to_1pct is not None][::-1]
    for row, line in enumerate(shown):
        colour = "#d62728" if line.sampler.startswith(OURS) else "#4c72b0"
        middle = line.measurements_to_1pct or 0.0
        low, high = (end if end is not None else middle for end in line.measurements_to_1pct_interval)
        left.barh(row, middle, color=colour, alpha=0.8)
        left.plot([low, high], [row, row], color="black", linewidth=1.2)
        left.text(max(middle, high) + 2, row, f"{middle:g}", va="center", fontsize=8)
        regrets = [100.0 * getattr(line, f"regret_{depth}") for depth in DEPTHS]
        right.plot(DEPTHS, [max(value, 0.01) for value in regrets], color=colour, linewidth=1.2,
                   alpha=0.9 if colour == "#d62728" else 0.45)  # fmt: skip
    left.set_yticks(range(len(shown)), [line.sampler for line in shown], fontsize=8)
    left.set_xlabel("distinct programs measured to come within 1% of the best\n(median; line: 95% bootstrap interval)")
    right.set_yscale("log")
    right.set_xlabel("distinct programs measured")
    right.set_ylabel("mean regret, % (0.01 and below drawn at 0.01)", fontsize=8)
    right.set_title(f"red: {OURS}*, blue: all others", fontsize=9)
    figure.tight_layout()
    try:
        drawn = io.BytesIO()
        figure.savefig(
            drawn,
            format=path.suffix[1:] or "png",
            dpi=110,
            metadata={"Software": None} if path.suffix == ".png" else None,
        )
        write_whole(path, drawn.getvalue())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}; give another path") from error
