"""Writes the ladder: a table of rates over sequence lengths, and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiledsched.bench.rows import BenchRow
from tiledsched.report.document import Block, Chart, Heading, Paragraph, Table, write_document
from tiledsched.report.vega import Spec, chart, quantity, word
from tiledsched.studies.ladder.rungs import rungs


def write_ladder(folder: Path, rows: Sequence[BenchRow], targets: str = "") -> list[Path]:
    """Write ladder.md, ladder.html, the chart, and by_target.py with the text of `targets`; returns the files written."""
    return write_document(
        folder,
        document(rows),
        title="The ladder",
        markdown="ladder.md",
        page="ladder.html",
        more={"by_target.py": targets} if targets else {},
    )


def document(rows: Sequence[BenchRow]) -> list[Block]:
    """The chart, then a table for each kind of problem: a row for each rung, three columns for each length."""
    names = list(dict.fromkeys(row.method for row in rows))
    about = {name: text for name, (text, _) in rungs().items()}
    device = ", ".join(sorted({row.device for row in rows}))
    blocks: list[Block] = [
        Heading(text=f"From the naive kernel to the one that is served, on {device}", level=1),
        Paragraph(
            text="Each rung is the one before with one more edit; every output was checked against float64. Times of one "
            "length are of one interleaved run."
        ),
        Chart(name="ladder", spec=scaling(rows), text="TFLOP/s of each rung over the sequence length"),
    ]
    for group in dict.fromkeys(_group(row) for row in rows):
        mine = [row for row in rows if _group(row) == group]
        lengths = sorted({row.problem.seq_q for row in mine})
        found = {(row.method, row.problem.seq_q): row for row in mine}
        head = (
            "rung",
            "edit",
            *(column for length in lengths for column in (f"S={length}, ms", "TFLOP/s", "of the one before")),
        )
        lines, before = [], ""
        for name in names:
            cells = [name, about.get(name, "what is served")]
            for length in lengths:
                cells += _cells(found.get((name, length)), found.get((before, length)))
            lines.append(tuple(cells))
            before = name
        blocks += [Heading(text=group), Table(head=head, rows=tuple(lines))]
    return blocks


def _cells(row: BenchRow | None, before: BenchRow | None) -> tuple[str, str, str]:
    if row is None or not row.median_us:
        return (row.status if row else "-"), "-", "-"
    step = f"{before.median_us / row.median_us:.2f}x" if before and before.median_us else "-"
    return f"{row.median_us / 1e3:.4g}", f"{row.tflops:.1f}", step


def _group(row: BenchRow) -> str:
    p = row.problem
    return f"D={p.head_dim} {p.dtype}{' causal' if p.causal else ''}, {p.batch} x {p.heads} heads, {row.regime}"


def scaling(rows: Sequence[BenchRow]) -> Spec:
    """TFLOP/s over the sequence length, with a line for each rung and a panel for each kind of problem."""
    values = [
        {
            "rung": row.method,
            "S": row.problem.seq_q,
            "tflops": round(row.tflops, 1),
            "us": row.median_us,
            "panel": _group(row),
        }
        for row in rows
        if row.tflops
    ]
    lengths = sorted({row.problem.seq_q for row in rows})
    order = list(dict.fromkeys(row.method for row in rows))
    line = {
        "mark": {"type": "line", "point": True},
        "width": 380,
        "height": 240,
        "encoding": {
            "x": quantity("S", "sequence length S", scale={"type": "log", "base": 2}, axis={"values": lengths}),
            "y": quantity("tflops", "TFLOP/s"),
            "color": word("rung", None, scale={"scheme": "viridis", "domain": order}),
            "tooltip": [{"field": field} for field in ("rung", "S", "tflops", "us")],
        },
    }
    return chart(values, {"facet": word("panel", None), "columns": 2, "spec": line})
