"""Writes the ladder: what its rows say in sentences, a chart of rates over sequence lengths, and a line for each rung."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.core.groups import grouped
from tiledsched.core.problem import rate_of, rate_text, unit_of
from tiledsched.core.text import NOTHING, joined, plural, times_as_fast
from tiledsched.report.document import Block, Chart, Heading, Paragraph, Table, write_document
from tiledsched.report.vega import BINARY, SIZES, Spec, chart, quantity, tips, titled, word
from tiledsched.rivals.methods import OURS
from tiledsched.rivals.rows import BenchRow
from tiledsched.studies.ladder.rungs import LAST, SOURCE, published_for, rungs
from tiledsched.studies.pages import first_line, labelled_bars, untimed

SMALL = 0.02
"""An edit that gains less than this is said to change little."""
SERVED = "the whole kernel of tiledsched, with the schedule that it serves"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A rung of the ladder for one kind of problem: problems that differ in nothing but their length."""

    name: str
    """Name of the method."""
    adds: str
    """What it adds to the rung before."""
    timed: Mapping[int, BenchRow]
    """Length -> its row, where it has a time; the shortest first."""
    gains: Mapping[int, float]
    """Length -> time of the rung before over its own, where both have a time. The two are of one run."""

    @property
    def gain(self) -> float | None:
        """The geometric mean of its gains; None where there is none."""
        return statistics.geometric_mean(self.gains.values()) if self.gains else None


def kinds_of(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """The rows of one ladder together: of one GPU, regime and kind of problem, which is the problem without its length. The key
    says in words which; the order is that of the rows.
    """
    several = len({row.device for row in rows}) > 1

    def kind_of(row: BenchRow) -> str:
        kind = re.sub(r"\bS=\S+ ?", "", str(row.problem)).strip()
        cap = ", at the power cap" if row.regime == "sustained" else ""
        return kind + cap + (f", on {row.device}" if several else "")

    return grouped((kind_of(row), row) for row in rows)


def climbed(rows: Sequence[BenchRow]) -> list[Rung]:
    """The rungs of one kind of problem, in their order; those that no row is of are left out."""
    known = {name: adds for name, (adds, _) in rungs().items()} | {OURS: SERVED}
    order = [name for name in known if any(row.method == name for row in rows)]
    timed: dict[str, dict[int, BenchRow]] = {name: {} for name in order}
    for row in sorted(rows, key=lambda row: row.problem.seq_q):
        if row.median_us and row.method in timed:
            timed[row.method][row.problem.seq_q] = row
    found = []
    for place, name in enumerate(order):
        before = timed[order[place - 1]] if place else {}
        gains = {length: _us(before[length]) / _us(row) for length, row in timed[name].items() if length in before}
        found.append(Rung(name=name, adds=known[name], timed=timed[name], gains=gains))
    return found


def answer(kind: str, found: Sequence[Rung]) -> str:
    """What the ladder found for one kind of problem, in sentences."""
    first, last = found[0], found[-1]
    shared = [length for length in last.timed if length in first.timed]
    lines = []
    if shared and first is not last:
        length = shared[-1]
        slow, fast = first.timed[length], last.timed[length]
        lines.append(
            f"For {kind}, `{last.name}` reaches {rate_text(fast.problem, _us(fast))} at S={length}: it is "
            f"{times_as_fast(_us(slow) / _us(fast))} as `{first.name}`, which reaches {rate_text(slow.problem, _us(slow))}."
        )
    else:
        missing = [f"`{rung.name}`" for rung in found if rung in (first, last) and not rung.timed]
        why = f"{joined(missing)} {'has' if len(missing) == 1 else 'have'} no time" if missing else "no length has both"
        lines.append(f"For {kind}, the first and the last rung cannot be compared: {why}.")
    steps = [rung for rung in found if rung.gain is not None]
    if steps:
        best = max(steps, key=lambda rung: rung.gain or 0.0)
        if best.gain and best.gain > 1 + SMALL:
            lines.append(
                f"The largest step is `{best.name}` ({best.adds}): with it the kernel is {times_as_fast(best.gain)} as "
                f"before ({_mean(best)})."
            )
        slower = [rung for rung in steps if rung.gain and rung.gain < 1 - SMALL]
        if slower:
            said = joined(f"`{rung.name}` {rung.gain:.2f} times as fast ({_mean(rung)})" for rung in slower)
            lines.append(f"{'A step makes' if len(slower) == 1 else 'Some steps make'} it slower: {said}.")
        little = [f"`{rung.name}`" for rung in steps if rung.gain and abs(rung.gain - 1) <= SMALL]
        if little:
            lines.append(f"With {joined(little)} the mean time changes by 2% at most.")
    return " ".join(lines)


def _mean(rung: Rung) -> str:
    return ("geometric mean of " if len(rung.gains) > 1 else "") + plural(len(rung.gains), "length")


def _us(row: BenchRow) -> float:
    """The time of a row; 0 for one without."""
    return row.median_us or 0.0


RAMP = ("#7b7fd1", "#4f86c6", "#2a9ac0", "#1fa187", "#4ac16d", "#90c62f", "#c4b000")
"""Colours of the rungs before the last, in their order."""
TOP, THEIRS = "#D55E00", ("#888888", "#b09070")
"""Colours of the last rung and of what NVIDIA published."""

Published = Mapping[tuple[str, int, str], float]
"""(GPU, sequence length, rung) -> TFLOP/s that NVIDIA published."""
ROOM = 1.3
"""The axis of bars reaches so many times as far as the longest, to hold its number."""


def write_ladder(folder: Path, rows: Sequence[BenchRow], targets: str = "") -> list[Path]:
    """Write ladder.md, ladder.html, the charts, and by_target.py with the text of `targets`; returns the files written."""
    return write_document(
        folder,
        document(rows),
        title="The ladder",
        markdown="ladder.md",
        page="ladder.html",
        more={"by_target.py": targets} if targets else {},
    )


def document(rows: Sequence[BenchRow]) -> list[Block]:
    """The answer, and for each kind of problem a chart and a line for each rung; then NVIDIA's figures where the problem is
    theirs, and what has no time.
    """
    timed = [row for row in rows if row.median_us]
    devices = sorted({row.device for row in rows})
    kinds = {kind: (climbed(mine), mine[0].device) for kind, mine in kinds_of(rows).items()}
    what = (
        f"{plural(len(timed), 'time')} of attention, from a first kernel in cuTile (`naive`) to the tuned one. Every output was "
        "checked against float64; at each length the rungs took turns in one run"
    )
    blocks: list[Block] = [
        Heading(text="Attention in cuTile, an edit at a time", level=1),
        first_line(devices, (row.taken for row in timed), what, len(timed)),
        *(Paragraph(text=answer(kind, found), answer=True) for kind, (found, _) in kinds.items()),
    ]
    for number, (kind, (found, device)) in enumerate(kinds.items()):
        lengths = sorted({length for rung in found for length in rung.timed})
        if not lengths:
            continue
        problems = {row.problem.seq_q: row.problem for rung in found for row in rung.timed.values()}
        theirs = {key: tflops for length in lengths for key, tflops in published_for(problems[length]).items()}
        text = f"The rate of each rung {f'at S={lengths[0]}' if len(lengths) == 1 else 'over the sequence length'}"
        spec = titled(rates(found, theirs), text, kind, f"measured on {device}")
        name = f"ladder_{number + 1}" if number else "ladder"
        blocks += [Heading(text=kind), Chart(name=name, spec=spec, text=f"{text}: {kind}"), *_rung_table(found)]
        if theirs:
            blocks += _published_rates(found, theirs, device)
    versions = "; ".join(sorted({row.versions for row in rows if row.versions}))
    told = f" Versions: {versions}." if versions else ""
    blocks.append(Paragraph(text=f"`ladder.csv` has each time with its interval, error and clock.{told}"))
    return [*blocks, *_untimed(rows)]


def _untimed(rows: Sequence[BenchRow]) -> list[Block]:
    """Which rungs have no time at which lengths, and why."""
    found = grouped(
        ((kind, row.method, row.status), row.problem.seq_q)
        for kind, mine in kinds_of(rows).items()
        for row in mine
        if not row.median_us
    )
    lines = [(kind, name, ", ".join(map(str, sorted(at))), why) for (kind, name, why), at in found.items()]
    return untimed(("problem", "rung", "S", "why"), lines, folded=any(row.median_us for row in rows))


def _rung_table(found: Sequence[Rung]) -> list[Block]:
    """A line for each rung: what it adds, its rate at the longest length, and its gain over the rung before."""
    length = max(length for rung in found for length in rung.timed)
    unit = next(unit_of(row.problem) for rung in found for row in rung.timed.values())
    usual = max(len(rung.gains) for rung in found)
    rows = [(f"`{rung.name}`: {rung.adds}", _rate_at(rung, length), _gain(rung, usual)) for rung in found]
    over = (
        f"geometric mean of {usual} lengths, and in brackets the least and the most" if usual > 1 else "at one length"
    )
    text = f"The last column says how many times as fast a rung is as the one before: {over}."
    head = ("rung, and what it adds", f"{unit} at S={length}, measured", "gain over the rung before")
    return [*([Paragraph(text=text)] if usual else []), Table(head=head, rows=rows)]


def _gain(rung: Rung, usual: int) -> str:
    """How many times as fast a rung is as the one before: the mean, the least and the most, and over how many lengths where
    these are not as many as usual.
    """
    if rung.gain is None:
        return NOTHING
    gains = sorted(rung.gains.values())
    over = "" if len(gains) == usual else f", {plural(len(gains), 'length')}"
    return f"{rung.gain:.2f}x" + (f" ({gains[0]:.2f} to {gains[-1]:.2f}{over})" if usual > 1 else "")


def _rate(row: BenchRow) -> float:
    return rate_of(row.problem, _us(row))


def _rate_at(rung: Rung, length: int) -> str:
    return f"{_rate(rung.timed[length]):.1f}" if length in rung.timed else NOTHING


def _published_rates(found: Sequence[Rung], theirs: Published, device: str) -> list[Block]:
    """NVIDIA's figures beside ours, with where they stand."""
    ours = {rung.name: rung for rung in found}
    rows = [
        (
            f"S={length}, `{rung}`",
            _rate_at(ours[rung], length) if rung in ours else NOTHING,
            *(
                f"{theirs[gpu, length, rung]:.1f}" if (gpu, length, rung) in theirs else NOTHING
                for gpu in ("GB10", "B300")
            ),
        )
        for length, rung in dict.fromkeys((length, rung) for _, length, rung in theirs)
    ]
    text = (
        f"NVIDIA published rates for these problems, in TFLOP/s. They are not ours. Ours were measured on {device}. Rungs up to "
        f"`division` are those of NVIDIA's tutorial; beside `{LAST}` stand its finished kernels. Source: {SOURCE}; timed as CUDA "
        "graphs, without emptying the cache."
    )
    head = ("length and rung", "ours, measured", "GB10, published", "B300, published")
    return [Heading(text="NVIDIA's published figures", level=3), Paragraph(text=text), Table(head=head, rows=rows)]


def rates(found: Sequence[Rung], theirs: Published) -> Spec:
    """The rate over the sequence length, with a line for each rung and dashed ones for what NVIDIA published; bars where there is
    one length.
    """
    values: list[dict[str, Any]] = [
        {
            "rung": rung.name,
            "S": length,
            "rate": round(_rate(row), 1),
            "said": f"{_rate(row):.1f}",
            "us": row.median_us,
            "from": "measured here",
        }
        for rung in found
        for length, row in rung.timed.items()
    ]
    unit = next(unit_of(row.problem) for rung in found for row in rung.timed.values())
    lengths = sorted({length for rung in found for length in rung.timed})
    known = {rung.name: TOP if rung.name == LAST else RAMP[place % len(RAMP)] for place, rung in enumerate(found)}
    names = [rung.name for rung in found if rung.timed]
    published = [
        {
            "rung": f"NVIDIA's on {gpu} (published)",
            "S": length,
            "rate": round(tflops, 1),
            "said": f"{tflops:.1f}",
            "us": None,
            "from": "published by NVIDIA",
        }
        for (gpu, length, rung), tflops in theirs.items()
        if rung == LAST
    ]
    values += published
    others = list(dict.fromkeys(value["rung"] for value in published))
    scale = {"domain": [*names, *others], "range": [*(known[name] for name in names), *THEIRS[: len(others)]]}
    hover = tips(rung="rung", S="S", said=unit, us="time, µs", **{"from": "from"})
    if len(lengths) == 1:
        most = max(value["rate"] for value in values)
        place = {
            "x": quantity("rate", unit, scale={"domain": [0, most * ROOM], "nice": False}),
            "y": word("rung", None, axis={"labelLimit": 220}),
        }
        height = 24 * len({value["rung"] for value in values})
        return labelled_bars(values, place, word("rung", None, scale=scale, legend=None), hover, height, dx=4)
    x = quantity("S", "sequence length S", scale=BINARY, axis={"labelExpr": SIZES["labelExpr"], "values": lengths})
    shared: Spec = {"x": x, "y": quantity("rate", unit), "color": word("rung", None, scale=scale), "tooltip": hover}
    dash = word("from", None, scale={"domain": ["measured here", "published by NVIDIA"], "range": [[1, 0], [5, 4]]})
    encoding: Spec = {**shared, "strokeDash": {**dash, "legend": None}}
    return chart(
        values, {"mark": {"type": "line", "point": True}, "encoding": encoding, "width": "container"}, height=340
    )
