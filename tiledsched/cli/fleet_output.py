"""How the state of a fleet is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.cli.output import console
from tiledsched.core.schedule import Schedule

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tiledsched.core.problem import Problem
    from tiledsched.fleet.status import FleetStatus

MOST_WORKERS, MOST_FAILURES = 40, 20
"""The most workers and failures that are listed; `--json` lists all."""


def view(status: FleetStatus) -> RenderableType:
    """How far the campaign is, its workers, how its GPUs differ, and the problems that could not be done."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(headline(status))]
    shown = [worker for worker in status.workers if worker.state != "ended" or worker.doing][:MOST_WORKERS]
    if shown:
        parts.append(_workers(status, shown))
    if len(status.workers) > len(shown):
        parts.append(
            Text(f"workers not shown: {len(status.workers) - len(shown)}, most of them ended; --json lists them")
        )
    parts += [Text(line) for line in spread_lines(status)]
    reasons = Counter((each.message, each.arch) for each in status.failures)
    for each in status.failures[:MOST_FAILURES]:
        parts.append(Text(f"not done: {each.problem} ({each.arch}), {each.attempts} attempts: {each.message}"))
    if len(status.failures) > MOST_FAILURES:
        (why, arch), count = reasons.most_common(1)[0]
        parts.append(
            Text(f"{len(status.failures) - MOST_FAILURES} more were not done; {count} of all on {arch}: {why}")
        )
    return Group(*parts)


def headline(status: FleetStatus) -> str:
    """One line that says how far the campaign is."""
    campaign = status.campaign
    words = [f"{campaign.id} {campaign.job} {campaign.kernel}: {campaign.status}, {status.done} of {status.total} done"]
    words += [
        f"{count} {what}"
        for count, what in (
            (status.leased, "running"),
            (status.failed, "failed"),
            (status.lost, "attempts made again"),
            (status.late, "late results kept"),
        )
        if count
    ]
    if status.rate_per_hour:
        words.append(f"{status.rate_per_hour:.0f} an hour")
    if status.left_s is not None:
        words.append(f"{timedelta(seconds=round(status.left_s))} left")
    return ", ".join(words)


def _workers(status: FleetStatus, shown: Sequence[Any]) -> Table:
    from rich.table import Table

    over = {each.gpu: each for each in status.spread}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("host", "GPU", "state", "done", "faults", "MHz", "C", "W", "control", "doing"):
        table.add_column(
            title,
            justify="right" if title in ("done", "faults", "MHz", "C", "W", "control") else "left",
            no_wrap=title != "doing",
        )
    for worker in shown:
        control = over.get(worker.gpu)
        deviation = "" if control is None else f"{control.over_fleet:+.1%}" + ("*" if control.named else "")
        hot = f" ({', '.join(worker.throttle_reasons)})" if worker.throttle_reasons else ""
        table.add_row(
            worker.hostname,
            f"{worker.device_name} {worker.gpu[-8:]}",
            worker.state,
            str(worker.done),
            str(worker.faults or ""),
            _number(worker.sm_clock_mhz),
            _number(worker.temperature_c),
            _number(worker.power_w),
            deviation,
            worker.doing + hot + (f" (no answer of its GPU for {worker.age_s:.0f} s)" if worker.age_s else ""),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def spread_lines(status: FleetStatus) -> list[str]:
    """How far the control program's times differ between GPUs: a line for each arch, and one for each GPU that stands out."""
    lines = []
    for arch in dict.fromkeys(each.arch for each in status.spread):
        mine = [each for each in status.spread if each.arch == arch]
        if len(mine) > 1:
            low, high = min(each.over_fleet for each in mine), max(each.over_fleet for each in mine)
            lines.append(f"control program on {len(mine)} {arch} GPUs: {low:+.1%} to {high:+.1%}")
    for each in status.odd:
        apart = "; its measurements are stored apart" if each.apart else ""
        lines.append(
            f"{each.gpu} on {each.hostname} differs: {each.over_fleet:+.1%}, its own noise {each.noise:.1%}{apart}"
        )
    return lines


def print_results(
    results: Sequence[tuple[Problem, str, dict[str, Any], str]], status: FleetStatus, files: Sequence[Path]
) -> None:
    """Print a line for each problem that was done, then how the campaign ended and what was written."""
    for problem, arch, result, _ in results:
        us = result.get("median_us") or result.get("model_us")
        words = [f"{problem} ({arch})"]
        if us:
            words.append(f"{us:.1f} us" + ("" if result.get("median_us") else " (modelled)"))
        if "schedule" in result:
            words.append(Schedule(result["schedule"]).short())
        if "landscapes" in result:
            words.append(f"{result['measured']} measured")
        print("  ".join(words))
    console().print(view(status))
    for file in files:
        print(file)


def campaign_lines(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each campaign, or how to open the first."""
    lines = [
        f"{row['campaign']} {row['command']} {row['kernel']}: {row['status']}, {row['done']} done, {row['failed']} failed, "
        f"{row['waiting'] + row['leased']} left"
        for row in rows
    ]
    return "\n".join(lines) or "there is no campaign; open one with: tiledsched fleet run tune"
