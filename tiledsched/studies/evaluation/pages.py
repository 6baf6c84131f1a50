"""Writes the evaluation: the paper's files, tables and figures, and a page that holds them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean, median

from tiledsched.core.files import csv_text
from tiledsched.core.text import NOTHING, joined, longer, plural, ratio, tile_text, times_as_fast
from tiledsched.report.document import Block, Chart, Contents, Heading, Paragraph, Table, to_markdown, write_document
from tiledsched.report.vega import titled
from tiledsched.rivals.rows import OK, BenchRow
from tiledsched.studies.evaluation.figures import of_results
from tiledsched.studies.evaluation.rows import (
    BASELINE,
    COLUMNS,
    METHODS,
    OURS,
    TILING_COLUMNS,
    ResultRow,
    TilingRow,
    result_of,
    times_by_cell,
)
from tiledsched.studies.pages import first_line, untimed

RIVALS = (
    f"Below, a ratio is another method's time over that of `{OURS}`. The mean is geometric, over the problems on which both have "
    "a time; then stand on how many of them ours is slower, and the least ratio."
)


def write_evaluation(folder: Path, rows: Sequence[BenchRow], tiles: Sequence[TilingRow]) -> list[Path]:
    """Write the paper's two CSV files, its tables and figures, study_summary.md and study.html; returns the files
    written.
    """
    results = [result_of(row) for row in rows]
    table3: list[Block] = [Heading(text="Table 3: conditions", level=1), _table3(rows)]
    table4: list[Block] = [Heading(text="Table 4: best tiles by length", level=1), _table4(tiles)]
    return write_document(
        folder,
        document(rows, tiles),
        title="The evaluation of TiledAttention, repeated",
        markdown="study_summary.md",
        page="study.html",
        more={
            "benchmark_results.csv": csv_text([asdict(row) for row in results], COLUMNS, missing="nan"),
            "tuning_results.csv": csv_text([row.to_csv() for row in tiles], TILING_COLUMNS, missing="nan"),
            "table3_reproducibility.md": to_markdown(table3),
            "table4_tiling_sensitivity.md": to_markdown(table4),
        },
    )


def document(rows: Sequence[BenchRow], tiles: Sequence[TilingRow]) -> list[Block]:
    """The answer, the rivals one by one, the paper's figures and tables, and what has no time."""
    results = [result_of(row) for row in rows]
    devices, timed = sorted({row.device for row in rows}), [row for row in rows if row.median_us]
    problems = len({row.problem for row in timed})
    what = (
        f"{plural(len(timed), 'time')} of attention, of {plural(problems, 'problem')} with one batch of eight heads. Every "
        "output was checked against float64; on each problem the methods took turns in one run"
    )
    first = first_line(devices, (row.taken for row in timed), what, len(timed))
    said = " ".join(filter(None, (answer(results), tiles_answer(tiles))))
    blocks: list[Block] = [Heading(text="The evaluation of TiledAttention, repeated", level=1), first]
    blocks += [Paragraph(text=said, answer=True)] if said else []
    if speedups(results):
        blocks += [Paragraph(text=RIVALS), _rivals(results)]
    blocks.append(Contents())
    source = f"measured on {joined(devices)}" if devices else ""
    for name, (heading, text, spec) in of_results(results).items():
        chart = Chart(name=name, spec=titled(spec, heading, source), text=heading)
        blocks += [Heading(text=heading), chart, Paragraph(text=text)]
    blocks += [Heading(text="Table 4: best tiles by length")]
    blocks += (
        [_table4(tiles)]
        if tiles
        else [Paragraph(text="The tiles were not raced: run `tiledsched study paper` without `--no-tiles`.")]
    )
    failed = [row for row in results if row.status != OK]
    counts = Counter((row.method, row.status) for row in failed)
    example = {(row.method, row.status): row.status_detail for row in reversed(failed)}
    blocks += untimed(
        ("method", "status", "problems", "why, for example"),
        [(method, status, str(count), example[method, status]) for (method, status), count in counts.items()],
        folded=bool(timed),
    )
    return [*blocks, Heading(text="Table 3: conditions", folded=True), _table3(rows)]


def answer(results: Sequence[ResultRow]) -> str:
    """How our kernel compares with torch's SDPA, and with whatever is fastest, in sentences; empty where both were timed on no
    problem.
    """
    lines = []
    if ratios := speedups(results).get(BASELINE):
        line = (
            f"`{OURS}` is {times_as_fast(geometric_mean(ratios))} as torch's SDPA, which chooses its backend itself "
            f"({'geometric mean of ' if len(ratios) > 1 else ''}{plural(len(ratios), 'problem')})."
        )
        behind = sum(each < 1 for each in ratios)
        if behind:
            line += f" On {behind} of these {len(ratios)} it takes longer, at worst {longer(1 / min(ratios) - 1)}."
        lines.append(line)
    if beaten := over_fastest_rivals(results):
        slower = [ratio for ratio in beaten if ratio > 1]
        over = plural(len(beaten), "problem")
        lines.append(
            f"On {len(slower)} of {over} some other method is faster; there `{OURS}` takes at most {longer(max(slower) - 1)}."
            if slower
            else f"No other method is faster ({over})."
        )
    return " ".join(lines)


def over_fastest_rivals(results: Sequence[ResultRow]) -> list[float]:
    """Our time over that of the fastest other method, for each problem on which both have a time."""
    cells = [{**cell} for cell in times_by_cell(results).values() if OURS in cell and len(cell) > 1]
    return [cell.pop(OURS) / min(cell.values()) for cell in cells]


def tiles_answer(tiles: Sequence[TilingRow]) -> str:
    """What the second best tile costs, in a sentence; empty where no problem has two tiles with a time."""
    drops = [row.drop / 100 for row in tiles if row.drop is not None]
    if not drops:
        return ""
    if len(drops) == 1:
        return f"With its second best tile `{OURS}` takes {longer(drops[0])} than with its best (1 problem)."
    return (
        f"With its second best tile `{OURS}` takes {longer(median(drops))} than with its best (median of "
        f"{len(drops)} problems, at most {longer(max(drops))})."
    )


def speedups(results: Sequence[ResultRow]) -> dict[str, list[float]]:
    """Method -> its time over ours, in every cell where both have a time."""
    cells = [cell for cell in times_by_cell(results).values() if OURS in cell]
    found = {method: [cell[method] / cell[OURS] for cell in cells if method in cell] for method in METHODS.values()}
    return {method: ratios for method, ratios in found.items() if ratios and method != OURS}


def _rivals(results: Sequence[ResultRow]) -> Table:
    """A line for each other method: how our kernel compares with it, over the problems on which both have a time."""
    rows = [
        (
            f"`{method}`",
            ratio(geometric_mean(found)),
            f"{sum(each < 1 for each in found)} of {len(found)}",
            ratio(min(found)),
        )
        for method, found in speedups(results).items()
    ]
    return Table(head=("other method", "mean ratio", "ours is slower on", "least ratio"), rows=rows)


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
        "SM clock": f"{' to '.join(dict.fromkeys(map(str, (clocks[0], clocks[-1]))))} MHz" if clocks else "not known",
        "throttle reasons": ", ".join(reasons) or "none seen",
    }
    return Table(head=("item", "value"), rows=tuple(told.items()))


def _table4(tiles: Sequence[TilingRow]) -> Table:
    rows = [
        (
            f"{row.regime}: S={row.problem.seq_q}, D={row.problem.head_dim}",
            tile_text(row.best.tile),
            tile_text(row.runner_up.tile if row.runner_up else None),
            NOTHING if row.drop is None else f"{row.drop:.2f}%",
        )
        for row in tiles
    ]
    return Table(head=("problem", "best tile (TM x TN)", "second best", "the second takes longer by"), rows=rows)
