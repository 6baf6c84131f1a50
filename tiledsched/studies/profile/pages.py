"""Writes profiles side by side, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Sequence

from tiledsched.core.files import csv_text
from tiledsched.core.problem import Problem
from tiledsched.report.document import Block, Heading, Paragraph, Table, to_markdown
from tiledsched.studies.profile.metrics import METRICS, MethodProfile, over

STALLS_SHOWN = 6


def to_text(problem: Problem, profiles: Sequence[MethodProfile], *, device: str = "", versions: str = "") -> str:
    """Markdown: the metrics with a column for each method, what the warps waited for, and the kernels."""
    ran = [each for each in profiles if each.kernels]
    where = f" on {device}" if device else ""
    blocks: list[Block] = [
        Heading(text=f"{problem}{where}", level=1),
        Paragraph(
            text="One call of each method under Nsight Compute, its caches flushed before, clocks left alone. Counters are "
            "read in several passes, so the duration is for comparing, not for quoting: `tiledsched bench` times. "
            "What is still in L2 when the call ends was not written to DRAM, which may so move less than the least."
        ),
    ]
    if versions:
        blocks.append(Paragraph(text=versions))
    rows = [(metric.label, *(_said(each.value(metric)) for each in ran)) for metric in METRICS]
    rows += [
        (f"{label}, over the least possible", *(_times(over(each, kind, problem.min_bytes)) for each in ran))
        for kind, label in (("l2", "through L2"), ("dram", "DRAM"))
    ]
    blocks.append(Table(head=["", *(each.method for each in ran)], rows=rows))
    reasons = list(dict.fromkeys(reason for each in ran for reason in list(each.stalls())[:STALLS_SHOWN]))
    if reasons:
        blocks += [
            Heading(text="What warps wait for"),
            Paragraph(text="Warps stalled for each reason, per instruction issued."),
            Table(
                head=["reason", *(each.method for each in ran)],
                rows=[(reason, *(_said(each.stalls().get(reason)) for each in ran)) for reason in reasons],
            ),
        ]
    kernels = [
        (each.method, f"`{one.name[:100]}`", _said(one.values.get("gpu__time_duration.sum", 0) / 1e3))
        for each in ran
        for one in each.kernels
    ]
    blocks += [Heading(text="Kernels"), Table(head=("method", "kernel", "µs"), rows=kernels)]
    failed = [(each.method, each.status) for each in profiles if not each.kernels]
    if failed:
        blocks += [Heading(text="Not profiled"), Table(head=("method", "why"), rows=failed)]
    return to_markdown(blocks)


def to_csv(problem: Problem, profiles: Sequence[MethodProfile], *, device: str = "", versions: str = "") -> str:
    """CSV text with a row for each method."""
    rows = [
        {"problem": str(problem), "device": device, "versions": versions, **each.to_csv(problem.min_bytes)}
        for each in profiles
    ]
    return csv_text(rows)


def _said(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
