"""How results look: tables for people on stdout, plain rows for JSON, progress on stderr."""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.core.extras import installing
from tiledsched.core.kernel import labels_of
from tiledsched.core.problem import Problem, rate_of, rate_text, unit_of

if TYPE_CHECKING:
    from rich.console import Console

    from tiledsched.bench.rows import BenchRow
    from tiledsched.core.kernel import KernelClass
    from tiledsched.measure.runner import RivalTime
    from tiledsched.report.compare import Comparison
    from tiledsched.serve.entries import Layer
    from tiledsched.store.queries import RegimeComparison
    from tiledsched.store.records import Entry, MergeResult
    from tiledsched.studies.ablation.rows import AblationRow
    from tiledsched.tuning.check import CheckRow
    from tiledsched.tuning.record import RecordResult
    from tiledsched.tuning.refresh import RefreshReport
    from tiledsched.tuning.run import TuneReport
    from tiledsched.tuning.tuner import TuneResult

WIDE = 200
"""Columns of a table that goes to a file or pipe, where no terminal sets the width."""


def console() -> Console:
    """Standard output; honours NO_COLOR, and is plain text off a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDE, color_system=None)


def width() -> int:
    """Columns that a line may take: those of the terminal; off one, where programs read, as many as it likes."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def note(text: str) -> None:
    """One line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def entry_json(entry: Entry, compiler: str = "") -> dict[str, Any]:
    """The row `show --json` prints: flat where people filter, nested where evidence lies. `compiler` is the one at hand."""
    from tiledsched.store.evidence import stale

    problem = entry.problem
    return {
        "arch": entry.arch,
        "kernel": problem.kernel,
        **short_values(problem),
        **plain_values(problem),
        "provenance": entry.provenance,
        "compiler": entry.compiler,
        "stale": stale(entry, compiler),
        "schedule": entry.schedule.to_json(),
        "median_us": entry.median_us,
        "tflops": entry.tflops,
        "gbps": problem.gbps(entry.median_us) if entry.median_us else None,
        "evidence": entry.to_json(),
    }


def plain_values(problem: Problem) -> dict[str, Any]:
    """Its values as JSON has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in problem.values.items()}


def short_values(problem: Problem) -> dict[str, Any]:
    """Its values by the short names of the kernel's label: of several dims that differ, all, as `1/4096`."""
    labels = labels_of(problem.declaration) if problem.known else {}
    found: dict[str, Any] = {}
    for short, names in labels.items():
        values = dict.fromkeys(getattr(problem, name) for name in names)
        found[short] = next(iter(values)) if len(values) == 1 else "/".join(map(str, values))
    return found


def print_checked(row: CheckRow) -> None:
    """One schedule that is wrong, as it is found."""
    if not row.passed:
        print(f"wrong: {row.problem}: {row.schedule.short()}: {row.message}", flush=True)


def print_checks(rows: Sequence[CheckRow]) -> None:
    """For each problem how many schedules are right."""
    for problem in dict.fromkeys(row.problem for row in rows):
        found = [row for row in rows if row.problem == problem]
        right = [row.worst_error for row in found if row.passed]
        worst = f", worst error {max(right):.2g}" if right else ""
        print(f"{problem}: {len(right)} of {len(found)} schedules right{worst}")
    if not rows:
        print("nothing was checked: no schedule of the space is valid for these problems")


def result_json(result: TuneResult) -> dict[str, Any]:
    """One problem's tuning, in numbers."""
    return {
        "problem": result.entry.problem.to_json(),
        "stored": result.stored,
        "schedules": result.schedules,
        "programs": result.programs,
        "compiled": result.compiled,
        "measured": result.measured,
        "failed": result.failed,
        "left": result.left,
        "over_default": result.over_default,
        "over_runner_up": result.over_runner_up,
        "seconds": round(result.seconds, 3),
    }


def landscape_json(line: Any) -> dict[str, Any]:
    """One line of `landscapes --json`."""
    return {
        "problem": line.problem.to_json(),
        "device": line.device_name,
        "arch": line.arch,
        "regime": line.regime,
        "distinct_programs": line.distinct_programs,
        "measurements": line.measurements,
    }


def recorded_json(result: RecordResult) -> dict[str, Any]:
    """One problem of `record --json`."""
    return {
        "problem": result.problem.to_json(),
        "schedules": result.schedules,
        "distinct_programs": result.programs,
        "wanted": result.wanted,
        "compiled": result.compiled,
        "measured": result.measured,
        "failed": result.failed,
        "failed_builds": result.failed_builds,
        "failed_programs": result.failed_programs,
        "complete": result.complete,
        "landscapes": [
            {
                "file": str(file.path),
                "device": file.device_name,
                "regime": file.regime,
                "distinct_programs": file.distinct_programs,
                "best_us": file.best_us,
                "best_tflops": file.best_tflops,
                "worst_ratio": file.worst_ratio,
            }
            for file in result.files
        ],
    }


def print_recorded(result: RecordResult) -> None:
    """A line for each landscape of one problem, or for its builds."""
    if not result.files:
        print(
            f"{result.problem}: {result.programs} distinct programs of {result.wanted} built, nothing measured, "
            f"{result.compiled} compiled now, {result.failed} failed",
            flush=True,
        )
    for file in result.files:
        rest = "" if result.complete else "; not complete, run again to go on"
        best = rate_text(result.problem, file.best_us, 1)
        print(
            f"{result.problem} {file.regime}: {file.distinct_programs} distinct programs, {result.failed} failed, "
            f"best {best}, worst {file.worst_ratio:.2f}x{rest}; {file.path}",
            flush=True,
        )


def print_merged(result: MergeResult) -> None:
    """What a merge did, and what it found that a race must decide."""
    from tiledsched.core.kernel import told

    print(
        f"entries: {result.entries_added} added, {result.entries_replaced} replaced, {result.entries_kept} kept; measurements: "
        f"{result.measurements_added} added, {result.measurements_kept} known"
    )
    for each in result.contradictions:
        entry = each.entry
        print(f"contradicted: {each}")
        print(
            f"  let a race decide: tiledsched tune {entry.kernel} --arch {entry.arch} --regime {entry.regime} --problem "
            f"{told(entry.problem)}"
        )


def print_tuned(report: TuneReport) -> None:
    """The answer of a tune: for each problem what wins, by how much, and what it took."""
    if not report.measured:
        part = any(result.left for result in report.results)
        built = (
            "The default, what is served and the model's favourites were built" if part else "Every schedule was built"
        )
        _print_wrapped(
            f"No {report.arch} GPU here: nothing was measured. {built}, and the model ranked the programs. "
            "On a machine with that GPU the same command measures."
        )
    for result, entry in zip(report.results, report.entries, strict=True):
        print()
        _print_wrapped(f"{entry.problem} on {entry.device_name or entry.arch}")
        _print_wrapped(entry.schedule.short(), "  ")
        _print_wrapped(_verdict(result, entry), "  ")
        if entry.rivals:
            _print_wrapped(_rivals(entry.rivals, entry.problem.declaration), "  ")
        of = f" of {result.schedules + result.left}" if not report.measured else ""
        did = f", {result.measured} measured" if report.measured else ""
        _print_wrapped(
            f"{result.schedules}{of} schedules built, {result.programs} distinct programs; {result.compiled} "
            f"compiled now{did}, {result.failed} failed, {result.seconds:.1f} s",
            "  ",
        )


def _rivals(times: Sequence[RivalTime], kernel: KernelClass) -> str:
    """What was timed beside the winner, and what may serve."""
    from tiledsched.serve.explain import rival_text
    from tiledsched.serve.rivals import pays

    faster = [each.name for each in times if pays(each, kernel)]
    held = [each.name for each in times if pays(each, kernel, captured=True) and not pays(each, kernel)]
    may = f"; may serve in its place (setting rivals): {', '.join(faster)}" if faster else ""
    may += f"; in captured graphs: {', '.join(held)}" if held else ""
    return f"rivals: {'; '.join(map(rival_text, times))}{may}"


def print_refreshed(report: RefreshReport) -> None:
    """What became of what was served: a line each for what was raced or is to be, and all in all."""
    for row in report.rows:
        was = row.was
        if row.outcome == "kept":
            continue
        _print_wrapped(f"{was.problem} on {was.device_name}, {was.regime}: {row.why}")
        _print_wrapped(
            f"was  {was.median_us:.1f} us, tileiras {was.compiler or 'unknown'}: {was.schedule.short()}", "  "
        )
        if row.now is not None and row.now.median_us is not None and row.change is not None:
            _print_wrapped(f"now  {row.now.median_us:.1f} us ({row.change:+.1%}): {row.now.schedule.short()}", "  ")
        for schedule in row.leaders[1:] if row.now is None else ():
            _print_wrapped(f"to race beside it: {schedule.short()}", "  ")
    moved = f" ({report.change:+.1%} by geometric mean)" if report.change is not None else ""
    done = [
        f"{report.current} of tileiras {report.compiler} and this source already",
        f"{len(report.of('kept'))} the same machine code, evidence kept",
        f"{len(report.of('raced'))} raced again{moved}",
    ]
    done += [f"rivals timed beside {len(report.rivals)}"] if report.rivals else []
    left = report.of("to race")
    devices = ", ".join(sorted({row.was.device_name for row in left}))
    done += [f"{len(left)} to be raced on {devices}"] if left else []
    total = report.current + len(report.rows)
    if not total:
        name = report.kernel.name
        _print_wrapped(
            f"nothing of {name} was measured for {report.arch}; run: tiledsched tune {name} --arch {report.arch}"
        )
        return
    _print_wrapped(
        f"{total} measured entries of {report.kernel.name} on {report.arch}: {'; '.join(done)}. {report.compiled} "
        f"compiled, {report.seconds:.1f} s"
    )


def _verdict(result: TuneResult, entry: Entry) -> str:
    """How fast the winner is and by how much it wins; of a stronger entry that was kept, what that is."""
    us, how = entry.median_us, "measured"
    if us is None:
        us, how = entry.model_us, "modelled"
    words = [] if us is None else [f"{us:.1f} us {how}, {rate_text(entry.problem, us)}"]
    if not result.stored:
        return "; ".join([*words, f"kept: a {entry.provenance} entry stands above what this run found"])
    for what, over in (("the default", result.over_default), ("the runner-up", result.over_runner_up)):
        if over is not None:
            words.append(f"{what} takes {over:.1%} longer" if over >= 5e-4 else f"{what} takes as long")
    if entry.ties:
        words.append(f"{len(entry.ties)} tied")
    return "; ".join(words)


def print_report(files: Sequence[Path]) -> None:
    """Where the report is; where nothing was drawn, what draws."""
    page = next(path for path in files if path.suffix == ".html")
    drawn = sum(path.suffix == ".png" for path in files)
    print()
    _print_wrapped(f"Report with {drawn} {'chart' if drawn == 1 else 'charts'}: {page}")
    if importlib.util.find_spec("vl_convert") is None:
        _print_wrapped(f"What draws is not installed: {installing('report')}")


def program() -> str:
    """What this program is called by whoever started it: its name where the shell finds it, else its path."""
    called = sys.argv[0]
    if Path(called).name != "tiledsched":
        return "tiledsched"
    found = shutil.which("tiledsched")
    return "tiledsched" if found and Path(found).samefile(called) else called


def print_next(commands: Sequence[tuple[str, str]]) -> None:
    """What to do next: a purpose, and the command below it, on a line of its own so that it can be copied."""
    print("\nNext:")
    for purpose, command in commands:
        _print_wrapped(f"{purpose}:", "  ")
        print(f"    {command}")


def _print_wrapped(text: str, indent: str = "") -> None:
    """One paragraph. Words are never cut, so that none of a schedule is lost."""
    print(
        textwrap.fill(
            text,
            width(),
            initial_indent=indent,
            subsequent_indent=f"{indent}  " if indent else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def print_entries(entries: Sequence[Entry], compiler: str = "") -> None:
    """What is served where `compiler` is at hand: a table for each kernel; where that is too narrow, a line and the schedule
    below it.
    """
    from tiledsched.store.evidence import stale

    by_kernel: dict[str, list[Entry]] = {}
    for entry in entries:
        by_kernel.setdefault(entry.problem.kernel, []).append(entry)
    for place, (kernel, found) in enumerate(by_kernel.items()):
        lines = _entry_lines(found, compiler)
        if max(map(len, lines)) > width():
            _print_narrow(found, compiler)
        else:
            print("\n" * (place > 0) + f"tuned schedules of {kernel}", *lines, sep="\n")
    old = sorted({entry.compiler for entry in entries if stale(entry, compiler)})
    if old:
        note(
            f"stale: tileiras {', '.join(old)} built what was measured, and here is {compiler}; run: tiledsched refresh"
        )


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """The answer to a query: a table, or, where that is too narrow, each row as a block of its own."""
    cells = [["" if value is None else str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if sum(widths) + 2 * len(widths) <= width():
        for line in (columns, *cells):
            print("  ".join(text.ljust(size) for text, size in zip(line, widths, strict=True)).rstrip())
        return
    longest = max(map(len, columns))
    for line in cells:
        for name, text in zip(columns, line, strict=True):
            _print_wrapped(f"{name.ljust(longest)}  {text}")
        print()


def print_layers(
    layers: Sequence[Layer], entries: Sequence[Entry], covered: Mapping[tuple[str, ...], list[str]]
) -> None:
    """Which layer answers for each problem, and which others have something for it."""
    for layer in reversed(layers):
        _print_wrapped(
            f"{layer.name}: {layer.where}, {len(layer.entries)} entries" + (f"; {layer.error}" if layer.error else "")
        )
    for entry in entries:
        under = [name for name in covered[entry.key] if name != entry.layer]
        us = f", {entry.median_us:.1f} us" if entry.median_us else ""
        _print_wrapped(
            f"{entry.layer:8} {entry.arch} {entry.problem}: {entry.provenance}{us}"
            + (f" (also in {', '.join(under)})" if under else "")
        )


def _provenance(entry: Entry, compiler: str) -> str:
    """With `stale` beside it where that is so."""
    from tiledsched.store.evidence import stale

    return f"{entry.provenance}, stale" if stale(entry, compiler) else entry.provenance


def _entry_lines(entries: Sequence[Entry], compiler: str) -> list[str]:
    """A table without rules, thousands of lines of it in no time. The schedule comes last: it may be as long as it is."""
    problems = [_columns(entry.problem) for entry in entries]
    shown = [
        name for name in problems[0] if len({each.get(name) for each in problems}) > 1 or not _plain(entries, name)
    ]
    compilers = len({entry.compiler for entry in entries if entry.compiler}) > 1
    head = (
        "arch",
        *shown,
        *["compiler"] * compilers,
        "provenance",
        "median us",
        "rate",
        "model us",
        "runner-up",
        "ties",
        "programs",
        "schedule",
    )
    rows = [head]
    for entry, values in zip(entries, problems, strict=True):
        us = entry.median_us
        rows.append(
            (
                entry.arch,
                *(values.get(name, "") for name in shown),
                *[entry.compiler] * compilers,
                _provenance(entry, compiler),
                f"{us:.1f}" if us else "-",
                rate_text(entry.problem, us) if us else "-",
                f"{entry.model_us:.1f}" if entry.model_us else "-",
                f"+{entry.margin:.1%}" if entry.margin is not None else "-",
                str(len(entry.ties)),
                str(entry.candidates),
                entry.schedule.short(),
            )
        )
    left = ("arch", "provenance")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return [
        "  ".join(
            [
                *(
                    text.ljust(size) if name in left else text.rjust(size)
                    for text, size, name in zip(row, widths, head, strict=False)
                ),
                row[-1],
            ]
        )
        for row in rows
    ]


def _columns(problem: Problem) -> dict[str, str]:
    """Its values as people read them: short names first, then the fields that those do not tell."""
    labels = labels_of(problem.declaration) if problem.known else {}
    told = {name for names in labels.values() for name in names}
    values = {
        **short_values(problem),
        **{name: value for name, value in plain_values(problem).items() if name not in told},
    }
    words = {True: "yes", False: "no"}
    return {name: words[value] if isinstance(value, bool) else str(value) for name, value in values.items()}


def _plain(entries: Sequence[Entry], name: str) -> bool:
    """Whether a column says nothing: a field that the ids of problems leave out at its default, where it is."""
    return all(name in entry.problem.values and name not in entry.problem.to_json() for entry in entries)


def _print_narrow(entries: Sequence[Entry], compiler: str) -> None:
    for entry in entries:
        us = entry.median_us
        timed = f"{us:.1f} us, {rate_text(entry.problem, us)}" if us else "not measured"
        _print_wrapped(f"{entry.arch} {entry.problem}: {timed} ({_provenance(entry, compiler)})")
        _print_wrapped(entry.schedule.short(), "    ")


def print_landscapes(lines: Sequence[Any]) -> None:
    """The table of what is measured."""
    from rich.table import Table

    table = Table(title="landscapes")
    for name in ("device", "arch", "regime", "problem", "distinct programs", "measurements"):
        table.add_column(name)
    for line in lines:
        table.add_row(
            line.device_name,
            line.arch,
            line.regime,
            str(line.problem),
            str(line.distinct_programs),
            str(line.measurements),
        )
    console().print(table)


def print_regimes(compared: Sequence[RegimeComparison]) -> None:
    """The table of what wins in each regime, and what serving the other regime's winner costs."""
    from rich.table import Table

    table = Table(title="burst against sustained: * marks a difference beyond the 95% intervals")
    for name in (
        "device",
        "problem",
        "programs in both",
        "burst winner",
        "sustained winner",
        "burst winner, sustained",
        "sustained winner, burst",
    ):
        table.add_column(name)
    for one in compared:
        sustained = "the same" if one.same else one.sustained_winner.short()
        table.add_row(
            one.device_name,
            str(one.problem),
            str(one.programs),
            one.burst_winner.short(),
            sustained,
            _loss(one.burst_loss, one.burst_loss_distinct),
            _loss(one.sustained_loss, one.sustained_loss_distinct),
        )
    console().print(table)


def _loss(loss: float, distinct: bool) -> str:
    return f"+{loss:.1%}" + ("*" if distinct else "")


def print_compared(found: Comparison, *, everything: bool = False) -> None:
    """What moved from A to B, slower first, with the winners where they changed."""
    _print_wrapped(f"A: {found.a}")
    _print_wrapped(f"B: {found.b}")
    from tiledsched.report.compare import told

    mean = f", B takes {found.mean:.3f}x the time of A (geometric mean)" if found.mean else ""
    _print_wrapped(f"{len(found.rows)} {'problem' if len(found.rows) == 1 else 'problems'} on both sides{mean}")
    if found.drift:
        both = f"{len(found.drift)} measured on both sides take {statistics.geometric_mean(found.drift):.3f}x"
        _print_wrapped(f"programs with the same machine code: {both}; that is the machine or the day, no schedule")
    elif found.rows:
        _print_wrapped("no machine code was measured on both sides: part of a difference may be the machine")
    rows = told(found, everything=everything)
    if rows:
        print(f"\n{'':9}  {'B / A':21}  {'A us':>9}  {'B us':>9}")
    narrow = any(len(row.b.problem) + 55 > width() for row in rows)
    for row in rows:
        ratio = f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]"
        figures = f"{row.verdict:9}  {ratio:21}  {row.a.us:9.1f}  {row.b.us:9.1f}"
        print(*([row.b.problem, figures] if narrow else [f"{figures}  {row.b.problem}"]), sep="\n")
        if row.winner_changed:
            _print_wrapped(f"now {row.b.schedule}; was {row.a.schedule}", "           ")
        elif row.verdict != "same" and row.same_program:
            _print_wrapped("the same machine code", "           ")
    print()


def print_bench(rows: Sequence[BenchRow]) -> None:
    """A table for each regime: one line per problem, one column per method: TFLOP/s, then its time over ours."""
    for regime in dict.fromkeys(row.regime for row in rows):
        _print_bench_regime(regime, [row for row in rows if row.regime == regime])


def _print_bench_regime(regime: str, rows: Sequence[BenchRow]) -> None:
    from rich.table import Table

    methods = list(dict.fromkeys(row.method for row in rows))
    units = "/".join(dict.fromkeys(unit_of(row.problem) for row in rows))
    table = Table(title=f"{regime}: {units}, and in brackets the time of each method over ours")
    table.add_column("problem")
    for method in methods:
        table.add_column(method, justify="right")
    by_problem: dict[Problem, dict[str, BenchRow]] = {}
    for row in rows:
        by_problem.setdefault(row.problem, {})[row.method] = row
    for problem, found in by_problem.items():
        ours = found["tiledsched"].median_us if "tiledsched" in found else None
        table.add_row(str(problem), *(_bench_cell(found.get(method), ours) for method in methods))
    console().print(table)


def _bench_cell(row: BenchRow | None, ours_us: float | None) -> str:
    if row is None or row.median_us is None:
        return "-" if row is None else row.status
    value = row.tflops if row.flops else rate_of(row.problem, row.median_us)
    beside = row.method not in ("tiledsched", "matmul") and ours_us
    return f"{value:.0f} ({row.median_us / ours_us:.2f}x)" if beside and ours_us else f"{value:.0f}"


def print_ablation(rows: Sequence[AblationRow]) -> None:
    """For each problem the ladder, and the tuned schedule without each knob; of what else was tried, only what failed."""
    from rich.table import Table

    for problem in dict.fromkeys(row.problem for row in rows):
        table = Table(title=f"{problem}: from the plain schedule to the tuned one")
        for name, justify in (
            ("", "left"),
            ("rung", "right"),
            ("knob", "left"),
            ("from", "left"),
            ("to", "left"),
            ("median us", "right"),
            ("95% interval", "right"),
            ("over previous", "right"),
            ("over plain", "right"),
            ("schedule or status", "left"),
        ):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for row in rows:
            if row.problem == problem and (row.view != "tried" or row.status != "ok"):
                timed = row.median_us is not None
                table.add_row(
                    row.view,
                    str(row.rung),
                    row.knob or "(plain)",
                    row.before,
                    row.after,
                    f"{row.median_us:.1f}" if timed else "-",
                    f"{row.ci_low_us:.1f}-{row.ci_high_us:.1f}" if timed else "-",
                    _speedup(row.speedup_over_previous),
                    _speedup(row.speedup_over_plain),
                    row.schedule if row.status == "ok" else row.status,
                )
        console().print(table)


def _speedup(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}x"
