"""The commands of a fleet: run opens a campaign and works on it, work helps with one, status watches and stops it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiledsched.cli import bench_commands, fleet_output, output, result_commands, seen_flag
from tiledsched.cli.app import (
    Command,
    CommandGroup,
    Integer,
    Invocation,
    Seconds,
    arch_option,
    argument,
    command,
    jobs_option,
    made_folder,
    option,
)
from tiledsched.cli.problems import named_problems
from tiledsched.cli.tuning_commands import measured_problems, needs_folder, record, refresh, tune
from tiledsched.core.errors import ConfigError, did_you_mean
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.fleet.campaign import DEADLINE_S, LEASE_S, MOST_ATTEMPTS, CampaignPlan, Limits

if TYPE_CHECKING:
    from tiledsched.store.db import TuningDB

SINGLE: dict[str, Command] = {"tune": tune, "record": record, "refresh": refresh, "bench": bench_commands.bench}
"""The commands that a fleet can run."""
HERE = (
    "kernel",
    "problem",
    "suite",
    "seen",
    "arch",
    "jobs",
    "report",
    "replay",
    "out",
    "csv",
    "summary",
    "budget",
    "budget_s",
)
"""Parameters of those commands that the machine which opens a campaign takes care of; the others go to its workers."""
workers_option = option(
    "--workers",
    type=Integer(0),
    default=0,
    metavar="N",
    help="work without GPUs, on so many problems at a time on each node: only builds and the model's ranking",
)


class RunCommand(Command):
    """`fleet run`, whose help shows the flags of the command that it is to run, too."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write both commands' parameters."""
        super().format_options(ctx, formatter)
        for name in SINGLE.keys() & set(ctx.meta["tiledsched.words"]):
            with formatter.section(f"And those of {name}"):
                SINGLE[name].format_options(ctx, formatter)


@command("run", cls=RunCommand, context_settings={"ignore_unknown_options": True})
@argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND ...", help=f"{', '.join(SINGLE)}, and its parameters"
)
@arch_option("which GPUs, e.g. sm_90,sm_100 or h200 (default: those of the GPUs here)", many=True)
@option(
    "--ray-address",
    metavar="ADDRESS",
    help="use every GPU of this Ray cluster: auto, HOST:PORT or local (default: the GPUs of this host)",
)
@option("--open-only", is_flag=True, help="only open the campaign; `tiledsched fleet work` does the rest")
@workers_option
@option(
    "--lease",
    type=Seconds(),
    default=LEASE_S,
    metavar="SECONDS",
    help=f"a worker that is silent for so long has lost its problem (default: {LEASE_S:g})",
)
@option(
    "--deadline",
    type=Seconds(),
    default=DEADLINE_S,
    metavar="SECONDS",
    help=f"an attempt that takes longer is killed (default: {DEADLINE_S:g})",
)
@option(
    "--attempts",
    type=Integer(1),
    default=MOST_ATTEMPTS,
    metavar="N",
    help=f"attempts at one problem (default: {MOST_ATTEMPTS})",
)
def run_fleet(
    run: Invocation,
    words: tuple[str, ...],
    arch: list[str] | None,
    ray_address: str | None,
    open_only: bool,
    workers: int,
    lease: float,
    deadline: float,
    attempts: int,
) -> int:
    """Tune, record, refresh or bench on many GPUs and hosts.

    Every problem is leased to one worker at a time, through the database. A worker, a host or this command may die:
    the same command goes on with the campaign. Flags of the command that is run stand beside these. Exit code 1 if a problem
    could not be done.

    \b
    tiledsched fleet run tune --suite llama
    tiledsched fleet run tune matmul --arch sm_90,sm_100 --ray-address auto
    tiledsched fleet run bench --csv rows.csv --open-only
    """
    from tiledsched.fleet.leases import Leases
    from tiledsched.fleet.running import run as run_campaign

    name, *rest = words or ("",)
    if name not in SINGLE:
        raise ConfigError(
            f"a fleet runs {', '.join(SINGLE)}, not {name or 'nothing'}{did_you_mean(name, SINGLE)}; "
            "see tiledsched fleet run --help"
        )
    with SINGLE[name].make_context(
        f"fleet run {name}", rest, parent=click.get_current_context().find_root()
    ) as context:
        given = context.params
    if given.get("replay"):
        raise ConfigError("a fleet measures and does not replay; rehearse with: tiledsched tune --replay FILE")
    if name == "record" and not open_only:
        needs_folder(given["out"], given["build_only"])
    limits = Limits(lease_s=lease, deadline_s=deadline, most_attempts=attempts)
    planned = _plan(run, name, given, run.archs(arch), limits)
    if open_only:
        with run.open_db() as db:
            opened = Leases(db).open(planned)
        run.print({"campaign": opened.id}, opened.id)
        return 0
    folder = made_folder(given["out"]) if given.get("out") else None
    needs_none = given.get("runner") == "none" or given.get("build_only")
    status = run_campaign(
        planned,
        db=run.db,
        ray_address=ray_address,
        without_gpu=workers or int(bool(needs_none)),
        jobs=given.get("jobs"),
        say=output.note,
    )
    with run.open_db() as db:
        results = Leases(db).results(status.campaign.id)
        files = _write_landscapes(db, results, folder) if folder else []
    if given.get("report"):
        files += result_commands.written_report(
            run, given["kernel"], list(planned.problems), given["report"], regime=planned.options.get("regime")
        )
    if given.get("csv"):
        files.append(_write_rows(results, Path(given["csv"])))
    rows = [
        {"problem": problem, "arch": arch, "worker": worker, "result": result}
        for problem, arch, result, worker in results
    ]
    found = {**status.to_json(), "rows": rows, "files": files}
    run.print(found, lambda: fleet_output.print_results(rows, status, files))
    return 0 if status.campaign.status == "done" and not status.failed else 1


def _plan(run: Invocation, name: str, given: dict[str, Any], archs: list[str], limits: Limits) -> CampaignPlan:
    """The campaign of a command: its problems on each arch."""
    from tiledsched.fleet.leases import expected
    from tiledsched.fleet.running import plan
    from tiledsched.ops.bench import choose_methods

    kernel: KernelClass = given["kernel"]
    problems: list[Problem] = []
    by_arch: dict[str, list[Problem]] | None = None
    if given.get("seen"):
        by_arch = _seen_by_arch(run, name, given, archs)
    elif name == "refresh":  # what is measured differs from arch to arch
        by_arch = {arch: expected(measured_problems(run, kernel, arch, given["problem"])) for arch in archs}
    else:
        problems = named_problems(kernel, given["problem"], given["suite"])
    if name == "bench":
        if given["summary"]:
            raise ConfigError("a fleet sums up no files; leave out --summary")
        if given["csv"] and os.path.exists(given["csv"]):
            raise ConfigError(f"{given['csv']} is there already; choose another file")
        choose_methods(kernel, given["methods"], problems)  # a wrong name would fail every problem on every host
    return plan(
        name,
        kernel,
        problems,
        archs,
        options={key: value for key, value in given.items() if key not in HERE},
        limits=limits,
        budget_s=given.get("budget", given.get("budget_s")),
        by_arch=by_arch,
    )


def _seen_by_arch(run: Invocation, name: str, given: dict[str, Any], archs: list[str]) -> dict[str, list[Problem]]:
    """What `--seen` means of a campaign's one kernel: what was seen on each arch, most worthwhile first."""
    kernel, suite = given["kernel"], given.get("suite")
    found = seen_flag.select(run, given["seen"], kernel=kernel.name, archs=archs, filters=given["problem"], suite=suite)
    by_arch: dict[str, list[Problem]] = {arch: [] for arch in archs}
    for row in seen_flag.ranked(run, found):
        by_arch[row.seen.arch].append(row.seen.problem)
    if name == "refresh":
        return {arch: measured_problems(run, kernel, arch, among=problems) for arch, problems in by_arch.items()}
    return by_arch


def _write_landscapes(db: TuningDB, results: Any, folder: Path) -> list[Path]:
    from tiledsched.store.exchange import export_landscape, landscape_file_name

    files = []
    for problem, _, result, _ in results:
        for each in result.get("landscapes", ()):
            files.append(folder / landscape_file_name(problem, each["device"], each["regime"]))
            export_landscape(db, files[-1], problem, each["device"], each["regime"])
    return files


def _write_rows(results: Any, path: Path) -> Path:
    from tiledsched.rivals.rows import BenchRow, append_rows

    for _, _, result, _ in results:
        cells = [
            {name: "" if value is None else str(value) for name, value in row.items()} for row in result.get("rows", ())
        ]
        append_rows([BenchRow.from_csv(row) for row in cells], path)
    return path


@command("work")
@argument("campaign", required=False, help="only this campaign (default: all that are running)")
@option(
    "--wait",
    type=Seconds(),
    default=0.0,
    metavar="SECONDS",
    help="how long to wait for a campaign (default: not at all)",
)
@workers_option
@jobs_option
def work(run: Invocation, campaign: str | None, wait: float, workers: int, jobs: int | None) -> int:
    """Work on campaigns with the GPUs of this host.

    It ends when nothing is left to do. This is what a Slurm array or a Kubernetes job runs on each host.

    \b
    tiledsched fleet work --db postgresql://host/tiledsched
    """
    from tiledsched.fleet.local import work as work_here
    from tiledsched.fleet.running import where

    done = work_here(where(run.db), campaign, without_gpu=workers, jobs=jobs, wait_s=wait, say=output.note)
    for each in done.notes:
        output.note(each)
    text = "no campaign is running"
    if done.campaigns:
        text = f"worked on {', '.join(done.campaigns)} with {done.gpus} GPUs"
    run.print({"campaigns": list(done.campaigns), "gpus": done.gpus, "notes": list(done.notes)}, text)
    return 1 if done.notes and len(done.notes) >= done.gpus else 0


@command("status")
@argument("campaign", required=False, help="which campaign (default: the newest)")
@option("--all", "everything", is_flag=True, help="list all campaigns")
@option(
    "--stop", is_flag=True, help="let workers end with what they are doing; the command that opened it goes on later"
)
def status(run: Invocation, campaign: str | None, everything: bool, stop: bool) -> int:
    """Say how far a campaign is, on which GPUs, and what failed.

    Exit code 1 if a problem could not be done.

    \b
    tiledsched fleet status
    tiledsched fleet status 3f2a --stop
    """
    from tiledsched.fleet.leases import Leases
    from tiledsched.fleet.status import read_status

    with run.open_db(read_only=not stop) as db:
        leases = Leases(db)
        campaigns = leases.campaigns()
        if everything or not campaigns:
            rows = [
                {"campaign": each.id, "command": each.job, "kernel": each.kernel, "status": each.status}
                | leases.counts(each.id)
                for each in campaigns
            ]
            run.print({"campaigns": rows}, fleet_output.campaign_lines(rows))
            return 0
        wanted = leases.campaign(campaign).id if campaign else campaigns[0].id
        if stop:
            leases.stop(wanted)
            text = f"{wanted} is stopped; the command that opened it goes on with it"
            run.print({"campaign": wanted, "status": "stopped"}, text)
            return 0
        found = read_status(leases, wanted)
    run.print(found.to_json(), fleet_output.view(found))
    return 1 if found.campaign.status == "done" and found.failed else 0


fleet = CommandGroup(
    "fleet",
    help="Tune, record, refresh or bench on many GPUs and hosts.",
    sections={"Commands": [run_fleet, work, status]},
)
