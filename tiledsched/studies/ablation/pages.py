"""Writes an ablation: what each knob is worth in sentences, two charts for each problem, and all times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiledsched.core.text import change, figure, joined, longer, plural, ratio, times_as_fast
from tiledsched.report.document import Block, Chart, Heading, Paragraph, Table, write_document
from tiledsched.report.vega import BLUE, ORANGE, RED, Spec, quantity, tips, titled, word
from tiledsched.studies.ablation.ladder import LADDER, TRIED, WITHOUT, AblationRow
from tiledsched.studies.pages import first_line, labelled_bars, untimed
from tiledsched.tuning.recording import NOT_RECORDED

SMALL = 0.01
"""A knob that costs less than this when it is turned back is said to cost little."""


def write_ablation(folder: Path, rows: Sequence[AblationRow]) -> list[Path]:
    """Write ablation.html, ablation.md and the charts; returns the files written."""
    return write_document(
        folder, document(rows), title="What each knob is worth", markdown="ablation.md", page="ablation.html"
    )


def document(rows: Sequence[AblationRow]) -> list[Block]:
    """The answer for each problem, then for each problem the ladder, the knobs turned back, and all times."""
    shown = [row for row in rows if row.view != TRIED]
    timed = [row for row in shown if row.timing]
    problems = {str(problem): problem for problem in dict.fromkeys(row.problem for row in rows)}
    replayed = " They are replayed from a recording" if any(row.runner == "replay" for row in rows) else ""
    what = f"{plural(len(timed), 'time')} of {plural(len(problems), 'problem')}" + (f".{replayed}" if replayed else "")
    blocks: list[Block] = [
        Heading(text="What each knob of the tuned schedule is worth", level=1),
        first_line((row.device for row in timed), (row.taken for row in timed), what, len(timed)),
    ]
    parts = {text: [row for row in shown if row.problem == problem] for text, problem in problems.items()}
    blocks += [Paragraph(text=answer(mine), answer=True) for mine in parts.values()]
    for number, (text, mine) in enumerate(parts.items()):
        blocks += _of_problem(text, mine, f"_{number + 1}" if number else "")
    failed = [
        (str(row.problem), f"{_place(row)}: {_change(row)}", row.status)
        for row in rows
        if not row.timing and (row.view != TRIED or row.status != NOT_RECORDED)
    ]
    return blocks + untimed(("problem", "schedule", "why"), failed, folded=bool(timed))


def answer(rows: Sequence[AblationRow]) -> str:
    """What the ablation of one problem found, in sentences."""
    ladder = [row for row in rows if row.view == LADDER]
    plain, tuned = ladder[0], ladder[-1]
    lines = []
    if plain.timing and tuned.timing and plain is not tuned:
        fast, slow = tuned.timing.median_us, plain.timing.median_us
        lines.append(
            f"For {plain.problem.kernel} {plain.problem}, the tuned schedule takes {figure(fast)} µs and is "
            f"{times_as_fast(slow / fast)} as the plain one, which takes {figure(slow)} µs."
        )
    elif plain is tuned:
        lines.append(f"For {plain.problem.kernel} {plain.problem}, the plain schedule is the tuned one.")
    else:
        missing = "plain one has" if tuned.timing else "tuned one has" if plain.timing else "two have"
        lines.append(
            f"For {plain.problem.kernel} {plain.problem}, the plain and the tuned schedule cannot be compared: the {missing} "
            "no time."
        )
    steps = [row for row in ladder if row.speedup_over_previous]
    if steps:
        best = max(steps, key=lambda row: row.speedup_over_previous or 0.0)
        lines.append(
            f"The largest of {plural(len(steps), 'step')} is {_change(best)}: "
            f"{times_as_fast(best.speedup_over_previous or 1.0)} as before."
        )
    slower = [row for row in steps if (row.speedup_over_previous or 1.0) < 1 - SMALL]
    if slower:
        each = joined(f"{_change(row)} ({row.speedup_over_previous:.2f} times as fast)" for row in slower)
        lines.append(f"Before the later steps, {each} makes it slower.")
    costs = {
        row.knob: 1 / row.speedup_over_previous - 1 for row in rows if row.view == WITHOUT and row.speedup_over_previous
    }
    if costs:
        most = max(costs, key=lambda knob: costs[knob])
        lines.append(
            f"Of {plural(len(costs), 'knob')} of the tuned schedule that were turned back alone, `{most}` costs most: the "
            f"kernel then takes {longer(costs[most])}."
        )
        little = [f"`{knob}`" for knob, cost in costs.items() if cost < SMALL]
        if little:
            lines.append(f"Turned back alone, {joined(little)} {'costs' if len(little) == 1 else 'cost'} less than 1%.")
    return " ".join(lines)


def _of_problem(text: str, rows: Sequence[AblationRow], suffix: str) -> list[Block]:
    timed = [row for row in rows if row.timing]
    if not timed:
        return []
    source = f"measured on {joined(sorted({row.device for row in timed}))}"
    blocks: list[Block] = [Heading(text=text)]
    for name, title, values, spec in (
        ("ablation_ladder", "From the plain schedule to the tuned one", ladder_rows(rows), _ladder),
        ("ablation_without", "The tuned schedule with one knob turned back", without_rows(rows), _without),
    ):
        if values:
            drawn = titled(spec(values), title, text, source)
            blocks.append(Chart(name=f"{name}{suffix}", spec=drawn, text=f"{title}: {text}"))
    lines = [
        (
            f"{_place(row)}: {_change(row)}",
            figure(row.timing.median_us),
            ratio(row.speedup_over_previous),
            ratio(row.speedup_over_plain),
        )
        for row in timed
        if row.timing
    ]
    how = (
        "A speedup is a time over another: of a rung, the time of the rung before over its own; of the tuned schedule with a "
        "knob turned back, the tuned schedule's over its own. `ablation.csv` has the 95% intervals."
    )
    table = Table(head=("schedule", "µs", "speedup", "over the plain"), rows=lines)
    return [*blocks, Heading(text=f"All times: {text}", folded=True), Paragraph(text=how), table]


def ladder_rows(rows: Sequence[AblationRow]) -> list[dict[str, Any]]:
    """A row for each rung that has a time."""
    return [
        {
            "what": _change(row, "→", code=False),
            "us": round(row.timing.median_us, 2),
            "said": f"{figure(row.timing.median_us)} µs",
            "kind": "plain" if not row.rung else "rung",
        }
        for row in rows
        if row.view == LADDER and row.timing
    ]


def without_rows(rows: Sequence[AblationRow]) -> list[dict[str, Any]]:
    """A row for each knob: by how many percent the kernel takes longer once it is turned back."""
    found: list[dict[str, Any]] = [
        {"what": _change(row, "→", code=False), "percent": round((1 / row.speedup_over_previous - 1) * 100, 2)}
        for row in rows
        if row.view == WITHOUT and row.timing and row.speedup_over_previous
    ]
    return [{**row, "said": change(row["percent"] / 100)} for row in sorted(found, key=lambda row: -row["percent"])]


def _ladder(rows: list[dict[str, Any]]) -> Spec:
    most = max(row["us"] for row in rows)
    x = quantity("us", "time, µs", scale={"domain": [0, most * 1.5], "nice": False})
    colour = word("kind", None, scale={"domain": ["plain", "rung"], "range": [ORANGE, BLUE]}, legend=None)
    return _bars(rows, x, colour, tips(what="change", said="time"))


def _without(rows: list[dict[str, Any]]) -> Spec:
    values = [0.0, *(row["percent"] for row in rows)]
    room = max(max(values) - min(values), 1.0)
    domain = [min(values) - (room * 0.4 if min(values) < 0 else 0.0), max(values) + room * 0.4]
    x = quantity("percent", "how much longer the kernel takes, %", scale={"domain": domain, "nice": False})
    return _bars(rows, x, {"value": RED}, tips(what="turned back", said="takes longer by"))


def _bars(rows: list[dict[str, Any]], x: Spec, colour: Spec, hover: list[Spec]) -> Spec:
    place = {"x": x, "y": word("what", None, axis={"labelLimit": 200})}
    return labelled_bars(rows, place, colour, hover, 24 * len(rows), dx=4, fontSize=10)


def _place(row: AblationRow) -> str:
    return {LADDER: f"rung {row.rung}", WITHOUT: "turned back", TRIED: f"tried as rung {row.rung}"}[row.view]


def _change(row: AblationRow, to: str = "to", code: bool = True) -> str:
    """The knobs that change and their values: `occupancy` 0 to 2."""
    if not row.knob:
        return "the plain schedule" if row.view != TRIED else "the rung before"
    return f"{f'`{row.knob}`' if code else row.knob} {row.before} {to} {row.after}"
