"""The commands that prepare and examine a machine: warmup and doctor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiledsched.cli.app import (
    Invocation,
    arch_option,
    argument,
    command,
    jobs_option,
    kernel_argument,
    option,
    problem_options,
)
from tiledsched.cli.output import note, print_wrapped
from tiledsched.cli.problems import named_problems, read_variants
from tiledsched.cli.seen_flag import archs_of, by_kernel, seen_option, select
from tiledsched.core.config import PROJECT_FILE
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.trust import trust
from tiledsched.store.records import BuildRecord, Entry

if TYPE_CHECKING:
    from tiledsched.build.compiler import Built
    from tiledsched.build.toolchain import Toolchain
    from tiledsched.doctor import Finding


@command("warmup")
@kernel_argument
@problem_options
@seen_option
@arch_option("which GPUs, e.g. sm_90 (default: those of the GPUs here)", many=True)
@option(
    "--also",
    default="",
    metavar="WORDS",
    help="also problems unlike those; of attention any-length, decode, dtype=bfloat16, group=1:4, with commas",
)
@option(
    "-o",
    "--out",
    type=click.Path(),
    metavar="FILE",
    help="write a bundle to this file, for machines without a compiler. In a folder, it is named by its contents",
)
@option(
    "--host-arch",
    type=click.Choice(["x86_64", "aarch64"]),
    help="with -o: processor of the machines that load the file (default: aarch64 for sm_110 and sm_121, which have no "
    "other hosts; else that of this machine)",
)
@option("--campaign", metavar="ID", help="with -o: only the problems that this campaign of a fleet did")
@jobs_option
def warmup(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    seen: str | None,
    arch: list[str] | None,
    also: str,
    out: str | None,
    host_arch: str | None,
    campaign: str | None,
    jobs: int | None,
) -> int:
    """Compile ahead what is served, so that no call has to wait.

    That is what the tuned table serves for its own problems, or for those named, tuned or not. The machine code goes to the
    cache folder, where every process of this user finds it, or with -o to a file that the variable TILEDSCHED_BUNDLE names on
    another machine. No GPU is needed. Exit code 1 if something would not build; the rest is written.

    With --also, problems unlike those are added. For attention: any-length (key lengths that no tile divides), decode (one query
    row that sees every key), dtype=bfloat16 and group=1:4 (query heads for each key head) in place of the tuned ones.

    \b
    tiledsched warmup
    tiledsched warmup -p B=4,H=32/8,S=1500:2000:3000,D=128,dtype=bfloat16
    tiledsched warmup --seen              # what your programs called
    tiledsched warmup --arch sm_90 --also any-length,decode -o attention.zip
    """
    from tiledsched.build.compiler import prepare_process
    from tiledsched.build.pool import BuildPool

    prepare_process()
    from tiledsched.serve.entries import load_entries, load_table
    from tiledsched.serve.warmup import prepare, renamed_by_contents
    from tiledsched.store.evidence import of_kernel

    variants, settings = read_variants(kernel, also), run.settings()
    device_names = {device.arch: device.name for device in run.gpus()}
    wanted: dict[tuple[KernelClass, str], list[Problem]]
    if seen:
        if also or campaign:
            raise ConfigError("--seen says which problems are meant; leave out --also and --campaign")
        found = select(run, seen, kernel=kernel, archs=arch, filters=problem, suite=suite)
        device_names.update((one.arch, one.device) for one in found.problems)
        wanted = {
            (one, name): problems
            for name in archs_of(found)
            for one, problems in by_kernel(found, arch=name, samples=True).items()
        }
    else:
        named = named_problems(kernel, problem, suite) if problem or suite else []
        wanted = {(kernel, name): named for name in run.archs(arch)}
    archs = list(dict.fromkeys(each for _, each in wanted))
    if out and len(archs) > 1:
        raise ConfigError(f"a bundle is of one arch, and here are {', '.join(archs)}; pass --arch with one of them")
    if out and len(wanted) > 1 and not os.path.isdir(out):
        names = ", ".join(each.name for each, _ in wanted)
        raise ConfigError(
            f"a bundle is of one kernel, and here are {names}; name one, or give -o a folder that is there"
        )
    if (campaign or host_arch) and not out:
        flag = "--campaign" if campaign else "--host-arch"
        raise ConfigError(f"{flag} chooses what goes to a file; pass -o FILE, too")
    entries = load_entries(settings)
    if campaign:
        entries = _done_by(run, campaign, entries)
    results = []
    with BuildPool(jobs) as pool:
        for (kernel, each), problems in wanted.items():
            session, host = run.session(each), host_arch or (out and arch_spec(each).host_arch)
            path = Path(out) if out else None
            in_folder = path is not None and os.path.isdir(path)
            done = prepare(
                each,
                path / f".{os.getpid()}.zip" if path is not None and in_folder else path,
                of_kernel(entries, kernel),
                load_table(settings, kernel=kernel),
                kernel,
                session.artifacts.for_host(host) if host else session.artifacts,
                pool,
                session.toolchain.compiler,
                settings,
                problems=problems,
                device=device_names.get(each, ""),
                likely=lambda problem: kernel.likely(problem, variants) if variants else (),  # noqa: B023  # called at once
                progress=note,
            )
            if done.lost:
                with run.open_db() as db:
                    db.record_builds([_record_of(kernel, session.toolchain, built) for built in done.lost])
            results.append(renamed_by_contents(done, kernel.name) if in_folder else done)
    run.print({"bundles": results}, "\n".join(map(str, results)))
    return 1 if any(result.failures for result in results) else 0


def _record_of(kernel: KernelClass, toolchain: Toolchain, built: Built) -> BuildRecord:
    """What is kept of a build of `warmup`, so that every process knows that its program spills or does not build."""
    from tiledsched.core.launches import problem_class

    task, outcome = built.task, built.artifact or built.failure
    assert outcome is not None
    return BuildRecord.of(
        outcome,
        kernel=kernel.name,
        source_hash=kernel.source_hash(),
        toolchain=toolchain,
        arch=task.arch,
        schedule=task.schedule,
        problem_class=problem_class(kernel, task.problem, task.schedule, arch_spec(task.arch)),
        seconds=built.seconds,
    )


def _done_by(run: Invocation, campaign: str, entries: list[Entry]) -> list[Entry]:
    """The entries of the problems that a campaign did."""
    from tiledsched.fleet.leases import Leases

    with run.open_db(read_only=True) as db:
        leases = Leases(db)
        done = {(problem, arch) for problem, arch, _, _ in leases.results(leases.campaign(campaign).id)}
    return [entry for entry in entries if (entry.problem, entry.arch) in done]


@command("trust")
@argument(
    "file",
    required=False,
    default=PROJECT_FILE,
    type=click.Path(path_type=Path),
    metavar="[FILE]",
    help=f"the file of settings (default: {PROJECT_FILE})",
)
@option("--revoke", is_flag=True, help="trust it no longer")
def trust_file(run: Invocation, file: Path, revoke: bool) -> int:
    """Let tiledsched.toml in this folder say where things go.

    Such a file may come from anybody. It names what is served and searched, but a server, or a file or folder outside its own
    folder, only once you trust it, as it is: a change has to be trusted again.

    \b
    tiledsched trust
    tiledsched trust --revoke
    """
    listed = trust(file, revoke=revoke)
    run.print(
        {"file": str(file), "trusted": not revoke, "list": str(listed)},
        f"{file} is {'no longer trusted' if revoke else 'trusted as it is'} ({listed})",
    )
    return 0


@command("doctor")
def doctor(run: Invocation) -> None:
    """Say what works on this machine, and what to install for the rest.

    \b
    tiledsched doctor
    """
    from tiledsched import doctor as examination

    found = examination.examine(examination.Machine(list_devices=run.devices, database=run.db))
    run.print(examination.to_json(found), lambda: print_findings(found, examination.overall(found)))


def print_findings(findings: Sequence[Finding], overall: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each finding, with what to do below it, and then what works here."""
    for finding in findings:
        print_wrapped(finding.detail, f"{finding.status:<7}  {finding.name:<11}  ", hanging=" " * 22)
        if finding.remedy:
            print_wrapped(finding.remedy, " " * 22 + "-> ", hanging=" " * 25)
    print()
    for name, part in overall.items():
        works = "yes" if part["works"] else "no"
        print_wrapped(f"{works} ({part['detail']})", f"{name + ':':<11} ", hanging=" " * 12)
