"""What others measured on the GPU of a report, beside the model's estimates; and where the model is least sure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiledsched.core.device import ARCHS
from tiledsched.core.labels import format_problem
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.report.document import NOTHING, Block, Paragraph, Table
from tiledsched.report.records import PublishedFigure, Report
from tiledsched.serve.rivals import published_figures
from tiledsched.store.records import BuildRecord

MODEL_ERROR = 0.034
"""Mean error of the model's times on a GB10 at lengths from 2048, under the conditions of each publication
(docs/results/blackwell.md). Estimates that lie closer together than this say little about which is faster."""
ModelTimes = Callable[[Problem, list[BuildRecord]], dict[str, float]]


def figures_for(
    kernel: KernelClass,
    arch: str,
    space: SearchSpace | None,
    builds_of: Callable[[Problem], list[BuildRecord]],
    model_times: ModelTimes | None,
) -> tuple[PublishedFigure, ...]:
    """The times that others published for the usual GPU of an arch, each with the model's estimate of the same schedule; of
    another implementation's time, with the estimate of our best.

    Args:
        kernel: what was timed.
        arch: e.g. sm_121.
        space: where the knobs that were not published come from: they stay at their defaults.
        builds_of: the builds that can serve a problem.
        model_times: the model. Without it there are no estimates.
    """
    device = ARCHS[arch].device if arch in ARCHS else ""
    known = published_figures(kernel.name)
    found: Mapping[str, Any] = next((each for name, each in known.items() if f" {name} " in f" {device} "), {})
    figures = []
    for source, values, what, us in found.get("shown", ()):
        problem = problem_from_json(values)
        schedule = space.default(problem).replace(**what) if space is not None and isinstance(what, dict) else None
        builds = [build for build in builds_of(problem) if schedule in (None, build.schedule)]
        times = model_times(problem, builds) if model_times and builds else {}
        best = min(builds, key=lambda build: times.get(build.schedule.id, float("inf")), default=None)
        figures.append(
            PublishedFigure(
                source=source,
                device=device,
                problem=problem,
                what=schedule or Schedule(what) if isinstance(what, dict) else what,
                us=us,
                ours=best.schedule if best else None,
                modelled_us=times.get(best.schedule.id) if best else None,
            )
        )
    return tuple(figures)


def published(report: Report) -> list[Block]:
    """A sentence and a table of what others measured on the report's GPU; nothing where nothing was published."""
    if not report.published:
        return []
    device = report.published[0].device
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
            text=f"These times on an {device} were published by others; none is ours. Beside each stands our estimate: of the "
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
    close = [one for one in report.modelled.problems if len(one.tiles) > 1 and one.tiles[1].relative - 1 < MODEL_ERROR]
    if not close:
        return ""
    first = max(close, key=lambda one: (one.size, one.programs, -one.tiles[1].relative))
    tiles = [f"{'x'.join(map(str, each.tile))}" for each in first.tiles[:2]]
    apart = f"{(first.tiles[1].relative - 1) * 100:.1f}% apart"
    command = shlex.join(
        ["tiledsched", "tune", report.kernel, "--arch", report.arch, "-p", format_problem(first.problem)]
    )
    return (
        f"For {len(close)} of {len(report.modelled.problems)} modelled problems the estimates of the two best tiles lie within "
        f"{MODEL_ERROR * 100:.1f}% of each other, which is the model's mean error where others measured: measure these first. "
        f"For {first.problem} they are {tiles[0]} and {tiles[1]}, {apart}: run `{command}` on a machine with this GPU."
    )


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.4g}"
