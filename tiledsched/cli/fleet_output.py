"""How the state of a fleet is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.cli.output import table_lines
from tiledsched.core.schedule import Schedule

if TYPE_CHECKING:
    from tiledsched.fleet.status import FleetStatus, WorkerStatus

MOST_WORKERS, MOST_FAILURES = 40, 20
"""The most workers and failures that are listed; `--json` lists all."""


def view(status: FleetStatus) -> str:
    """How far the campaign is, its workers, how its GPUs differ, and the problems that could not be done."""
    lines = [headline(status)]
    shown = [worker for worker in status.workers if worker.state != "ended" or worker.doing][:MOST_WORKERS]
    if shown:
        over = {each.gpu: f"{each.over_fleet:+.1%}" + "*" * each.named for each in status.spread}
        rows = [_worker_row(worker, over.get(worker.gpu, "")) for worker in shown]
        lines += table_lines(
            list(rows[0]), [row.values() for row in rows], ("done", "faults", "MHz", "C", "W", "control")
        )
    if len(status.workers) > len(shown):
        lines.append(f"workers not shown: {len(status.workers) - len(shown)}, most of them ended; --json lists them")
    lines += spread_lines(status)
    for each in status.failures[:MOST_FAILURES]:
        lines.append(f"not done: {each.problem} ({each.arch}), {each.attempts} attempts: {each.message}")
    if len(status.failures) > MOST_FAILURES:
        reasons = Counter((each.message, each.arch) for each in status.failures)
        (why, arch), count = reasons.most_common(1)[0]
        lines.append(f"{len(status.failures) - MOST_FAILURES} more were not done; {count} of all on {arch}: {why}")
    return "\n".join(lines)


def _worker_row(worker: WorkerStatus, control: str) -> dict[str, Any]:
    hot = f" ({', '.join(worker.throttle_reasons)})" if worker.throttle_reasons else ""
    silent = f" (no answer of its GPU for {worker.age_s:.0f} s)" if worker.age_s else ""
    return {
        "host": worker.hostname,
        "GPU": f"{worker.device_name} {worker.gpu[-8:]}",
        "state": worker.state,
        "done": worker.done,
        "faults": worker.faults or None,
        "MHz": worker.sm_clock_mhz,
        "C": worker.temperature_c,
        "W": worker.power_w and round(worker.power_w),
        "control": control,
        "doing": worker.doing + hot + silent,
    }


def headline(status: FleetStatus) -> str:
    """One line that says how far the campaign is."""
    campaign = status.campaign
    counts = {
        "running": status.leased,
        "failed": status.failed,
        "attempts made again": status.lost,
        "late results kept": status.late,
        "an hour": round(status.rate_per_hour or 0),
    }
    words = [f"{campaign.id} {campaign.job} {campaign.kernel}: {campaign.status}, {status.done} of {status.total} done"]
    words += [f"{count} {what}" for what, count in counts.items() if count]
    if status.left_s is not None:
        words.append(f"{timedelta(seconds=round(status.left_s))} left")
    return ", ".join(words)


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


def print_results(rows: Sequence[dict[str, Any]], status: FleetStatus, files: Sequence[Path]) -> None:
    """Print a line for each problem that was done, then how the campaign ended and what was written."""
    for row in rows:
        result = row["result"]
        us, how = result.get("median_us"), ""
        if us is None:
            us, how = result.get("model_us"), " (modelled)"
        words = [f"{row['problem']} ({row['arch']})"]
        if us:
            words.append(f"{us:.1f} us{how}")
        if "schedule" in result:
            words.append(Schedule(result["schedule"]).short())
        if "landscapes" in result:
            words.append(f"{result['measured']} measured")
        print("  ".join(words))
    print(view(status), *files, sep="\n")


def campaign_lines(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each campaign, or how to open the first."""
    lines = [
        f"{row['campaign']} {row['command']} {row['kernel']}: {row['status']}, {row['done']} done, {row['failed']} failed, "
        f"{row['waiting'] + row['leased']} left"
        for row in rows
    ]
    return "\n".join(lines) or "there is no campaign; open one with: tiledsched fleet run tune"
