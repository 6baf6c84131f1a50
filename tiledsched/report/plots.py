"""Heat maps of tile sizes, drawn with matplotlib where it is installed."""

from __future__ import annotations

import io
import re

from tiledsched.report.records import MODELLED, ProblemReport, Report, Section

SCALE_END = 3.0
"""Tiles slower than this many times the best share one colour: otherwise a single bad tile would grey out the rest."""


def file_name(report: ProblemReport) -> str:
    """`heatmap_measured_NVIDIA-H200_B4-H32-S4096-D64-float16.png`: unique in a report."""
    parts = [report.provenance, report.device_name, str(report.problem).replace("=", "")]
    if report.accum_mode != "fp32":
        parts.append(f"accum {report.accum_mode}")
    return "_".join(["heatmap", *(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts if part)]) + ".png"


def title(report: ProblemReport, arch: str) -> str:
    """`B=4 H=32 S=4096 D=64 float16 on NVIDIA H200 (sm_90), measured`."""
    accum = "" if report.accum_mode == "fp32" else f", {report.accum_mode} accumulators"
    where = f"{report.device_name} ({arch})" if report.device_name else arch
    return f"{report.problem}{accum} on {where}, {report.provenance}"


def heat_maps(report: Report) -> dict[str, bytes] | None:
    """A PNG for every problem with more than one tile size, by file name; None where matplotlib is missing."""
    try:
        import matplotlib.figure
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        return None
    drawn = {}
    for section in (report.measured, report.modelled):
        for one in with_tiles(section):
            figure = matplotlib.figure.Figure()
            FigureCanvasAgg(figure)  # no pyplot: nothing global, no display
            _draw(figure, one, report)
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
            drawn[file_name(one)] = file.getvalue()
    return drawn


def with_tiles(section: Section) -> list[ProblemReport]:
    """The problems a heat map makes sense for: those with more than one tile size."""
    return [one for one in section.problems if len(one.tiles) > 1]


def _draw(figure: object, one: ProblemReport, report: Report) -> None:
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    assert report.tile_knobs is not None  # else there are no tiles
    firsts = sorted({tile.tile[0] for tile in one.tiles})
    seconds = sorted({tile.tile[1] for tile in one.tiles})
    relative = np.full((len(firsts), len(seconds)), np.nan)
    for tile in one.tiles:
        relative[firsts.index(tile.tile[0]), seconds.index(tile.tile[1])] = tile.relative
    slowest = float(np.nanmax(relative))
    top = min(SCALE_END, max(slowest, 1.05))  # a scale narrower than 5% would paint noise

    figure.set_size_inches(2.4 + 1.35 * len(seconds), 1.7 + 0.95 * len(firsts))  # type: ignore[attr-defined]
    axes = figure.subplots()  # type: ignore[attr-defined]
    colours = colormaps["viridis_r"].with_extremes(bad="#eeeeee")
    shown = axes.imshow(relative, cmap=colours, vmin=1.0, vmax=top, aspect="auto", origin="lower")
    unit = "modelled µs" if one.provenance == MODELLED else "µs"
    for row in range(len(firsts)):
        for column in range(len(seconds)):
            if np.isnan(relative[row, column]):
                axes.text(column, row, f"not\n{one.provenance}", ha="center", va="center", color="#888888", fontsize=8)
    for place, tile in enumerate(one.tiles):
        row, column = firsts.index(tile.tile[0]), seconds.index(tile.tile[1])
        red, green, blue, _ = colours(min(1.0, (tile.relative - 1) / (top - 1)))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        axes.text(column, row, f"{tile.relative:.2f}\n{tile.us:,.1f} {unit}", ha="center", va="center", fontsize=9,
                  color="white" if dark else "black", fontweight="bold" if place == 0 else "normal")  # fmt: skip
        if place == 0:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#d62728", linewidth=3))
    axes.set_xticks(range(len(seconds)), [str(value) for value in seconds])
    axes.set_yticks(range(len(firsts)), [str(value) for value in firsts])
    axes.set_ylabel(report.tile_knobs[0])
    axes.set_xlabel(report.tile_knobs[1])
    axes.set_title(title(one, report.arch).replace(" on ", "\non ", 1), fontsize=10)
    bar = figure.colorbar(shown, ax=axes, extend="max" if slowest > top else "neither")  # type: ignore[attr-defined]
    bar.set_label(f"{one.provenance} time / best tile\n(1 = best, outlined; darker = slower)", fontsize=8)
