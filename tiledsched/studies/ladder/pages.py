"""Writes the ladder: what each edit brings, in sentences, a table with one line for each rung, and a chart of rates."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiledsched.bench.rows import BenchRow
from tiledsched.core.problem import Problem
from tiledsched.report.document import NOTHING, Block, Chart, Heading, Paragraph, Table, write_document
from tiledsched.report.vega import Spec, chart, quantity, titled, word
from tiledsched.studies import REGIMES
from tiledsched.studies.ladder.published import COMMAND, RATES, RUNG_LENGTH, RUNGS, SOURCE, published_problem
from tiledsched.studies.ladder.rungs import EDITS, rungs

SERVED = "tiledsched"
"""The method that follows the rungs: what is served."""
LEAST_CHANGE = 1.005
"""A rung that differs by a smaller factor from the one before is said to be neither faster nor slower."""


def write_ladder(folder: Path, rows: Sequence[BenchRow], targets: str = "") -> list[Path]:
    """Write ladder.md, ladder.html, the charts, and by_target.py with the text of `targets`; returns the files written.

    The time of each rung at each length stays in ladder.csv, which the bench wrote into the folder.
    """
    return write_document(
        folder,
        document(rows),
        title="The ladder",
        markdown="ladder.md",
        page="ladder.html",
        more={"by_target.py": targets} if targets else {},
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rung over all sequence lengths."""

    name: str
    """Name of the rung."""
    about: str
    """What the rung adds to the one before."""
    rate: float | None
    """TFLOP/s at the longest length; None where it has no time there."""
    status: str
    """Why there is no rate; empty where there is one, or where nothing was tried."""
    gain: float | None
    """Time of the rung before over its own, geometric mean over `lengths`; None where no length has both times."""
    lengths: int
    """Number of lengths at which the rung and the one before were timed."""


def steps(rows: Sequence[BenchRow]) -> list[Step]:
    """The rungs of one group of problems, which differ in the sequence length alone, in order."""
    about = {name: text for name, (text, _) in rungs().items()}
    found = {(row.method, row.problem.seq_q): row for row in rows}
    lengths = sorted({length for _, length in found})
    order = [*(name for name, _, _ in EDITS), SERVED]
    names = sorted({row.method for row in rows}, key=order.index)
    made = []
    for place, name in enumerate(names):
        gains = [
            before.median_us / row.median_us
            for length in lengths
            if place
            and (row := found.get((name, length)))
            and (before := found.get((names[place - 1], length)))
            and row.median_us
            and before.median_us
        ]
        last = found.get((name, lengths[-1]))
        made.append(
            Step(
                name=name,
                about=about.get(name, "the schedule that is served, of the package's own kernel"),
                rate=last.tflops if last else None,
                status=last.status if last and last.tflops is None else "",
                gain=statistics.geometric_mean(gains) if gains else None,
                lengths=len(gains),
            )
        )
    return made


def answer(rows: Sequence[BenchRow]) -> str:
    """The sentences that say how far the ladder leads and which edit brings most, of one group of problems."""
    found = steps(rows)
    names = [found[0].name, found[-1].name]
    rates = {(row.method, row.problem.seq_q): row.tflops for row in rows if row.tflops}
    both = [length for _, length in rates if all((name, length) in rates for name in names)]
    if not both:
        which = (
            f"both `{names[0]}` and `{names[1]}`" if len(found) > 1 else f"`{names[0]}`, the only rung that was tried"
        )
        return f"No length has a time for {which}."
    longest = max(both)
    first, last = (rates[name, longest] for name in names)
    if len(found) == 1:
        return f"At S={longest} the rung `{names[0]}`, the only one that was tried, reaches {first:.0f} TFLOP/s."
    top = "the served schedule" if names[1] == SERVED else f"the last rung, `{names[1]}`,"
    said = [
        f"At S={longest} the rung `{names[0]}` reaches {first:.0f} TFLOP/s and {top} {last:.0f}: {last / first:.2f} times that."
    ]
    edits = sorted(((one.gain, one) for one in found if one.gain and one.name != SERVED), key=lambda pair: -pair[0])
    if edits and edits[0][0] > LEAST_CHANGE:
        gain, best = edits[0]
        said.append(
            f"Of the edits, “{best.about}” gains most: the rung before takes {gain:.2f} times as long "
            f"(geometric mean of {_lengths(best.lengths)})."
        )
    elif edits:
        said.append("No edit makes the kernel faster than the rung before.")
    slower = [f"“{one.about}” ({1 / gain - 1:.0%} longer)" for gain, one in edits if 1 / gain > LEAST_CHANGE]
    if slower:
        said.append(f"Slower than the rung before it: {', '.join(slower)}.")
    return " ".join(said)


def document(rows: Sequence[BenchRow]) -> list[Block]:
    """For each group of problems that differ in the length alone: sentences, a chart, and a line for each rung."""
    devices = ", ".join(sorted({row.device for row in rows}))
    regimes = " and ".join(sorted({REGIMES[row.regime] for row in rows}))
    blocks: list[Block] = [
        Heading(text="From a first attention kernel to the one that is served", level=1),
        Paragraph(
            text=f"Measured on {devices}, {regimes}. Each rung is the one before with one more edit. The rungs of one length "
            "took turns in one run, and every output was checked against float64."
        ),
    ]
    groups = list(dict.fromkeys(map(_group, rows)))
    for number, group in enumerate(groups, 1):
        mine = [row for row in rows if _group(row) == group]
        blocks += [Heading(text=", ".join(group)), *_group_blocks(mine, f"ladder{number if number > 1 else ''}")]
    if not any(_theirs(row) for row in rows):
        blocks.append(
            Paragraph(
                text=f"NVIDIA published such a ladder for a GB10 and a B300, of other problems than those above. `{COMMAND}` "
                "measures theirs, and shows both."
            )
        )
    versions = sorted({row.versions for row in rows if row.versions})
    text = "The time of each rung at each length is in `ladder.csv`, the hints to paste into a kernel are in `by_target.py`."
    return [*blocks, Paragraph(text=" ".join([text, *(f"Measured with {each}." for each in versions)]))]


def _group_blocks(rows: Sequence[BenchRow], name: str) -> list[Block]:
    found = steps(rows)
    lengths = sorted({row.problem.seq_q for row in rows})
    theirs = [length for length in lengths if any(_theirs(row) for row in rows if row.problem.seq_q == length)]
    beside = RUNG_LENGTH in theirs
    most = max(one.lengths for one in found)
    lines = [
        (
            f"`{one.name}`",
            one.about,
            f"{one.rate:.1f}" if one.rate else one.status or NOTHING,
            NOTHING if one.gain is None else f"{one.gain:.2f}x" + ("" if one.lengths == most else f" of {one.lengths}"),
            *([f"{RUNGS[one.name]}" if one.name in RUNGS else NOTHING] if beside else []),
        )
        for one in found
    ]
    fewer = ", or as many as its line says" if any(0 < one.lengths < most for one in found) else ""
    caption = f"TFLOP/s are measured at S={lengths[-1]}." + (
        " The gain is the time of the rung before divided by this rung's: 1.10x means that the rung before takes 10% longer. "
        f"It is the geometric mean over {_lengths(most)}{fewer}, at which both were timed."
        if most
        else ""
    )
    if beside:
        caption += f" The last column is what NVIDIA published for a GB10 at S={RUNG_LENGTH}; we did not measure it."
    blocks: list[Block] = [Paragraph(text=answer(rows))]
    if len({row.problem.seq_q for row in rows if row.tflops}) > 1:
        blocks.append(Chart(name=name, spec=scaling(rows), text="TFLOP/s of each rung over the sequence length"))
    head = ("rung", "what it adds", "TFLOP/s", "gain", *(["GB10, NVIDIA's"] if beside else []))
    blocks += [Paragraph(text=caption), Table(head=head, rows=lines)]
    if theirs:
        served = {row.problem.seq_q: row.tflops for row in rows if row.method == SERVED}
        blocks += [
            Paragraph(
                text="NVIDIA's finished kernel on the same problems, in TFLOP/s, beside the schedule that we serve. The figures "
                f"of GB10 and B300 were published by NVIDIA ({SOURCE}); we did not measure them."
            ),
            Table(
                head=("S", "served, measured", *(f"{gpu}, published" for gpu in RATES)),
                rows=[
                    (
                        str(length),
                        f"{rate:.1f}" if (rate := served.get(length)) else NOTHING,
                        *(f"{rates[length]:.1f}" if length in rates else NOTHING for rates in RATES.values()),
                    )
                    for length in theirs
                ],
            ),
        ]
    return blocks


def _lengths(number: int) -> str:
    return f"{number} length{'' if number == 1 else 's'}"


def _group(row: BenchRow) -> tuple[str, str, str]:
    """The problem but for its length, the GPU, and the regime."""
    return _without_length(row.problem), row.device, REGIMES[row.regime]


def _without_length(problem: Problem) -> str:
    return re.sub(r" ?\bS=\S+", "", str(problem)).strip()


def _theirs(row: BenchRow) -> bool:
    """Whether NVIDIA published figures of the row's problem."""
    length = row.problem.seq_q
    return any(length in rates for rates in RATES.values()) and row.problem == published_problem(length)


def scaling(rows: Sequence[BenchRow]) -> Spec:
    """TFLOP/s over the sequence length of one group: a line for each rung, and broken lines for what NVIDIA published."""
    values = [
        {"kernel": row.method, "by": "measured here", "S": row.problem.seq_q, "tflops": round(row.tflops, 1)}
        for row in rows
        if row.tflops
    ]
    order = list(dict.fromkeys(value["kernel"] for value in values))
    shown = sorted({row.problem.seq_q for row in rows if _theirs(row)})
    published = [
        {"kernel": f"NVIDIA's, {gpu}", "by": "published by NVIDIA", "S": length, "tflops": rates[length]}
        for gpu, rates in RATES.items()
        for length in shown
        if length in rates
    ]
    lengths = sorted({value["S"] for value in values})
    scale = {"scheme": {"name": "viridis", "extent": [0.25, 0.9]}, "domain": order}  # seen on light and on dark
    encoding = {
        "x": quantity("S", "sequence length S", scale={"type": "log", "base": 2}, axis={"values": lengths}),
        # NVIDIA's two GPUs are a factor of fourteen apart.
        "y": quantity("tflops", "TFLOP/s", scale={"type": "log", "nice": False} if published else {}),
        "tooltip": [{"field": field} for field in ("kernel", "by", "S", "tflops")],
    }
    mark = {"type": "line", "point": True}
    ours = {
        "transform": [{"filter": "datum.by == 'measured here'"}],
        "mark": mark,
        "encoding": {**encoding, "color": word("kernel", "rung", scale=scale)},
    }
    theirs = {
        "transform": [{"filter": "datum.by != 'measured here'"}],
        "mark": {"type": "line", "color": "#888888", "point": {"color": "#888888"}},
        "encoding": {**encoding, "strokeDash": word("kernel", "published by NVIDIA")},
    }
    sort = {"layer": [ours, *([theirs] if published else [])]}
    problem, device, regime = _group(rows[0])
    spec = chart([*values, *published], sort, width=620, height=300)
    return titled(
        spec, "Attention, from a first kernel to the served one", f"{problem}; measured on {device}, {regime}"
    )
