"""What others measured on the GPU of a report, beside the model's estimates; and where the model is least sure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from tiledsched.core.device import ARCHS, DEVICES, PRODUCTS, arch_spec
from tiledsched.core.labels import format_problem
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.core.resources import spilled
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.report.axes import Axes
from tiledsched.report.document import NOTHING, Block, Paragraph, Table
from tiledsched.report.records import PublishedFigure, PublishedTiles, Report
from tiledsched.store.manifest import published_figures
from tiledsched.store.records import BuildRecord

MODEL_ERROR = 0.034
"""Mean error of the model's times on a GB10 at lengths from 2048, under the conditions of each publication
(docs/results/blackwell.md). Estimates that lie closer together than this say little about which is faster."""


def figures_for(
    kernel: KernelClass,
    arch: str,
    space: SearchSpace | None,
    builds_of: Callable[[Problem, Schedule | None], list[BuildRecord]],
) -> tuple[PublishedFigure, ...]:
    """The times that others published for GPUs of an arch, each with the model's estimate for that GPU: of the same schedule, or,
    where another implementation was timed, of our best.

    Args:
        kernel: what was timed.
        arch: e.g. sm_121.
        space: where the knobs that were not published come from: they stay at their defaults.
        builds_of: the builds that can serve a problem, of one schedule or of all.
    """
    known = published_figures(kernel.name)
    figures = []
    for product in PRODUCTS.get(arch, ()):
        device = next((name for name in DEVICES if name.endswith(product)), ARCHS[arch].device)
        spec = arch_spec(arch, device)
        for source, values, what, us in known.get(product, {}).get("shown", ()):
            problem = problem_from_json(values)
            schedule = space.default(problem).replace(**what) if space is not None and isinstance(what, dict) else None
            estimates = [
                (kernel.cost.model(problem, build.schedule, build.facts, spec), build.schedule)
                for build in builds_of(problem, schedule)
                if build.facts and not (schedule is None and spilled(build.facts.spill_bytes))
            ]
            modelled_us, ours = min(estimates, key=lambda each: each[0], default=(None, None))
            figures.append(
                PublishedFigure(
                    source=source,
                    device=device,
                    problem=problem,
                    what=what if isinstance(what, str) else schedule or Schedule(what),
                    us=us,
                    ours=ours,
                    modelled_us=modelled_us,
                )
            )
    return tuple(figures)


def tiles_for(kernel: KernelClass, axes: Axes) -> tuple[PublishedTiles, ...]:
    """The two best tiles of each problem for which others published them, on whatever GPU."""
    found = []
    for device, known in published_figures(kernel.name).items():
        for source, values, best, best_us, runner_up, runner_up_us in known.get("tiles", ()):
            problem = problem_from_json(values)
            found.append(
                PublishedTiles(
                    source=source,
                    device=device,
                    size=axes.size(problem),
                    shared=axes.shared_values(problem),
                    best=(best[0], best[1]),
                    runner_up=(runner_up[0], runner_up[1]),
                    drop=runner_up_us / best_us - 1,
                )
            )
    return tuple(found)


def published(report: Report) -> list[Block]:
    """A sentence and a table of what others measured on the report's GPU; nothing where nothing was published."""
    if not report.published:
        return []
    devices = " or ".join(dict.fromkeys(each.device for each in report.published))
    rows = [
        (
            each.source,
            str(each.problem),
            f"`{each.what.short()}`" if isinstance(each.what, Schedule) else each.what,
            _us(each.us),
            _us(each.modelled_us) if each.modelled_us else NOTHING,
            f"{(each.modelled_us / each.us - 1) * 100:+.0f}%" if each.modelled_us else NOTHING,
        )
        for each in report.published
    ]
    return [
        Paragraph(
            text=f"These times on the {devices} were published by others; none is ours. Beside each stands our estimate: of the "
            "same schedule, or, where another implementation was timed, of our best. Theirs are of calls in a row and some "
            "hold the host's time; an estimate is of one call after the L2 cache was emptied, at the maker's clock."
        ),
        Table(
            head=("published by", "problem", "what was timed", "their µs", "our estimate, µs", "estimate over theirs"),
            rows=rows,
        ),
        *(Paragraph(text=line) for line in _orders(report.published)),
    ]


def _orders(figures: Sequence[PublishedFigure]) -> list[str]:
    """For each two schedules of one problem that one source timed, how they compare, by its times and by the estimates."""
    lines = []
    for place, one in enumerate(figures):
        for other in figures[place + 1 :]:
            pair = one.what, other.what
            if (one.source, one.problem) != (other.source, other.problem) or not (
                isinstance(pair[0], Schedule) and isinstance(pair[1], Schedule)
            ):
                continue
            slow, fast = (one, other) if one.us > other.us else (other, one)
            names = [f"`{each.what.short()}`" for each in (fast, slow) if isinstance(each.what, Schedule)]
            line = f"{one.source}, {one.problem}: {names[1]} takes {(slow.us / fast.us - 1) * 100:.0f}% longer than {names[0]}"
            if slow.modelled_us and fast.modelled_us:
                line += f"; by our estimate {(slow.modelled_us / fast.modelled_us - 1) * 100:+.0f}%"
            lines.append(f"{line}.")
    return lines


def least_sure(report: Report) -> str:
    """Which modelled problems to measure first, and with which command: those whose two best tiles have estimates that lie
    closer together than the model's mean error. Empty where there is no such problem, or nothing is modelled.
    """
    close = [
        (sum(tile.relative - 1 < MODEL_ERROR for tile in one.tiles), one)
        for one in report.modelled.problems
        if len(one.tiles) > 1 and one.tiles[1].relative - 1 < MODEL_ERROR
    ]
    if not close:
        return ""
    most, first = min(close, key=lambda each: (-each[0], each[1].best.us, len(format_problem(each[1].problem))))
    tiles = " and ".join("x".join(map(str, tile.tile)) for tile in first.tiles[:2])
    command = shlex.join(
        ["tiledsched", "tune", report.kernel, "--arch", report.arch, "-p", format_problem(first.problem)]
    )
    return (
        f"For {len(close)} of {len(report.modelled.problems)} modelled problems the estimates of the two best tiles are within "
        f"{MODEL_ERROR * 100:.1f}% of each other, which is the model's mean error where others measured, so measure these first. "
        f"The least sure is {first.problem}, with {most} tiles that close, the best of them {tiles}: run `{command}` on "
        "a machine with this GPU."
    )


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"
