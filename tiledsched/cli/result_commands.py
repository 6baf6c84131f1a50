"""The commands that show what is known: show, explain, report and compare."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiledsched.cli import seen_flag, served_output
from tiledsched.cli.app import (
    FILE,
    FOLDER,
    USUAL_ARCH,
    CommaList,
    Invocation,
    Number,
    arch_option,
    argument,
    command,
    filter_option,
    generated_options,
    kernel_argument,
    kernel_filter,
    kernel_option,
    option,
    problem_options,
    target_option,
)
from tiledsched.cli.output import note, print_explained, print_next
from tiledsched.cli.problems import matching, named_problems
from tiledsched.core import data_files, errors, registry, text
from tiledsched.core.config import INVARIANT
from tiledsched.core.device import ARCHS
from tiledsched.core.files import write_whole
from tiledsched.core.problem import VERSIONED, KernelClass, Problem, missing_on
from tiledsched.measure.nvml import UNNAMED
from tiledsched.measure.runner import LAUNCHED, REGIMES
from tiledsched.store.captured_calls import clear_seen
from tiledsched.store.location import database_exists
from tiledsched.store.records import PROVENANCES
from tiledsched.tuning.options import TuneOptions

if TYPE_CHECKING:
    from tiledsched.report.compare import Comparison

MOST_ENTRIES = 20
"""So many entries are listed without a filter where no GPU is here; of more there is a summary."""
LAUNCHED_REGIME = click.Choice(LAUNCHED)
only_arch = arch_option("only this arch, e.g. sm_90 or h200")
only_regime = option("--regime", type=click.Choice(REGIMES), help="only what was measured in it (default: all)")


@command("show")
@kernel_filter
@filter_option
@only_arch
@option(
    "--provenance", type=CommaList(click.Choice(PROVENANCES)), metavar="P[,P]", help=f"only {', '.join(PROVENANCES)}"
)
@only_regime
@option("--device", default="", metavar="NAME", help="only what was measured on a GPU whose name contains this")
@option("--compiler", metavar="VERSION", help="what is served with this compiler, or `all` (default: the one here)")
@option("--layers", is_flag=True, help="which layer answers: the user's, the site's, a bundle, or what ships")
@option("--landscapes", is_flag=True, help="list the landscapes that ship and the measurements in the database instead")
@seen_flag.seen_option
@option("--clear", is_flag=True, heading="Problems", help="with --seen: forget what was seen")
def show(
    run: Invocation,
    kernel: str | None,
    problem: tuple[str, ...],
    arch: str | None,
    provenance: list[str] | None,
    regime: str | None,
    device: str,
    compiler: str | None,
    layers: bool,
    landscapes: bool,
    seen: str | None,
    clear: bool,
) -> None:
    """List what is tuned, and how it is known.

    Without a filter: for the GPU here. Where there is none, a summary by kernel and arch; name a filter to list the entries,
    a line for each where they are piped. With --seen: what your programs called, by what tuning it would win. With
    --landscapes: what was measured, and what the winner of one regime costs in the other.

    \b
    tiledsched show
    tiledsched show --seen
    tiledsched show attention --arch h200 -p D=128
    tiledsched show -p columns=4096 --provenance measured
    """
    if clear and not seen:
        raise errors.ConfigError("--clear forgets what was seen; pass --seen, too")
    if seen:
        return _show_seen(run, kernel, problem, arch, seen, clear)
    if landscapes:
        return _show_landscapes(run, kernel, arch)
    from tiledsched.build.toolchain import compiler_at_hand
    from tiledsched.serve.entries import combined, layers as load_layers
    from tiledsched.store.evidence import for_compiler

    bare = not (problem or arch or provenance or regime or device or compiler or layers or run.json)
    here_archs = {device.arch for device in run.gpus()} if bare else set()
    found = load_layers(run.settings(), here_archs or None if arch is None else {arch}, kernel or "")
    here = compiler_at_hand() if compiler in (None, "all") else str(compiler)
    entries = combined(found) if compiler == "all" else for_compiler(combined(found), here)
    of_kernel = [
        entry
        for entry in entries
        if arch in (None, entry.arch)
        and kernel in (None, entry.kernel)
        and (not here_archs or entry.arch in here_archs)
    ]
    like = set(matching((entry.problem for entry in of_kernel), problem))
    entries = [
        entry
        for entry in of_kernel
        if entry.problem in like
        and regime in (None, entry.regime)
        and (provenance is None or entry.provenance in provenance)
        and device.lower() in entry.device_name.lower()
    ]
    keys = {layer.name: {entry.key for entry in layer.entries} for layer in found}
    covers = {
        entry.key: [name for name in keys if name != entry.layer and entry.key in keys[name]] for entry in entries
    }
    if run.json:
        rows = [
            {**served_output.entry_json(entry, here), "layer": entry.layer, "covers": covers[entry.key]}
            for entry in entries
        ]
        run.print({"layers": found, "entries": rows})
    elif entries and layers:
        served_output.print_layers(found, entries, covers)
    elif bare and not here_archs and len(entries) > MOST_ENTRIES:
        served_output.print_summary(entries)
        first = next((entry for entry in entries if entry.arch == USUAL_ARCH), entries[0])
        print_next([("list the schedules for one GPU", ["show", kernel or first.kernel, "--arch", first.arch])])
    elif entries:
        if here_archs:
            note(f"tiledsched: for {', '.join(sorted(here_archs))}; --arch names another")
        served_output.print_entries(entries, here)
    elif of_kernel:
        note("no tuned problem matches; leave out a filter")
    else:
        known = {each.name: each for each in registry.known_kernels()}
        what = f"of {registry.title_of(known[kernel]) if kernel in known else kernel} " if kernel else ""
        arch = arch or ",".join(sorted(here_archs)) or None
        words = " ".join(filter(None, [run.kernel_word, "--arch", arch or "ARCH"]))
        ships = (
            f"; kernels that ship: {', '.join(registry.SHIPPED)}{errors.did_you_mean(kernel, registry.SHIPPED)}"
            if kernel and kernel not in known
            else ""
        )
        usual = known[kernel].default_problems()[:1] if kernel in known and arch in ARCHS else ()
        missing = "".join(missing_on(str(arch), each) for each in usual)
        note(f"nothing {what}is tuned for {arch or 'any arch'}; {missing or f'run: tiledsched tune {words}{ships}'}")
    versioned = VERSIONED.fullmatch(kernel or "")
    if versioned and not run.json:
        _note_versions(run, versioned[1], str(kernel))


def _note_versions(run: Invocation, name: str, current: str) -> None:
    """Say which entries are kept of other code under the name of a kernel."""
    if not (run.db or database_exists(run.settings().db)):
        return
    with run.open_db(read_only=True) as db:
        others = {each: count for each, count in db.versions().get(name, {}).items() if each != current}
    for each, count in others.items():
        entries = text.plural(count, "entry", "entries")
        note(f"kept, but not served: {entries} of {each}, whose code is another (before an edit, or in another file)")


def _show_seen(
    run: Invocation, kernel: str | None, problem: tuple[str, ...], arch: str | None, value: str, clear: bool
) -> None:
    """List what programs called, what is most worth tuning first; or forget it."""
    if clear:
        folder = seen_flag.folder_of(run, value)
        files = clear_seen(folder)
        run.print({"folder": folder, "removed": files}, f"{text.plural(files, 'file')} removed from {folder}")
        return
    chosen = seen_flag.select(run, value, kernel=kernel, archs=[arch], filters=problem)
    rows = seen_flag.ranked(run, chosen)
    found = {"folder": chosen.folder, "skipped_lines": chosen.skipped, "seen": rows}
    run.print(found, lambda: seen_flag.print_seen(rows))
    if not run.json:
        tune = ["tune", *([kernel] if kernel else []), "--seen", *([] if value == seen_flag.HERE else [value])]
        print_next([("tune them, within ten minutes", [*tune, "--budget", "600"])])


def _show_landscapes(run: Invocation, kernel: str | None, arch: str | None) -> None:
    """List what ships and what is measured, and where the winners of the two regimes differ."""
    from tiledsched.store.manifest import shipped_landscapes
    from tiledsched.store.queries import compare_regimes

    lines, compared = [], []
    if run.db or database_exists(run.settings().db):
        with run.open_db(read_only=True) as db:
            lines = db.landscapes(arch, kernel)
            compared = [
                one for one in compare_regimes(db.measurements(latest=True)) if kernel in (None, one.problem.kernel)
            ]
    if not lines:
        note("nothing is measured in your database; tune on a GPU first, or db import a landscape")
    shipped, modelled = shipped_landscapes(kernel, arch), _modelled_landscapes(kernel, arch)
    found = {
        "landscapes": [*map(served_output.landscape_json, lines)],
        "regimes": compared,
        "shipped": [
            {"problem": one.problem, "arch": one.arch, "regime": one.regime, "file": one.path} for one in shipped
        ],
        "modelled": modelled,
    }
    run.print(found, lambda: served_output.print_landscapes(lines, compared, shipped, modelled))


def _modelled_landscapes(kernel: str | None, arch: str | None) -> list[dict[str, Any]]:
    """The files of compiled programs that ship, for which a report estimates times: nothing of them is measured."""
    from tiledsched.store.build_files import read_builds

    found = []
    for path in sorted((data_files.tuning_db() / "model").glob(f"{kernel or '*'}/programs_*.json.xz")):
        file = read_builds(path)
        archs = [file.builds[0].arch, *(each for each in file.alike if each in ARCHS)]
        if arch in (None, *archs):
            counts = {"builds": len(file.builds), "problems": len(file.serves)}
            found.append({"kernel": file.builds[0].kernel, "archs": archs, **counts, "file": path})
    return found


@command("explain")
@kernel_argument
@problem_options
@target_option
@generated_options(TuneOptions, "accum_mode", "regime", "rivals", "space")
@option(
    "--numerics",
    type=click.Choice(["any", INVARIANT]),
    help="what is served where the bits of a row may depend on the batch (any) or not (invariant)",
)
@option(
    "--device",
    default="",
    metavar="NAME",
    help="name of the GPU, to tell its measurements from another's (default: that of the GPU here, if it is of the arch)",
)
def explain(
    run: Invocation,
    kernel: KernelClass,
    problem: tuple[str, ...],
    suite: str | None,
    arch: str | None,
    space: str | None,
    device: str,
    **settings: str | None,
) -> None:
    """Say which schedule a problem is served with, and why.

    It names where the schedule comes from, what it was compared with, and the rivals that were timed beside it.

    \b
    tiledsched explain -p B=4,H=16,S=4096,D=128 --arch h200
    tiledsched explain matmul -p m=512,n=4096,k=4096
    """
    from tiledsched.core.space_files import chosen_space
    from tiledsched.serve.entries import load_table
    from tiledsched.serve.explain import explain_problem

    arch, chosen = run.arch(arch), run.settings(**settings)
    table = load_table(chosen, kernel=kernel, archs={arch}, spaces=[chosen_space(arch, kernel, space)] if space else [])
    device = device or _device_here([each.name for each in run.gpus() if each.arch == arch], table.device_names(arch))
    found = [
        explain_problem(table, each, arch, device, chosen.sources) for each in named_problems(kernel, problem, suite)
    ]
    rows = [each.to_json() for each in found]
    # A single problem stands at the top, too, where scripts have always found it.
    run.print({**rows[0], "rows": rows}, lambda: print_explained("\n\n".join(map(str, found))))


def _device_here(names: Sequence[str], measured: Collection[str]) -> str:
    """The GPU of this machine by the name under which it measures; empty where that is not known. NVML may not name a GPU, and
    gives a part of one (MIG) the name of the whole.
    """
    for name in names:
        for known in measured:
            if known == name or known.startswith(f"{name} MIG "):
                return known
    return next((name for name in names if name != UNNAMED), "")


@command("report")
@kernel_argument
@seen_flag.seen_option
@arch_option("which GPUs, e.g. sm_90, or sm_90,sm_121 to compare them (default: the GPU here)", many=True)
@option("-o", "--out", type=FOLDER, default="report", metavar="DIR", help="folder to write to (default: report)")
@generated_options(TuneOptions, "regime")
@option("--device", metavar="NAME", help="only measurements of this GPU (default: the newest of the arch)")
@option("--pdf", is_flag=True, help="also print the page to report.pdf, with Chromium, which must be installed")
def report(
    run: Invocation,
    kernel: KernelClass,
    seen: str | None,
    arch: list[str] | None,
    out: str,
    regime: str | None,
    device: str | None,
    pdf: bool,
) -> None:
    """Write a report, with charts, on how much each knob matters.

    It is one HTML page, and the same as Markdown, charts and CSV files. It reads your database together with what ships.

    \b
    tiledsched report
    tiledsched report --seen              # only what your programs called
    tiledsched report matmul --arch sm_90,sm_121 -o report
    """
    if seen:
        found = seen_flag.select(run, seen, kernel=kernel, archs=arch)
        groups = seen_flag.by_kernel(found)
        files = [
            file
            for each, problems in groups.items()
            for file in written_report(
                run,
                each,
                seen_flag.archs_of(found),
                f"{out}/{each.name}" if len(groups) > 1 else out,
                regime=regime,
                device=device,
                only=problems,
            )
        ]
    else:
        files = written_report(run, kernel, arch or [run.arch(None)], out, regime=regime, device=device)
    if pdf:
        from tiledsched.report.printing import print_page

        files += [print_page(file) for file in files if file.name == "report.html"]
    run.print({"files": files}, "\n".join(map(str, files)))


def written_report(
    run: Invocation,
    kernel: KernelClass,
    archs: Sequence[str],
    folder: str,
    *,
    regime: str | None = None,
    device: str | None = None,
    only: Sequence[Problem] | None = None,
) -> list[Path]:
    """The files of a report on a kernel, written from what the database holds over what ships; with `only`, on these problems."""
    from tiledsched.report import WithShipped, build_report, write_report
    from tiledsched.report.sources import Serving
    from tiledsched.serve.entries import load_entries
    from tiledsched.store.db import TuningDB
    from tiledsched.tuning.tuner import modelled_times

    settings = run.settings(regime=regime)
    with run.open_db(read_only=True) if run.db or database_exists(settings.db) else TuningDB.open(":memory:") as db:
        found = []
        for arch in archs:
            served = load_entries(settings, {arch}, limit_s=None)
            made = build_report(
                WithShipped(db, kernel, arch, served, None if only is None else set(only)),
                arch,
                kernel=kernel,
                regime=settings.regime,
                device_name=device,
                model_times=modelled_times(arch, kernel),
                served=served,
                serving=Serving.by_settings(settings, kernel, arch),
            )
            found.append(made)
    return write_report(found, Path(folder))


class Percent(Number):
    """A number in a range, with or without the sign of percent."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        return super().convert(str(value).removesuffix("%"), param, ctx)


@command("compare")
@argument(
    "a",
    help="before: a database, table, landscape, folder of them, a report's folder, or `shipped`; or of your database a "
    "compiler (13.5), a device (H100), a date or time (2026-11-22T14:30), `before` or `after` your last tune; or "
    "SOURCE@COMPILER and the like",
)
@argument("b", help="after: the same")
@kernel_option
@only_arch
@only_regime
@option(
    "--threshold",
    type=Percent(0, 100, min_open=True, max_open=True),
    default=2.0,
    metavar="PERCENT",
    help="differences up to this do not count (default: 2)",
)
@option(
    "--gate",
    type=Percent(0.1, 100, max_open=True),
    metavar="PERCENT",
    help="let repeated runs decide: a slow-down of this much must be noticed, and noise must not",
)
@option("--markdown", type=FILE, metavar="FILE", help="with --gate: also write the verdict and a table to this file")
@option("--all", "everything", is_flag=True, help="list every problem, also what stayed the same")
@option("-o", "--out", type=FOLDER, metavar="DIR", help="also write a page with a chart, for a browser, to this folder")
def compare(
    run: Invocation,
    a: str,
    b: str,
    kernel: str,
    arch: str | None,
    regime: str | None,
    threshold: float,
    gate: float | None,
    markdown: str | None,
    everything: bool,
    out: str | None,
) -> int:
    """Say what became faster or slower from A to B.

    What is served is compared, or where nothing is served the fastest measured program; regimes and accuracy classes are never
    mixed. A problem is slower or faster if the ratio of the times is beyond --threshold and their 95% intervals are apart; the
    same if the ratio's whole interval is within it; else tied, with the command that measures it again. Times of the
    performance model make it estimated.

    Programs with the same machine code on both sides are counted apart: they show how far the two machines or days differ (two
    GPUs of one model: up to 3.5%). The last line is made for CI. Exit code 1 if anything became slower.

    With --gate, A and B are databases into which several runs each measured the same problems, in turns on one machine: how much
    the runs of one program differ there decides which differences count. A problem that B lacks is a failure, too.

    \b
    tiledsched compare before.db after.db        # or tables, landscapes, shipped
    tiledsched compare 13.4 13.5 -o comparison   # two compilers
    tiledsched compare before after              # your last tune
    tiledsched compare fleet.db@H100 fleet.db@H200
    tiledsched compare base.db head.db --gate 3%
    """
    from tiledsched.report.comparison_page import write_comparison
    from tiledsched.report.comparison_sources import Wanted, compare_sources
    from tiledsched.report.comparison_text import verdict_of
    from tiledsched.report.gate import gate_markdown, judged_by_runs

    if markdown and gate is None:
        raise errors.ConfigError("--markdown writes what a gate found; pass --gate PERCENT, too")
    db, wanted = run.settings().db, Wanted(kernel=kernel, arch=arch or "", regime=regime or "")
    found = compare_sources(a, b, db, wanted, threshold / 100)
    if not found.rows:
        why = next((f" ({reason})" for _, _, reason in found.unpaired), "")
        raise errors.ConfigError(
            f"{a} and {b} have no problem in common: {len(found.only('A'))} only in the first, {len(found.only('B'))} only "
            f"in the second{why}; compare sources of the same kernel, arch and regime"
        )
    if gate is not None:
        found = judged_by_runs(found, gate / 100)
    if markdown:
        write_whole(markdown, gate_markdown(found))
    files = write_comparison(found, Path(out)) if out else []
    if run.json:
        run.print({**found.to_json(), "sentence": verdict_of(found), **({"files": files} if out else {})})
    else:
        served_output.print_compared(found, everything=everything)
        print(*files, sep="\n", end="\n" * bool(files))
        _print_tie(found, b if b.endswith(".db") else run.db)
        print(f"compare: {found.line()}")
    return 1 if found.regressed else 0


def _print_tie(found: Comparison, db: str | None) -> None:
    """Print the command that measures one of the ties again."""
    tied = next((row.b for row in found.rows if row.verdict == "tied" and row.b.words), None)
    if tied is not None:
        anew = [] if found.noise is None else ["--effort", "served"]
        words = ["tune", tied.kernel, "--arch", tied.arch, "-p", tied.words, *anew]
        print_next([("what may decide one of the ties", [*words, *(["--db", db] if db else [])])])
        print()
