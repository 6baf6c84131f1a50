"""Writes the evaluation: the paper's files, tables and figures, and a page that holds them all."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tiledsched.bench.rows import BenchRow
from tiledsched.core.files import csv_text
from tiledsched.report.document import (
    Block,
    Cards,
    Chart,
    Contents,
    Heading,
    Paragraph,
    Table,
    to_markdown,
    write_document,
)
from tiledsched.studies.evaluation import tiles as tiling
from tiledsched.studies.evaluation.figures import of_results
from tiledsched.studies.evaluation.rows import BASELINE, COLUMNS, METHODS, OURS, ResultRow, result_of
from tiledsched.studies.evaluation.tiles import TilingRow


def write_evaluation(folder: Path, rows: Sequence[BenchRow], tiles: Sequence[TilingRow]) -> list[Path]:
    """Write the paper's two CSV files, its tables and figures, study_summary.md and study.html; returns the files
    written.
    """
    results = [result_of(row) for row in rows]
    conditions = _table3(rows)
    table3: list[Block] = [Heading(text="Table 3: conditions", level=1), conditions]
    table4: list[Block] = [Heading(text="Table 4: best tiles by regime", level=1), _table4(tiles)]
    return write_document(
        folder,
        _document(results, tiles, conditions),
        title="The evaluation of TiledAttention, over again",
        markdown="study_summary.md",
        page="study.html",
        more={
            "benchmark_results.csv": csv_text([asdict(row) for row in results], COLUMNS, missing="nan"),
            "tuning_results.csv": csv_text([row.to_csv() for row in tiles], tiling.COLUMNS, missing="nan"),
            "table3_reproducibility.md": to_markdown(table3),
            "table4_tiling_sensitivity.md": to_markdown(table4),
        },
    )


def _document(results: Sequence[ResultRow], tiles: Sequence[TilingRow], conditions: Table) -> list[Block]:
    devices = next((value for name, value in conditions.rows if name == "GPU"), "")
    blocks: list[Block] = [
        Heading(text="The evaluation of TiledAttention, over again", level=1),
        Paragraph(
            text=f"{len({row.cell for row in results})} problems of one batch of eight heads on {devices}: {len(results)} "
            "rows, each with a status. Every ratio is of one interleaved run."
        ),
    ]
    ratios = speedups(results)
    if ratios:
        blocks.append(
            Cards(
                items=tuple(
                    (
                        f"{_mean(found):.2f}x",
                        f"against {method}, geometric mean of {len(found)} problems; "
                        f"{sum(each < 1 for each in found)} behind, worst {min(found):.2f}x",
                    )
                    for method, found in ratios.items()
                )
            )
        )
    blocks.append(Contents())
    for name, (heading, text, spec) in of_results(results).items():
        blocks += [Heading(text=heading), Paragraph(text=text), Chart(name=name, spec=spec, text=text)]
    blocks += [Heading(text="Table 4: best tiles by regime")]
    blocks += (
        [_table4(tiles)]
        if tiles
        else [Paragraph(text="The tiles were not raced: run `tiledsched study paper` without `--no-tiles`.")]
    )
    blocks += [Heading(text="Statuses"), _statuses(results), Heading(text="Table 3: conditions"), conditions]
    return blocks


def speedups(results: Sequence[ResultRow]) -> dict[str, list[float]]:
    """Method -> its time over ours, in every cell where both have a time."""
    ours = {row.cell: row.median_ms for row in results if row.method == OURS and row.median_ms}
    found: dict[str, list[float]] = {}
    for method in METHODS.values():
        times = [
            row.median_ms / ours[row.cell]
            for row in results
            if row.method == method != OURS and row.median_ms and row.cell in ours
        ]
        if times:
            found[method] = times
    return found


def _mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)


def _statuses(results: Sequence[ResultRow]) -> Table:
    counts: Mapping[tuple[str, str], int] = Counter((row.method, row.status) for row in results)
    example = {(row.method, row.status): row.status_detail for row in reversed(results)}
    rows = [(method, status, str(count), example[method, status] or "-") for (method, status), count in counts.items()]
    return Table(head=("method", "status", "rows", "for example"), rows=tuple(rows))


def _table3(rows: Sequence[BenchRow]) -> Table:
    from tiledsched import __version__

    clocks = sorted({row.conditions.sm_clock_mhz for row in rows if row.conditions.sm_clock_mhz})
    reasons = sorted({reason for row in rows for reason in row.conditions.throttle_reasons})
    told = {
        "GPU": ", ".join(sorted({row.device for row in rows})),
        "driver and libraries": "; ".join(sorted({row.versions for row in rows})),
        "tiledsched": __version__,
        "baseline": f"{BASELINE}: torch's SDPA, which chooses its backend itself",
        "timing": "median and 95th percentile of interleaved samples, each method queued ahead of the GPU; every output checked "
        "against float64 first",
        "regime": ", ".join(sorted({row.regime for row in rows})),
        "SM clock": f"{clocks[0]} to {clocks[-1]} MHz" if clocks else "not known",
        "throttle reasons": ", ".join(reasons) or "none seen",
    }
    return Table(head=("item", "value"), rows=tuple(told.items()))


def _table4(tiles: Sequence[TilingRow]) -> Table:
    rows = [
        (
            row.regime,
            f"S={row.problem.seq_q}, D={row.problem.head_dim}",
            str(row.best.tile),
            str(row.runner_up.tile) if row.runner_up else "-",
            "-" if row.drop is None else f"{row.drop:.2f}",
        )
        for row in tiles
    ]
    return Table(head=("regime", "shape", "best (TM, TN)", "runner-up", "sensitivity drop, %"), rows=tuple(rows))
