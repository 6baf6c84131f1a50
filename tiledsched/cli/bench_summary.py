"""Sums up the rows of a bench: our kernel against the fastest rival in each cell, and against every method on average."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiledsched.core.groups import grouped, nested
from tiledsched.core.problem import Problem, rate_of, unit_of
from tiledsched.report.document import Table, to_markdown as document_markdown
from tiledsched.rivals.methods import FLASH_4, MATMUL, OURS
from tiledsched.rivals.rows import BenchRow

WORST = 5
"""Cells listed as the worst, at most."""


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """Our kernel and the fastest rival on one problem."""

    problem: Problem
    """The problem."""
    ours_us: float
    """Our time in microseconds."""
    rival_us: float
    """Time of the fastest rival. Rivals are torch's backends and FlashAttention-4, which torch can be set to use."""
    rival_method: str
    """Name of that rival."""
    ratio: float
    """The rival's time over ours: above 1 where ours is faster."""
    ceiling_ratio: float | None
    """Our rate over the matmul's rate; None where the matmul took no part."""
    provenance: str
    """Provenance of our schedule; empty where the row does not say."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **asdict(self),
            "problem": self.problem.to_json(),
            "ours_tflops": self.problem.tflops(self.ours_us),
            "rival_tflops": self.problem.tflops(self.rival_us),
            "ours_gbps": self.problem.gbps(self.ours_us),
        }


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """One method over all cells of a regime."""

    method: str
    """Its name."""
    cells: int
    """Cells where both it and our kernel have a time."""
    without: int
    """Cells where it has no time: it refused, failed or was wrong."""
    ratio: float | None
    """Geometric mean of its time over ours; None without cells."""
    faster: int
    """Cells where it is faster than our kernel."""


@dataclass(frozen=True, kw_only=True)
class RegimeSummary:
    """All cells of one regime."""

    regime: str
    """burst or sustained."""
    cells: tuple[CellSummary, ...]
    """Cells where both our kernel and some rival have a time, in the order of the rows."""
    without: int
    """Cells where one of the two has no time."""
    methods: tuple[MethodSummary, ...]
    """Every method except our kernel and the matmul."""

    @property
    def ratio(self) -> float | None:
        """Geometric mean of the fastest rival's time over ours; None without cells."""
        return geometric_mean([cell.ratio for cell in self.cells])

    @property
    def below(self) -> int:
        """Cells where a rival is faster than ours."""
        return sum(cell.ratio < 1 for cell in self.cells)

    @property
    def elsewhere(self) -> list[CellSummary]:
        """Cells for which no measured entry was served. They say little about the table until they are tuned."""
        return [cell for cell in self.cells if cell.provenance not in ("", "measured")]

    @property
    def worst(self) -> list[CellSummary]:
        """The cells with the least ratio, the worst first."""
        return sorted(self.cells, key=lambda cell: cell.ratio)[:WORST]

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "regime": self.regime,
            "ratio": self.ratio,
            "below": self.below,
            "cells": [cell.to_json() for cell in self.cells],
            "without": self.without,
            "methods": [asdict(method) for method in self.methods],
        }


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """The geometric mean; None of no ratios."""
    return statistics.geometric_mean(ratios) if ratios else None


def summarise(rows: Sequence[BenchRow]) -> list[RegimeSummary]:
    """One summary for each regime, in the order of the rows."""
    return [_regime(regime, of) for regime, of in grouped((row.regime, row) for row in rows).items()]


def _regime(regime: str, rows: Sequence[BenchRow]) -> RegimeSummary:
    by_problem = nested((row.problem, row.method, row) for row in rows)
    cells = [cell for problem, found in by_problem.items() if (cell := _cell(problem, found)) is not None]
    others = dict.fromkeys(row.method for row in rows if row.method not in (OURS, MATMUL))
    return RegimeSummary(
        regime=regime,
        cells=tuple(cells),
        without=len(by_problem) - len(cells),
        methods=tuple(_method(method, list(by_problem.values())) for method in others),
    )


def _cell(problem: Problem, found: dict[str, BenchRow]) -> CellSummary | None:
    ours = found.get(OURS)
    rivals = [row for name, row in found.items() if (name.startswith("torch") or name == FLASH_4) and row.median_us]
    if ours is None or not ours.median_us or not rivals:
        return None
    best = min(rivals, key=lambda row: row.median_us or math.inf)
    assert best.median_us
    return CellSummary(
        problem=problem,
        ours_us=ours.median_us,
        rival_us=best.median_us,
        rival_method=best.method,
        ratio=best.median_us / ours.median_us,
        ceiling_ratio=ours.ceiling_ratio,
        provenance=ours.provenance,
    )


def _method(method: str, found: Sequence[dict[str, BenchRow]]) -> MethodSummary:
    theirs = [(rows[method].median_us, rows.get(OURS)) for rows in found if method in rows]
    ratios = [us / ours.median_us for us, ours in theirs if us and ours and ours.median_us]
    return MethodSummary(
        method=method,
        cells=len(ratios),
        without=sum(not us for us, _ in theirs),
        ratio=geometric_mean(ratios),
        faster=sum(ratio < 1 for ratio in ratios),
    )


def to_markdown(summaries: Sequence[RegimeSummary]) -> str:
    """The summaries as Markdown: for each regime its totals, a table of cells, a table of methods, and the worst cells."""
    return "\n\n".join(_regime_markdown(summary) for summary in summaries) or "No rows."


def _regime_markdown(summary: RegimeSummary) -> str:
    texts = [f"**{summary.regime}** regime: {_totals(summary)}"]
    if summary.cells:
        with_ceiling = any(cell.ceiling_ratio for cell in summary.cells)
        head = [
            "problem",
            f"tiledsched {unit_of(summary.cells[0].problem)}",
            "fastest rival",
            "which",
            "time over ours",
        ]
        rows: list[list[Any]] = [
            [
                str(cell.problem),
                f"{rate_of(cell.problem, cell.ours_us):.1f}",
                f"{rate_of(cell.problem, cell.rival_us):.1f}",
                cell.rival_method,
                f"{cell.ratio:.2f}x",
                *([f"{cell.ceiling_ratio:.0%}" if cell.ceiling_ratio else "-"] if with_ceiling else []),
            ]
            for cell in summary.cells
        ]
        texts.append(_table([*head, *(["of the matmul"] if with_ceiling else [])], rows))
    if summary.methods:
        head = ["method", "cells", "time over ours (geometric mean)", "faster than ours", "no time"]
        rows = [
            [each.method, each.cells, "-" if each.ratio is None else f"{each.ratio:.2f}x", each.faster, each.without]
            for each in summary.methods
        ]
        texts.append(_table(head, rows))
    if len(summary.cells) > 1:
        worst = (f"{cell.problem} {cell.ratio:.2f}x ({cell.rival_method})" for cell in summary.worst)
        texts.append("Worst cells: " + "; ".join(worst) + ".")
    if summary.elsewhere:
        named = (f"{cell.problem} ({cell.provenance})" for cell in summary.elsewhere[:WORST])
        more = "; ..." if len(summary.elsewhere) > WORST else ""
        texts.append(
            f"{len(summary.elsewhere)} cells were not served an entry measured for them: {'; '.join(named)}{more}."
        )
    return "\n\n".join(texts)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return document_markdown([Table(head=head, rows=[list(map(str, row)) for row in rows])]).strip()


def _totals(summary: RegimeSummary) -> str:
    if summary.ratio is None:
        return f"no cell has both a time of ours and of a rival ({summary.without} without)."
    there = any(each.method == FLASH_4 and each.cells for each in summary.methods)
    rivals = "torch's backends and FlashAttention-4" if there else "torch's backends"
    without = f" {summary.without} more without a time of one of the two." if summary.without else ""
    return (
        f"the fastest of {rivals} takes {summary.ratio:.3f}x our time (geometric mean of {len(summary.cells)} cells); in "
        f"{summary.below} of them it is faster.{without}"
    )
