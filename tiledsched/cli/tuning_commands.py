"""The commands that find schedules: tune, check, record and refresh."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tiledsched.cli import result_commands, tuned_output
from tiledsched.cli.app import (
    FILE,
    FOLDER,
    USUAL_KERNEL,
    Invocation,
    command,
    filter_option,
    generated_options,
    jobs_option,
    kernel_argument,
    made_folder,
    option,
    problem_options,
    target_option,
)
from tiledsched.cli.output import note, print_next
from tiledsched.cli.problems import matching, named_problems
from tiledsched.cli.seen_flag import by_kernel, only_arch, ranked, seen_option, select
from tiledsched.core.config import INVARIANT
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import OwnFolder
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.text import format_problem
from tiledsched.measure.runner import GRAPHS
from tiledsched.tuning.options import CHECK_ARCH, CheckOptions, RecordOptions, RefreshOptions, TuneOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiledsched.store.captured_calls import Seen
    from tiledsched.tuning.results import TuneReport


@command("tune")
@kernel_argument
@problem_options
@seen_option
@target_option
@generated_options(TuneOptions, heading="Search")
@jobs_option
@option("--report", type=FOLDER, metavar="DIR", help="also write the report with its charts to this folder")
@option(
    "--replay",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="rehearse on this recorded landscape, such as those in tuning_db/landscapes, without a GPU or a compiler; nothing is "
    "stored. May be repeated",
)
def tune(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    seen: str | None,
    arch: str | None,
    jobs: int | None,
    report: str | None,
    replay: tuple[str, ...],
    **options: Any,
) -> int:
    """Find the best schedule of each problem, and serve it from now on.

    Schedules are measured where a GPU of the arch is present. Without one a performance model ranks them, and the result is
    called modelled. What is served today always takes part, and is replaced only by what is measured to be faster. A
    second run reuses what the first built and measured.

    With `--effort quick`, at most 16 programs of each problem are measured and 8 of them race for the decision; with `default`
    64 and 16, with `thorough` 192 and 24 (without a GPU, 16, 64 or all schedules are built). `race` searches nothing: what
    is served today races the default and the rivals. `served` only measures what is served, anew in each run. With --seen,
    every problem gets a race before the most worthwhile are searched.

    \b
    tiledsched tune
    tiledsched tune --seen --budget 600
    tiledsched tune --deploy graph --beside 60
    tiledsched tune -p B=4,H=16,S=4096,D=64:128 --report report
    tiledsched tune matmul --suite llama_8b --arch h200
    """
    from tiledsched.cli.progress import TuneProgress

    chosen = TuneOptions.from_mapping(options, "tune")
    if replay:
        if run.db or report or arch or problem or suite or seen:
            raise ConfigError(
                "a replay has the problems and the arch of its files, and stores nothing; leave out -p, --suite, --seen, "
                "--arch, --db and --report"
            )
        rehearse(run, replay, chosen)
        return 0
    if seen:
        selected = select(run, seen, kernel=kernel, archs=[arch], filters=problem, suite=suite)
        return _tune_seen(run, selected, chosen, jobs, report)
    wanted = named_problems(kernel, problem, suite, every_batch=chosen.numerics == INVARIANT)
    arch = run.arch(arch)
    if chosen.budget_s is not None and chosen.budget_s < SHORT_BUDGET_S:
        note(
            f"tiledsched: a budget of {chosen.budget_s:g} s is short: of the first problem the default and what is served are "
            "built in any case, which takes about 5 s on an idle CPU"
        )
    with TuneProgress(len(wanted), chosen.budget_s) as watcher, run.session(arch, jobs) as session:
        found = session.tune(kernel, wanted, chosen, watcher=watcher, command={"words": run.words})
    files = result_commands.written_report(run, kernel, [arch], report, regime=chosen.regime) if report else []
    if run.json:
        run.print({"run": found.run_id, **tuned_output.tuned_json([found]), "files": files})
        return 0
    tuned_output.print_tuned(found)
    if files:
        tuned_output.print_report(files)
    print_next(
        _next_steps(run, found, {"arch": arch, "report": report, "db": run.db, **options, "regime": chosen.regime})
    )
    return 0


SHORT_BUDGET_S = 10.0
"""With a shorter budget, hardly more is built than must be. On two idle CPUs a tune of attention that built one program took
5.4 s; 2.5 s of CPU time are the compiler's."""


def _tune_seen(run: Invocation, found: Seen, chosen: TuneOptions, jobs: int | None, report: str | None) -> int:
    """Tune the problems that programs called, of every kernel; the exit code."""
    from tiledsched.cli.progress import TuneProgress
    from tiledsched.tuning.worth import tune_by_worth

    arch = only_arch(found)
    by_kernel(found)  # raises where no kernel is known, and says which are left out
    flags = {name: getattr(chosen, name) for name in ("regime", "accum_mode", "rivals")}
    rows = [row for row in ranked(run, found, **flags) if row.served is not None]
    rows = list({row.seen.problem: row for row in reversed(rows)}.values())[::-1]  # once for GPUs of several names
    if not rows:
        raise ConfigError(f"no kernel that was seen has a search space for {arch}; add one (docs/search-space.md)")
    open_rows = [row for row in rows if not row.is_tuned]
    with TuneProgress(len(open_rows), chosen.budget_s) as watcher, run.session(arch, jobs) as session:
        try:
            done = tune_by_worth(session, open_rows, chosen, watcher=watcher, command={"words": run.words})
        except KeyboardInterrupt:
            note("tiledsched: interrupted; what was found until now is stored. The same command goes on from there")
            raise
    tuned = len(rows) - len(open_rows)
    files = [
        file
        for each in done.reports
        if report
        for file in result_commands.written_report(
            run, each.kernel, [arch], f"{report}/{each.kernel.name}", regime=chosen.regime
        )
    ]
    if run.json:
        left = [{"problem": problem, "why": why} for problem, why in done.left.items()]
        more = {"already_tuned": tuned, "only_raced": list(done.raced), "left": left, "files": files}
        run.print({"runs": [each.run_id for each in done.reports], **tuned_output.tuned_json(done.reports), **more})
    else:
        tuned_output.print_tuned_seen(done, tuned)
        print(*files, sep="\n", end="\n" * bool(files))
    return 1 if done.left and not done.reports else 0


def rehearse(run: Invocation, files: tuple[str, ...], chosen: TuneOptions) -> None:
    """A tune over recorded landscapes, in a database that is thrown away: what it finds was measured long ago, elsewhere."""
    from tiledsched.cli.progress import TuneProgress
    from tiledsched.tuning.recording import Recording

    recording = Recording(files)
    with OwnFolder() as folder, TuneProgress(len(recording.problems), chosen.budget_s) as watcher:
        run.db, run.tools = f"{folder}/replay.db", recording.tools
        with run.session(recording.arch) as session:
            found = session.tune(recording.kernel, recording.problems, chosen, watcher=watcher)
    if run.json:
        entries = [replace(each, provenance="replayed") for each in found.entries]
        run.print(tuned_output.tuned_json([replace(found, entries=entries)]))
        return
    tuned_output.print_tuned(found, replayed=recording.device_name)


def _next_steps(run: Invocation, report: TuneReport, options: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """What to look at after a tune: a purpose, and the words of the command."""

    def flags(*names: str) -> list[str]:
        given = [(f"--{name.replace('_', '-')}", str(options[name])) for name in names if options[name] is not None]
        return [word for pair in given for word in pair]

    named = [] if run.kernel_word == USUAL_KERNEL else [run.kernel_word]
    first = ["-p", format_problem(report.entries[0].problem)]
    same = [*named, *flags("arch", "db")]
    why = ["explain", *same, *flags("accum_mode", "regime", "rivals", "space"), *first]
    steps = [("why this one, and what it beat", why)]
    if not options["report"]:
        steps.append(("which knobs matter, with charts", ["report", *same, *flags("regime"), "-o", "report"]))
    if report.measured:
        how = flags("db", *(() if options["regime"] in GRAPHS else ("regime",)))
        steps.append(("how it compares with other implementations", ["bench", *named, *how, *first]))
    elif any(result.left for result in report.results) and not any(result.more for result in report.results):
        everything = max(result.schedules + result.left for result in report.results)
        steps.append(("build the others, too", [*_without(run.words, "--trials"), "--trials", str(everything)]))
    return steps


def _without(words: Sequence[str], flag: str) -> list[str]:
    """The words of a command line without a flag and its value, which may be one word with it (`--flag=value`)."""
    kept: list[str] = []
    value_follows = False
    for word in words:
        if not value_follows and word != flag and not word.startswith(f"{flag}="):
            kept.append(word)
        value_follows = word == flag
    return kept


@command("check")
@kernel_argument
@problem_options
@option("--arch", default=CHECK_ARCH, metavar="ARCH", help=f"whose search space is used (default: {CHECK_ARCH})")
@generated_options(CheckOptions)
def check(
    run: Invocation, kernel: KernelClass, problem: tuple[str, ...], suite: str | None, arch: str, **options: Any
) -> int:
    """Run a kernel on the CPU, and compare it with its reference.

    Every output of every schedule is compared, on random and on adversarial inputs. No GPU and no compiler is needed.
    Without -p and --suite, sizes follow from the tiles that each schedule takes: several whole tiles, and a part of one.
    What could not run is listed as `not run`, with the reason. Exit code 1 if a result is wrong, or if nothing ran.

    \b
    tiledsched check my_kernel.py:MyKernel
    tiledsched check softmax -p rows=3,columns=4000 --schedules 5
    """
    from tiledsched.cli.progress import Status

    named = named_problems(kernel, problem, suite) if problem or suite else None
    by_kind = named is None and kernel.small is None
    rows = []
    with Status() as progress:
        for row in run.session(arch).check(kernel, named, CheckOptions.from_mapping(options, "check"), progress):
            rows.append(row)
            if not run.json:
                tuned_output.print_checked(row)
    run.print({"rows": rows}, lambda: tuned_output.print_checks(rows, by_kind=by_kind))
    ran = [row for row in rows if not row.skipped]
    return 0 if ran and all(row.passed for row in ran) else 1


@command("record")
@kernel_argument
@problem_options
@target_option
@generated_options(RecordOptions)
@jobs_option
@option("-o", "--out", type=FOLDER, metavar="DIR", help="folder for the landscape files")
def record(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    arch: str | None,
    jobs: int | None,
    out: str | None,
    **options: Any,
) -> None:
    """Measure many programs of each problem, for study and replay.

    The result is a landscape file for each problem and regime. What is served does not change. A run that was
    interrupted goes on where it stopped.

    \b
    tiledsched record -p B=4,H=32,S=4096,D=64 --build-only   # needs no GPU
    tiledsched record -p B=4,H=32,S=4096,D=64 -o landscapes
    """
    chosen = RecordOptions.from_mapping(options, "record")
    needs_folder(out, chosen.build_only)
    with run.session(run.arch(arch), jobs) as session:
        run_id, results = session.record(
            kernel,
            named_problems(kernel, problem, suite),
            chosen,
            folder=made_folder(out) if out else None,
            progress=note,
            on_result=(lambda result: None) if run.json else tuned_output.print_recorded,
            command={"words": run.words},
        )
    if run.json:
        run.print({"run": run_id, "problems": [tuned_output.record_result_json(result) for result in results]})


def needs_folder(out: str | None, build_only: bool) -> None:
    """Make sure that landscapes which are measured have a folder to go to.

    Raises:
        ConfigError: they have none.
    """
    if not build_only and not out:
        raise ConfigError("record needs a folder for the landscapes; pass -o DIR, or --build-only")


@command("refresh")
@kernel_argument
@filter_option
@seen_option
@target_option
@generated_options(RefreshOptions)
@jobs_option
def refresh(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    seen: str | None,
    arch: str | None,
    jobs: int | None,
    **options: Any,
) -> None:
    """Bring what is served up to date with the compiler here.

    What was measured, by you or by this package's authors, is built again with the compiler and the kernel source here. Where
    the machine code is the same, its evidence is kept; where it is not, the problem is raced again on the GPU it was
    measured on. Rivals that were not timed in this version are timed. Without that GPU nothing is raced, and nothing that is
    served changes. A new compiler may change the numbers that a schedule computes; whether it did is said for each problem
    that was raced.

    \b
    tiledsched refresh
    tiledsched refresh --seen --budget 300
    tiledsched refresh --runner none      # only say what would be raced
    """
    from tiledsched.cli.progress import TuneProgress

    chosen = RefreshOptions.from_mapping(options, "refresh")
    if seen:
        found = select(run, seen, kernel=kernel, archs=[arch], filters=problem)
        arch = only_arch(found)
        wanted = {
            each: measured_problems(run, each, arch, among=problems) for each, problems in by_kernel(found).items()
        }
    else:
        arch = run.arch(arch)
        wanted = {kernel: measured_problems(run, kernel, arch, problem)}
    reports = []
    ends = math.inf if chosen.budget_s is None else time.monotonic() + chosen.budget_s
    with TuneProgress(0, chosen.budget_s) as watcher, run.session(arch, jobs) as session:
        for each, problems in wanted.items():
            if seen and not problems:
                note(f"tiledsched: nothing of {each.name} that was seen is measured; run: tiledsched tune --seen")
                continue
            now = replace(chosen, budget_s=None if chosen.budget_s is None else max(0.0, ends - time.monotonic()))
            reports.append(session.refresh(each, problems or None, now, watcher=watcher, command={"words": run.words}))
    if run.json:
        run.print({"kernels": [each.to_json() for each in reports]} if seen else reports[0].to_json())
    else:
        for report in reports:
            tuned_output.print_refreshed(report)


def measured_problems(
    run: Invocation,
    kernel: KernelClass,
    arch: str,
    filters: tuple[str, ...] = (),
    among: Iterable[Problem] | None = None,
) -> list[Problem]:
    """The problems that were measured for an arch and that the filters let through; with `among`, only these.

    Raises:
        ConfigError: some were measured, and the filters let none of them through.
    """
    from tiledsched.serve.entries import load_entries

    entries = load_entries(run.settings(), {arch}, kernel)
    known = {entry.problem for entry in entries if entry.arch == arch and entry.provenance == "measured"}
    if among is not None:
        return [each for each in among if each in known]
    found = matching(known, filters)
    if known and not found:
        raise ConfigError("no problem that was measured matches -p; leave it out, or name less")
    return found
