"""Writes profiles side by side: as a page, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiledsched.core.files import csv_text
from tiledsched.core.problem import Problem
from tiledsched.core.text import figure, joined, longer, plural, ratio
from tiledsched.report.document import Block, Chart, Heading, Paragraph, Table, to_markdown, write_document
from tiledsched.report.vega import BLUE, GREEN, ORANGE, RED, Spec, quantity, tips, titled, word
from tiledsched.studies.pages import labelled_bars
from tiledsched.studies.profile.metrics import METRICS, STALLS, TIME, MethodProfile, over

STALLS_SHOWN = 6
MOST_METHODS = 5
"""Methods side by side in a table; more stand in further tables."""
SHARES = ("sm_throughput_pct", "memory_throughput_pct", "tensor_pipe_pct", "occupancy_pct")
"""Metrics in percent of what the GPU can do."""
COLOURS = (RED, BLUE, GREEN, ORANGE, "#CC79A7", "#56B4E9", "#999999", "#F0E442")
NOTE = (
    "Counters are read in several passes over the same call, with its caches flushed before and clocks left alone, so that the "
    "durations are for comparing, not for quoting: `tiledsched bench` times. What is still in L2 when the call ends was not "
    "written to DRAM, which may therefore move less than the least possible."
)


def write_profile(
    folder: Path, problem: Problem, profiles: Sequence[MethodProfile], *, device: str = "", versions: str = ""
) -> list[Path]:
    """Write profile_ID.html, .md and .csv and the charts of a problem, ID being the problem's; returns the files written."""
    name = f"profile_{problem.id}"
    return write_document(
        folder,
        document(problem, profiles, device=device, versions=versions, name=name),
        title=f"Profile of {problem.kernel} {problem}",
        markdown=f"{name}.md",
        page=f"{name}.html",
        more={f"{name}.csv": to_csv(problem, profiles, device=device, versions=versions)},
    )


def to_text(problem: Problem, profiles: Sequence[MethodProfile], *, device: str = "", versions: str = "") -> str:
    """The document as Markdown, without its charts."""
    return to_markdown(document(problem, profiles, device=device, versions=versions))


def document(
    problem: Problem, profiles: Sequence[MethodProfile], *, device: str = "", versions: str = "", name: str = "profile"
) -> list[Block]:
    """How the methods compare in sentences, two charts, and all figures with a column for each method."""
    ran = [each for each in profiles if each.kernels]
    blocks: list[Block] = [Heading(text=f"{problem}{f' on {device}' if device else ''}", level=1)]
    blocks.append(_first_line(ran, device, versions))
    if ran:
        blocks.append(Paragraph(text=answer(problem, ran), answer=True))
    source = f"measured{f' on {device}' if device else ''} under Nsight Compute"
    charts = (
        ("use", "How much of the GPU each method uses", share_rows(ran), "% of what the GPU can do"),
        ("stalls", "What warps wait for", stall_rows(ran), "warps waiting per instruction"),
    )
    for part, heading, rows, title in charts:
        if rows:
            spec = titled(_bars(rows, title, [each.method for each in ran]), heading, str(problem), source)
            blocks.append(Chart(name=f"{name}_{part}", spec=spec, text=heading))
    failed = [(each.method, each.status) for each in profiles if not each.kernels]
    if failed:
        blocks += [Heading(text="Not profiled"), Table(head=("method", "why"), rows=failed)]
    if ran:
        blocks += [Heading(text="All figures", folded=True), *_figures(problem, ran), Paragraph(text=NOTE)]
        kernels = [
            (each.method, f"`{one.name[:100]}`", figure(one.values.get(TIME.names[0], 0) / 1e3))
            for each in ran
            for one in each.kernels
        ]
        blocks += [Heading(text="Kernels", folded=True), Table(head=("method", "kernel", "µs"), rows=kernels)]
    return blocks


def _first_line(ran: Sequence[MethodProfile], device: str, versions: str) -> Paragraph:
    told = f" ({versions})" if versions else ""
    if not ran:
        return Paragraph(text=f"Nothing was measured: no method ran under Nsight Compute{told}.", warning=True)
    where = f" on {device}" if device else ""
    calls = f"one call of {'each of ' if len(ran) > 1 else ''}{plural(len(ran), 'method')}"
    return Paragraph(text=f"Measured{where} under Nsight Compute{told}: {calls}.", measured=True)


def answer(problem: Problem, ran: Sequence[MethodProfile]) -> str:
    """How the methods compare, in sentences; the others with the first."""
    first, *others = ran
    values = {metric.column: metric for metric in METRICS}
    lines = []
    if mine := first.value(TIME):
        line = f"Under the profiler `{first.method}` takes {figure(mine)} µs"
        ratios = [(each.method, each.value(TIME)) for each in others]
        beside = [f"`{method}` {longer(us / mine - 1)}" for method, us in ratios if us]
        lines.append(f"{line}; {joined(beside)}." if beside else f"{line}.")
    tensor = [(each.method, each.value(values["tensor_pipe_pct"])) for each in ran]
    moved = [(each.method, over(each, "dram", problem.min_bytes)) for each in ran]
    waits = [(each.method, next(iter(each.stalls()), "")) for each in ran]
    sentences = {
        "The tensor cores are busy": [
            f"{value:.0f}% of the time in `{name}`" for name, value in tensor if value is not None
        ],
        "DRAM moves the least possible number of bytes": [
            f"{value:.2f} times in `{name}`" for name, value in moved if value is not None
        ],
        "Warps wait most": [f"in `{name}` for {STALLS[reason]}" for name, reason in waits if reason],
    }
    lines += [f"{what} {joined(words)}." for what, words in sentences.items() if words]
    spilled = [(each.method, each.value(values["spilled_mib"])) for each in ran]
    lines += [f"`{method}` spills registers: {figure(mib)} MiB." for method, mib in spilled if mib]
    return " ".join(lines)


def share_rows(ran: Sequence[MethodProfile]) -> list[dict[str, Any]]:
    """How much of the GPU each method uses, in percent; what the profiler did not report is left out."""
    return [
        {"what": metric.label.partition(",")[0], "method": each.method, **_number(value)}
        for metric in METRICS
        if metric.column in SHARES
        for each in ran
        if (value := each.value(metric)) is not None
    ]


def stall_rows(ran: Sequence[MethodProfile]) -> list[dict[str, Any]]:
    """What the warps of each method wait for: the reasons that are among the largest of any method."""
    return [
        {"what": STALLS[reason], "method": each.method, **_number(value)}
        for reason in _reasons(ran)
        for each in ran
        if (value := each.stalls().get(reason)) is not None
    ]


def _number(value: float) -> dict[str, Any]:
    return {"value": float(f"{value:.5g}"), "said": f"{value:.3g}"}


def _reasons(ran: Sequence[MethodProfile]) -> list[str]:
    return list(dict.fromkeys(reason for each in ran for reason in list(each.stalls())[:STALLS_SHOWN]))


def _bars(rows: list[dict[str, Any]], title: str, methods: Sequence[str]) -> Spec:
    """A bar for each method in each row, with its value at its end."""
    range_ = [COLOURS[place % len(COLOURS)] for place in range(len(methods))]
    colour = word("method", None, scale={"domain": list(methods), "range": range_}, legend={"orient": "bottom"})
    most = max(row["value"] for row in rows) or 1.0
    place = {
        "y": word("what", None, axis={"labelLimit": 190}),
        "yOffset": {"field": "method", "sort": list(methods)},
        "x": quantity("value", title, scale={"domain": [0, most * 1.3], "nice": False}),
    }
    hover = tips(what="what", method="method", value=title)
    height = len({row["what"] for row in rows}) * (len(methods) * 14 + 8)
    return labelled_bars(rows, place, colour, hover, height, dx=3, fontSize=9.5)


def _figures(problem: Problem, ran: Sequence[MethodProfile]) -> list[Block]:
    """All metrics, with a column for each method; a few methods to a table."""
    tables: list[Block] = []
    for start in range(0, len(ran), MOST_METHODS):
        some = ran[start : start + MOST_METHODS]
        rows = [(metric.label, *(figure(each.value(metric)) for each in some)) for metric in METRICS]
        rows += [
            (f"{label}, over the least possible", *(ratio(over(each, kind, problem.min_bytes)) for each in some))
            for kind, label in (("l2", "through L2"), ("dram", "DRAM"))
        ]
        rows += [
            (f"waiting for {STALLS[reason]} (`{reason}`)", *(figure(each.stalls().get(reason)) for each in some))
            for reason in _reasons(ran)
        ]
        tables.append(Table(head=["", *(each.method for each in some)], rows=rows))
    return tables


def to_csv(problem: Problem, profiles: Sequence[MethodProfile], *, device: str = "", versions: str = "") -> str:
    """CSV text with a row for each method."""
    rows = [
        {"problem": str(problem), "device": device, "versions": versions, **each.to_csv(problem.min_bytes)}
        for each in profiles
    ]
    return csv_text(rows)
