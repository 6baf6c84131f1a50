"""Writes the ladder: the answer, a chart of rates over sequence lengths, and a line for each rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiledsched.core.problem import rate_of, unit_of
from tiledsched.core.text import NOTHING, plural
from tiledsched.report.document import Block, Chart, Heading, Paragraph, Table, write_document
from tiledsched.report.vega import BINARY, SIZES, Spec, chart, quantity, tips, titled, word
from tiledsched.rivals.rows import BenchRow
from tiledsched.studies.ladder.published import LAST, SOURCE, PublishedRate, published_for
from tiledsched.studies.ladder.summary import Rung, answer, climbed, kinds_of, longest
from tiledsched.studies.phrases import first_line

RAMP = ("#7b7fd1", "#4f86c6", "#2a9ac0", "#1fa187", "#4ac16d", "#90c62f", "#c4b000")
"""Colours of the rungs before the last, in their order."""
TOP, THEIRS = "#D55E00", ("#888888", "#b09070")
"""Colours of the last rung and of what NVIDIA published."""

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
        theirs = _published(found)
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
    found: dict[tuple[str, str, str], list[int]] = {}
    for kind, mine in kinds_of(rows).items():
        for row in mine:
            if not row.median_us:
                found.setdefault((kind, row.method, row.status), []).append(row.problem.seq_q)
    lines = [(kind, name, ", ".join(map(str, sorted(at))), why) for (kind, name, why), at in found.items()]
    if not lines:
        return []
    heading = Heading(text="What has no time", folded=any(row.median_us for row in rows))
    return [heading, Table(head=("problem", "rung", "S", "why"), rows=lines)]


def _rung_table(found: Sequence[Rung]) -> list[Block]:
    """A line for each rung: what it adds, its rate at the longest length, and its gain over the rung before."""
    length = longest(found)
    unit = next(unit_of(row.problem) for rung in found for row in rung.timed.values())
    usual = max(len(rung.gains) for rung in found)
    rows = []
    for rung in found:
        at = rung.timed.get(length) if length is not None else None
        rows.append((f"`{rung.name}`: {rung.adds}", f"{_rate(at):.1f}" if at else NOTHING, _gain(rung, usual)))
    over = (
        f"geometric mean of {usual} lengths, and in brackets the least and the most" if usual > 1 else "at one length"
    )
    text = f"The last column says how many times as fast a rung is as the one before: {over}." if usual else ""
    head = ("rung, and what it adds", f"{unit} at S={length}, measured", "gain over the rung before")
    return [*([Paragraph(text=text)] if text else []), Table(head=head, rows=rows)]


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
    return rate_of(row.problem, row.timing.median_us) if row.timing else 0.0


def _published(found: Sequence[Rung]) -> list[PublishedRate]:
    """What NVIDIA published for the problems that were timed."""
    problems = {row.problem.seq_q: row.problem for rung in found for row in rung.timed.values()}
    return [each for length in sorted(problems) for each in published_for(problems[length])]


def _published_rates(found: Sequence[Rung], theirs: Sequence[PublishedRate], device: str) -> list[Block]:
    """NVIDIA's figures beside ours, with where they stand."""
    ours = {rung.name: rung.timed for rung in found}
    known = {(each.seq, each.rung, each.gpu): each.tflops for each in theirs}
    rows = []
    for length, rung in dict.fromkeys((each.seq, each.rung) for each in theirs):
        at = ours.get(rung, {}).get(length)
        rows.append(
            (
                f"S={length}, `{rung}`",
                f"{_rate(at):.1f}" if at else NOTHING,
                *(
                    f"{known[length, rung, gpu]:.1f}" if (length, rung, gpu) in known else NOTHING
                    for gpu in ("GB10", "B300")
                ),
            )
        )
    text = (
        f"NVIDIA published rates for these problems, in TFLOP/s. They are not ours. Ours were measured on {device}. Rungs up to "
        f"`division` are those of NVIDIA's tutorial; beside `{LAST}` stand its finished kernels. Source: {SOURCE}; timed as CUDA "
        "graphs, without emptying the cache."
    )
    head = ("length and rung", "ours, measured", "GB10, published", "B300, published")
    return [Heading(text="NVIDIA's published figures", level=3), Paragraph(text=text), Table(head=head, rows=rows)]


def rates(found: Sequence[Rung], theirs: Sequence[PublishedRate] = ()) -> Spec:
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
            "rung": f"NVIDIA's on {each.gpu} (published)",
            "S": each.seq,
            "rate": round(each.tflops, 1),
            "said": f"{each.tflops:.1f}",
            "us": None,
            "from": "published by NVIDIA",
        }
        for each in theirs
        if each.rung == LAST
    ]
    values += published
    others = list(dict.fromkeys(value["rung"] for value in published))
    scale = {"domain": [*names, *others], "range": [*(known[name] for name in names), *THEIRS[: len(others)]]}
    hover = tips(rung="rung", S="S", said=unit, us="time, µs", **{"from": "from"})
    if len(lengths) == 1:
        return _bars(values, unit, scale, hover)
    x = quantity("S", "sequence length S", scale=BINARY, axis={"labelExpr": SIZES["labelExpr"], "values": lengths})
    shared = {"x": x, "y": quantity("rate", unit), "color": word("rung", None, scale=scale), "tooltip": hover}
    dash = word("from", None, scale={"domain": ["measured here", "published by NVIDIA"], "range": [[1, 0], [5, 4]]})
    mark: Mapping[str, Any] = {"type": "line", "point": True}
    return chart(
        values,
        {"mark": mark, "encoding": {**shared, "strokeDash": {**dash, "legend": None}}, "width": "container"},
        height=340,
    )


def _bars(values: list[dict[str, Any]], unit: str, scale: Spec, hover: list[Spec]) -> Spec:
    y = word("rung", None, axis={"labelLimit": 220})
    most = max(value["rate"] for value in values)
    x = quantity("rate", unit, scale={"domain": [0, most * ROOM], "nice": False})
    layers = [
        {
            "mark": "bar",
            "encoding": {"x": x, "y": y, "color": word("rung", None, scale=scale, legend=None), "tooltip": hover},
        },
        {
            "mark": {"type": "text", "align": "left", "dx": 4},
            "encoding": {"x": x, "y": y, "text": {"field": "said", "type": "nominal"}},
        },
    ]
    return chart(values, {"layer": layers, "width": "container"}, height=24 * len({value["rung"] for value in values}))
