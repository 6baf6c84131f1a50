"""The commands of a fleet: those of one GPU, opened as a campaign and worked on here, on Ray, or by whoever runs `fleet work`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.cli import fleet_output, output
from tiledsched.cli.commands import _folder, _measured, _print_json, _problems, _said, _settings, _written_report
from tiledsched.core.errors import ConfigError

if TYPE_CHECKING:
    from tiledsched.fleet.campaign import CampaignPlan
    from tiledsched.fleet.leases import Leases
    from tiledsched.fleet.status import FleetStatus
    from tiledsched.store.db import TuningDB

TUNE = (
    "effort",
    "trials",
    "sampler",
    "neighbours",
    "seed",
    "regime",
    "accum_mode",
    "runner",
    "space",
    "candidates",
    "storage",
    "compile_timeout",
)
RECORD = ("programs", "sustained_leaders", "build_only", "accum_mode", "space", "seed", "compile_timeout")
REFRESH = ("effort", "neighbours", "runner", "seed", "compile_timeout")
BENCH = ("methods", "ceiling", "regime", "rounds", "verify")
"""The flags of each command that its function takes."""
WATCH_S = 2.0


def tune(options: argparse.Namespace) -> int:
    """`tune` over a fleet."""
    return _run(options, _plan(options, "tune", TUNE), report=options.report)


def record(options: argparse.Namespace) -> int:
    """`record` over a fleet; the landscapes are written here, at the end."""
    if not options.build_only and not options.out and not options.open_only:
        raise ConfigError("record needs a folder for the landscapes; pass --out DIR, or --build-only")
    return _run(options, _plan(options, "record", RECORD), landscapes=options.out)


def refresh(options: argparse.Namespace) -> int:
    """`refresh` over a fleet."""
    from tiledsched.fleet.leases import expected

    archs = _archs(options)
    planned = _plan(options, "refresh", REFRESH, problems=[each for arch in archs for each in _measured(options, arch)])
    by_arch = {arch: expected(_measured(options, arch)) for arch in archs}  # what there is differs from arch to arch
    return _run(options, dataclasses.replace(planned, problems=by_arch))


def bench(options: argparse.Namespace) -> int:
    """`bench` over a fleet; rows are written here, at the end."""
    from tiledsched.bench.methods import choose_methods

    if options.summary or options.resume:
        raise ConfigError("a fleet goes on by itself, and has no summary of files; use tiledsched bench --summary")
    if options.csv and Path(options.csv).exists():
        raise ConfigError(f"{options.csv} is there already; choose another file")
    planned = _plan(options, "bench", BENCH)
    problems = next(iter(planned.problems.values()))
    # A wrong name would fail every problem, on every host.
    choose_methods(options.declaration, options.methods, problems)
    return _run(options, planned, csv=options.csv)


def _archs(options: argparse.Namespace) -> list[str]:
    from tiledsched.measure.nvml import devices

    archs = options.arch or sorted({device.arch for device in devices()})
    if not archs:
        raise ConfigError("there is no GPU here to tell the arch by; pass --arch, e.g. --arch sm_90,sm_100")
    return list(archs)


def _plan(options: argparse.Namespace, command: str, names: tuple[str, ...], problems: Any = None) -> CampaignPlan:
    from tiledsched.fleet.run import Limits, plan

    given = {name: getattr(options, name) for name in names}
    if "compile_timeout" in given:
        given["compile_timeout_s"] = given.pop("compile_timeout")
    limits = Limits(
        lease_s=options.lease, deadline_s=options.deadline, most_attempts=options.attempts, budget_s=options.budget
    )
    return plan(
        command, options.declaration, problems or _problems(options), _archs(options), options=given, limits=limits
    )


def _run(
    options: argparse.Namespace,
    planned: CampaignPlan,
    *,
    report: str | None = None,
    landscapes: str | None = None,
    csv: str | None = None,
) -> int:
    """See a campaign through, then write what was asked for; exit code 1 where something could not be done."""
    from tiledsched.fleet.leases import Leases
    from tiledsched.fleet.run import run, where
    from tiledsched.store.db import TuningDB

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    url = where(options.db or _settings(options).db)
    folder = _folder(landscapes) if landscapes else None
    if options.open_only:
        with TuningDB.open(url) as db:
            opened = Leases(db).open(planned)
        _said(options, {"campaign": opened.id}, opened.id)
        return 0
    status = run(
        planned,
        db=url,
        ray_address=options.ray_address,
        without_gpu=_places(options),
        jobs=getattr(options, "jobs", None),
        say=output.note,
    )
    with TuningDB.open(url) as db:
        results = Leases(db).results(status.campaign.id)
        files = [str(path) for path in _written_report(options, report)] if report else []
        files += _write_landscapes(db, results, folder) if folder else []
        files += _write_rows(results, Path(csv)) if csv else []
    if options.json:
        rows = [
            {"problem": problem.to_json(), "arch": arch, "worker": worker, "result": result}
            for problem, arch, result, worker in results
        ]
        _print_json({**status.to_json(), "rows": rows, "files": files})
    else:
        fleet_output.print_results(results)
        fleet_output.print_status(status)
        for file in files:
            print(file)
    return 0 if status.campaign.status == "done" and not status.failed else 1


def _places(options: argparse.Namespace) -> int:
    """Places without a GPU: as many as were asked for; where the command needs none, one."""
    needs_none = getattr(options, "runner", "") == "none" or getattr(options, "build_only", False)
    return int(options.workers) or int(needs_none)


def _write_landscapes(db: TuningDB, results: Any, folder: Path) -> list[str]:
    from tiledsched.store.exchange import export_landscape, landscape_file_name

    files = []
    for problem, _, result, _ in results:
        for each in result.get("landscapes", ()):
            path = folder / landscape_file_name(problem, each["device"], each["regime"])
            export_landscape(db, path, problem, each["device"], each["regime"])
            files.append(str(path))
    return files


def _write_rows(results: Any, path: Path) -> list[str]:
    from tiledsched.bench.rows import BenchRow, append_rows

    for _, _, result, _ in results:
        cells = [
            {name: "" if value is None else str(value) for name, value in row.items()} for row in result.get("rows", ())
        ]
        append_rows([BenchRow.from_csv(row) for row in cells], path)
    return [str(path)]


def work(options: argparse.Namespace) -> int:
    """Work on what there is to do."""
    from tiledsched.fleet.local import work as worked
    from tiledsched.fleet.run import where

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    done = worked(
        where(options.db),
        options.campaign,
        without_gpu=options.workers,
        jobs=options.jobs,
        wait_s=options.wait,
        say=output.note,
    )
    for note in done.notes:
        output.note(note)
    text = (
        f"worked on {', '.join(done.campaigns)} with {done.gpus} GPUs" if done.campaigns else "no campaign is running"
    )
    _said(options, {"campaigns": list(done.campaigns), "gpus": done.gpus, "notes": list(done.notes)}, text)
    return 1 if done.notes and len(done.notes) >= done.gpus else 0


def status(options: argparse.Namespace) -> int:
    """Say how far a campaign is, once or until it ends."""
    from tiledsched.fleet.leases import Leases
    from tiledsched.fleet.run import where
    from tiledsched.fleet.status import read_status
    from tiledsched.store.db import TuningDB

    with TuningDB.open(where(options.db), read_only=True) as db:
        leases = Leases(db)
        campaigns = leases.campaigns()
        if options.all or not campaigns:
            rows = [
                {
                    "campaign": each.id,
                    "command": each.job,
                    "kernel": each.kernel,
                    "status": each.status,
                    **leases.counts(each.id),
                }
                for each in campaigns
            ]
            _said(options, {"campaigns": rows}, fleet_output.campaigns(rows))
            return 0
        wanted = options.campaign or campaigns[0].id
        if options.watch and not options.json:
            return _watch(leases, wanted)
        while True:
            found = read_status(leases, wanted)
            if options.json:
                _print_json(found.to_json())
            else:
                fleet_output.print_status(found)
            if not options.watch or found.campaign.status != "running":
                return _code(found)
            time.sleep(WATCH_S)


def _watch(leases: Leases, campaign_id: str) -> int:
    from rich.live import Live

    from tiledsched.fleet.status import read_status

    with Live(console=output.console(), auto_refresh=False) as live:
        while True:
            found = read_status(leases, campaign_id)
            live.update(fleet_output.view(found), refresh=True)
            if found.campaign.status != "running":
                return _code(found)
            time.sleep(WATCH_S)


def _code(found: FleetStatus) -> int:
    return 1 if found.campaign.status == "done" and found.failed else 0


def stop(options: argparse.Namespace) -> int:
    """Let workers end with what they hold."""
    from tiledsched.fleet.leases import Leases
    from tiledsched.fleet.run import where
    from tiledsched.store.db import TuningDB

    with TuningDB.open(where(options.db)) as db:
        leases = Leases(db)
        campaign = leases.campaign(options.campaign)
        leases.stop(campaign.id)
    _said(
        options,
        {"campaign": campaign.id, "status": "stopped"},
        f"{campaign.id} is stopped; the command that opened it goes on with it",
    )
    return 0
