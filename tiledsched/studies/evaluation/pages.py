"""Writes the evaluation: the paper's files, tables and figures, and a page that holds them all."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tiledsched.bench.rows import BenchRow
from tiledsched.core.files import csv_text
from tiledsched.report.document import NOTHING, Block, Chart, Heading, Paragraph, Table, to_markdown, write_document
from tiledsched.studies import REGIMES
from tiledsched.studies.evaluation import tiles as tiling
from tiledsched.studies.evaluation.figures import of_results
from tiledsched.studies.evaluation.rows import BASELINE, COLUMNS, METHODS, OURS, ResultRow, problems, result_of
from tiledsched.studies.evaluation.tiles import TilingRow


def write_evaluation(folder: Path, rows: Sequence[BenchRow], tiles: Sequence[TilingRow]) -> list[Path]:
    """Write the paper's two CSV files, its tables and figures, study_summary.md and study.html; returns the files
    written.
    """
    results = [result_of(row) for row in rows]
    conditions = _table3(rows)
    table3: list[Block] = [Heading(text="Table 3: conditions", level=1), conditions]
    table4: list[Block] = [Heading(text="Table 4: best tiles by regime", level=1), *_table4(tiles)]
    return write_document(
        folder,
        _document(results, tiles, rows, conditions),
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


def _document(
    results: Sequence[ResultRow], tiles: Sequence[TilingRow], rows: Sequence[BenchRow], conditions: Table
) -> list[Block]:
    devices = ", ".join(sorted({row.device for row in rows}))
    regimes = " and ".join(sorted({REGIMES[row.regime] for row in rows}))
    cells = len({row.cell for row in results})
    ratios = speedups(results)
    blocks: list[Block] = [
        Heading(text="The evaluation of TiledAttention, over again", level=1),
        Paragraph(
            text=f"Measured on {devices}, {regimes}: attention of one sequence with eight heads, {cells} of the paper's "
            f"{len(problems())} problems. The methods took turns in one run for each problem, and every output was checked "
            "against float64."
        ),
        Paragraph(text=answer(ratios)),
    ]
    if ratios:
        blocks += [
            Paragraph(
                text="For each method: the geometric mean of its time divided by ours over the problems in which both have a "
                "time (above 1, ours is faster), the number of these problems, in how many of them the method is faster, and "
                "the least ratio of all."
            ),
            Table(
                head=("method", "time / ours", "problems", "faster in", "least"),
                rows=[
                    (
                        f"`{method}`",
                        f"{mean:.2f}x",
                        str(len(found)),
                        str(sum(each < 1 for each in found)),
                        f"{min(found):.2f}x",
                    )
                    for method, found in ratios.items()
                    for mean in [statistics.geometric_mean(found)]
                ],
            ),
        ]
    about = f"Attention, B=1 H=8; measured on {devices}, {regimes}"
    for name, (heading, text, spec) in of_results(results, about).items():
        blocks += [Heading(text=heading), Paragraph(text=text), Chart(name=name, spec=spec, text=text)]
    return [
        *blocks,
        Heading(text="Table 4: best tiles by regime"),
        *_table4(tiles),
        Heading(text="What has no time", folded=True),
        _failures(results),
        Heading(text="Table 3: conditions", folded=True),
        conditions,
    ]


def answer(ratios: Mapping[str, Sequence[float]]) -> str:
    """The sentences that say how torch's own choice and the closest method compare with ours, from :func:`speedups`."""
    if not ratios:
        return "No problem has a time both for our kernel and for another method, so nothing can be compared."
    said = []
    closest = min(ratios, key=lambda method: statistics.geometric_mean(ratios[method]))
    for method in dict.fromkeys([BASELINE, closest]):
        if found := ratios.get(method):
            name = f"`{method}`" + (", torch's SDPA with the backend that torch chooses," if method == BASELINE else "")
            over = f"geometric mean of {len(found)} problem{'s' * (len(found) > 1)}"
            faster = sum(each < 1 for each in found)
            said.append(f"{name} takes {statistics.geometric_mean(found):.2f} times as long as ours ({over}).")
            said.append(
                f"It is faster in {faster} of {len(found)}, where it takes at most {1 - min(found):.1%} less time."
                if faster
                else "It is faster in none."
            )
    if closest != BASELINE and len(ratios) > 1:
        said.append(f"Of the {len(ratios)} other methods, `{closest}` is the closest to ours.")
    return " ".join(said)


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


def _failures(results: Sequence[ResultRow]) -> Block:
    failed = [row for row in results if not row.median_ms]
    if not failed:
        return Paragraph(text=f"All {len(results)} rows, one for each method and problem, have a time.")
    counts: Mapping[tuple[str, str], int] = Counter((row.method, row.status) for row in failed)
    example = {(row.method, row.status): row.status_detail for row in reversed(failed)}
    return Table(
        head=("method", "status", "problems", "for example"),
        rows=[(f"`{key[0]}`", key[1], str(count), example[key] or NOTHING) for key, count in counts.items()],
    )


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
        "SM clock": " to ".join(f"{mhz} MHz" for mhz in dict.fromkeys([clocks[0], clocks[-1]]))
        if clocks
        else "not known",
        "throttle reasons": ", ".join(reasons) or "none seen",
    }
    return Table(head=("item", "value"), rows=tuple(told.items()))


def _table4(tiles: Sequence[TilingRow]) -> list[Block]:
    if not tiles:
        return [Paragraph(text="The tiles were not raced: run `tiledsched study paper` without `--no-tiles`.")]
    drops = [row.drop for row in tiles if row.drop is not None]
    text = (
        "The paper calls a problem sensitive to its tile where the second best tile is slower. Each tile is judged by its "
        "fastest schedule, and the drop is how much longer the second best tile takes than the best."
    )
    if drops:
        text += (
            f" Here that is {statistics.median(drops):.1f}% (median of {len(drops)} problem{'s' * (len(drops) > 1)})."
        )
    rows = [
        (
            row.regime,
            f"S={row.problem.seq_q}, D={row.problem.head_dim}",
            str(row.best.tile),
            str(row.runner_up.tile) if row.runner_up else NOTHING,
            NOTHING if row.drop is None else f"{row.drop:.2f}",
        )
        for row in tiles
    ]
    head = ("regime", "problem", "best (TM, TN)", "second best", "drop, %")
    return [Paragraph(text=text), Table(head=head, rows=rows)]
