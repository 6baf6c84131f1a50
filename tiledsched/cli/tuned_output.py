"""How the results of tune, refresh, record and check are printed, and what they are in JSON."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.cli.output import print_lines, print_wrapped
from tiledsched.cli.served_output import entry_json
from tiledsched.core import extras, text
from tiledsched.core.groups import grouped
from tiledsched.core.problem import KernelClass, Problem, describe_values, rate_text
from tiledsched.core.registry import command_word, title_of
from tiledsched.core.space import RACED, UNKNOWN
from tiledsched.store.evidence import throttled

if TYPE_CHECKING:
    from tiledsched.checking.schedules import CheckRow
    from tiledsched.measure.runner import RivalTime
    from tiledsched.store import records
    from tiledsched.tuning import record, refresh, results, worth

LOW_CLOCK = (
    "Times at a low clock decide little: let the GPU cool, or check its power supply (nvidia-smi -q -d PERFORMANCE), and tune "
    "again: what is measured at its clock replaces what was not"
)
NO_DIFFERENCE = 5e-4
"""Relative differences below this are printed as none."""


def tune_result_json(result: results.TuneResult) -> dict[str, Any]:
    """One problem's tuning, in numbers."""
    numbers = ("stored", "schedules", "programs", "compiled", "measured", "failed", "left", "over_default")
    return {
        "problem": result.entry.problem,
        **{name: getattr(result, name) for name in (*numbers, "over_runner_up")},
        "seconds": round(result.seconds, 3),
        **({} if result.candidates is None else {"candidates": dict(result.candidates)}),
        **({"held_down": result.held_down} if result.held_down else {}),
        **({"numbers": result.numbers} if result.numbers else {}),
        **({"memory": result.memory} if result.memory else {}),
        **({"why_failed": result.why_failed} if result.why_failed else {}),
    }


def tuned_json(reports: Sequence[results.TuneReport]) -> dict[str, Any]:
    """The `results` and `entries` of tunes, as `--json` prints them."""
    return {
        "results": [tune_result_json(result) for report in reports for result in report.results],
        "entries": [entry_json(entry) for report in reports for entry in report.entries],
    }


def print_tuned(report: results.TuneReport, replayed: str = "") -> None:
    """Print for each problem what wins, by how much, and what it took to find it; of a replay, on which GPU it was recorded."""
    if replayed:
        print_wrapped(
            f"Nothing was measured or stored: times are drawn from those that were recorded on {replayed}. What is served "
            "stays as it is."
        )
    if not report.measured:
        part = any(result.left or result.more for result in report.results)
        built = (
            "The default, what is served and the model's favourites were built" if part else "Every schedule was built"
        )
        print_wrapped(
            f"Nothing was measured: this run used no {report.arch} GPU. {built}, and the performance model ranked the "
            "programs. On a machine with that GPU, tune measures, unless --runner none is given."
        )
    how = "replayed" if replayed else "measured"
    for result, entry in zip(report.results, report.entries, strict=True):
        print()
        print_wrapped(f"{entry.problem} on {entry.device_name or entry.arch}")
        of = f" of {'more than ' if result.more else ''}{result.schedules + result.left}" if not report.measured else ""
        compiled = f"; {result.compiled} compiled now" if not replayed else ""
        measured = f", {result.measured} {how}" if report.measured else ""
        print_lines(
            entry.schedule.short(),
            _verdict(result, entry, how),
            str(result.numbers or ""),
            _rivals(entry.rivals, entry.problem.declaration) if entry.rivals else "",
            f"{result.schedules}{of} schedules built, {result.programs} distinct programs{compiled}{measured}, "
            f"{result.failed} failed, {result.seconds:.1f} s",
            f"did not build: {result.why_failed}" if result.why_failed else "",
            "" if result.candidates is None else _candidates(result.candidates),
            f"clock held down {result.held_down}" if result.held_down else "",
            f"memory: {result.memory}" if result.memory else "",
        )
    if report.left:
        print()
        print_wrapped(
            f"{text.plural(len(report.left), 'problem')} not tuned: {text.joined(sorted(set(report.left.values())))}"
        )
    if any(result.held_down for result in report.results):
        print()
        print_wrapped(LOW_CLOCK)


def print_tuned_seen(done: worth.SeenTune, tuned: int) -> None:
    """Print what a tune of the problems that were seen found, and what is left with what to do about it.

    Args:
        done: what was found.
        tuned: problems that were tuned before.
    """
    for report in done.reports:
        print_tuned(report)
    print()
    results = text.plural(sum(len(each.results) for each in done.reports), "problem")
    print_wrapped(f"{results} done{f', {tuned} tuned before' if tuned else ''}.")
    print_lines(
        *(f"only raced against rivals, not searched: {problem.kernel} {problem}" for problem in done.raced),
        *(f"left: {problem.kernel} {problem}: {why}" for problem, why in done.left.items()),
    )
    if done.raced or done.left:
        print_wrapped("The same command goes on with these, most worthwhile first; a longer --budget reaches more.")


def _candidates(rows: Mapping[str, int]) -> str:
    """How many of the listed candidates were raced, refused and why, or unknown."""
    raced, unknown = rows.get(RACED, 0), rows.get(UNKNOWN, 0)
    refused = {why: number for why, number in rows.items() if why not in (RACED, UNKNOWN)}
    why = "; ".join(f"{number}: {reason}" for reason, number in sorted(refused.items(), key=lambda each: -each[1]))
    return (
        f"{text.plural(sum(rows.values()), 'listed candidate')}: {raced} raced, {sum(refused.values())} refused"
        + (f" ({why})" if why else "")
        + f", {unknown} unknown"
        + (f" ({UNKNOWN})" if unknown else "")
    )


def _verdict(result: results.TuneResult, entry: records.Entry, how: str) -> str:
    """How fast the winner is and by how much it wins; or which stronger entry stays in its place."""
    from tiledsched.store.model_error import error_of, error_text

    us, how = entry.median_us, f"{how} with the clock held down" if throttled(entry, {}) else how
    if us is None:
        us, how = entry.model_us, "modelled"
    words = [] if us is None else [", ".join(filter(None, [f"{us:.1f} us {how}", rate_text(entry.problem, us)]))]
    if not result.is_served(entry):
        if entry.fingerprint or entry.measurement:
            why = f"kept: a {entry.provenance} entry stands above what this run found"
        elif result.entry.schedule == entry.schedule:
            why = f"the same is served: {entry.source}"
        else:  # no entry of this problem
            why = f"served in place of what this run found ({result.entry.schedule.short()}): {entry.source}"
        return "; ".join([*words, why])
    others = ("the compiler defaults take", result.over_default), ("the runner-up takes", result.over_runner_up)
    for what, over in others:
        if over is not None:
            words.append(f"{what} {over:.1%} longer" if over >= NO_DIFFERENCE else f"{what} as long")
    if entry.provenance == "modelled":
        words.append(error_text(error_of(entry.arch, entry.problem, entry.schedule)))
    if entry.ties:
        words.append(f"{len(entry.ties)} tied")
    return "; ".join(words)


def _rivals(times: Sequence[RivalTime], kernel: KernelClass) -> str:
    """The rivals that were timed next to the winner, and those that may be served in its place."""
    from tiledsched.rivals.offers import pays
    from tiledsched.serve.explain import rival_text

    faster = [each.name for each in times if pays(each, kernel)]
    in_graphs = [each.name for each in times if pays(each, kernel, captured=True) and each.name not in faster]
    may = f"; may serve in its place (setting rivals): {', '.join(faster)}" if faster else ""
    may += f"; in captured graphs: {', '.join(in_graphs)}" if in_graphs else ""
    return f"rivals: {'; '.join(map(rival_text, times))}{may}"


def print_report(files: Sequence[Path]) -> None:
    """Print where the report is, and where it has no charts, what to install for them."""
    page = next(path for path in files if path.suffix == ".html")
    charts = sum(path.suffix == ".png" for path in files)
    print()
    print_wrapped(f"Report with {text.plural(charts, 'chart')}: {page}")
    if importlib.util.find_spec("vl_convert") is None:
        print_wrapped(f"Charts are drawn by a package that is not installed: {extras.installing('report')}")


def print_refreshed(report: refresh.RefreshReport) -> None:
    """Print what was raced again or must be, a paragraph for each, and then a summary of all entries."""
    for row in report.rows:
        was, now, lines = row.was, row.now, list[str]()
        if row.outcome == "kept":
            continue
        print_wrapped(f"{was.problem} on {was.device_name}, {was.regime}: {row.why}")
        if now is None:
            lines = [f"to race against it: {schedule.short()}" for schedule in row.leaders[1:]]
        elif now.median_us is not None and row.change is not None:
            same, slowed = "the same" if row.same_numbers else "not the same", throttled(now, {})
            lines = [
                f"now  {now.median_us:.1f} us ({row.change:+.1%}): {now.schedule.short()}",
                "" if row.same_numbers is None else f"its results are {same}, bit for bit",
                now.same_numbers or "",
                f"clock held down {slowed}" if slowed else "",
            ]
        compiler = was.compiler or "unknown"
        print_lines(f"was  {was.median_us:.1f} us, tileiras {compiler}: {was.schedule.short()}", *lines)
    name = title_of(report.kernel)
    total = report.current + len(report.rows)
    if not total:
        print_wrapped(
            f"nothing of {name} was measured for {report.arch}; run: tiledsched tune {command_word(report.kernel)} --arch "
            f"{report.arch}"
        )
        return
    moved = f" ({report.change:+.1%} by geometric mean)" if report.change is not None else ""
    done = [
        f"{report.current} of tileiras {report.compiler} and this source already",
        f"{len(report.of('kept'))} the same machine code, evidence kept",
        f"{len(report.of('raced'))} raced again{moved}",
    ]
    if report.rivals:
        done.append(f"rivals timed next to {len(report.rivals)}")
    if left := report.of("to race"):
        devices = ", ".join(sorted({row.was.device_name for row in left}))
        done.append(f"{len(left)} to be raced on {devices}")
    print_wrapped(
        f"{total} measured entries of {name} on {report.arch}: {'; '.join(done)}. {report.compiled} "
        f"compiled, {report.seconds:.1f} s"
    )


def record_result_json(result: record.RecordResult) -> dict[str, Any]:
    """One problem of `record --json`."""
    numbers = ("wanted", "compiled", "measured", "failed", "failed_builds", "failed_programs", "complete")
    of_file = ("regime", "distinct_programs", "best_us", "best_tflops", "worst_ratio")
    return {
        "problem": result.problem,
        "schedules": result.schedules,
        "distinct_programs": result.programs,
        **{name: getattr(result, name) for name in numbers},
        "landscapes": [
            {"file": file.path, "device": file.device_name, **{name: getattr(file, name) for name in of_file}}
            for file in result.files
        ],
    }


def print_recorded(result: record.RecordResult) -> None:
    """Print a line for each landscape of one problem, or for its builds where nothing was measured."""
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


def print_checked(row: CheckRow) -> None:
    """Print one schedule that computes wrong results, or could not be run, as it is found."""
    if not row.passed:
        print(f"{row.verdict}: {row.problem}: {row.schedule.short()}: {row.skipped or row.message}", flush=True)


def print_checks(rows: Sequence[CheckRow], *, by_kind: bool) -> None:
    """Print for each problem, or for the problems of each kind, how many schedules computed right results on how many tiles."""
    for some in grouped((_kind(row.problem) if by_kind else row.problem, row) for row in rows).values():
        drawn, ran = {row.schedule for row in some}, {row.schedule for row in some if not row.skipped}
        some = [row for row in some if not row.skipped] or some
        wrong = {row.schedule for row in some if not row.passed}
        right = [row.worst_error for row in some if row.schedule not in wrong]
        worst = f", worst error {max(right):.2g}" if right else ""
        left = f", {len(drawn - ran)} not run" if drawn - ran else ""
        print(
            f"{_range_text(some)}: {len(drawn) - len(wrong | (drawn - ran))} of {len(drawn)} schedules right{left}{worst}"
        )
        tiles = {
            name: min(max(row.tiles.get(name, 0) for row in some if row.schedule == schedule) for schedule in ran)
            for name in dict.fromkeys(name for row in some for name in row.tiles)
        }
        if tiles and right:
            counts = (f"{count} of {name}" for name, count in tiles.items())
            print(f"  tiles that every schedule took, at least: {', '.join(counts)}")
    if not rows:
        print("nothing was checked: no schedule of the space is valid for these problems")


def _kind(p: Problem) -> tuple[Any, ...]:
    """What problems of one line share: all but their sizes."""
    return tuple(value for value in p.values.values() if isinstance(value, (str, bool)))


def _range_text(rows: Sequence[CheckRow]) -> str:
    """The problems of some rows in one line: `rows=2..10 columns=3..3587 float16`."""
    first = rows[0].problem
    if all(row.problem == first for row in rows):
        return str(first)
    found: dict[str, Any] = {}
    for name, value in first.values.items():
        values = [row.problem.values[name] for row in rows]
        numbers = [size for each in values for size in (each if isinstance(each, tuple) else (each,))]
        found[name] = (
            value
            if isinstance(value, (str, bool)) or min(numbers) == max(numbers)
            else f"{min(numbers)}..{max(numbers)}"
        )
    return describe_values(found)


def print_merged(result: records.MergeResult) -> None:
    """Print what was taken into a database, and for evidence that contradicts it, the command that decides."""
    print(
        f"entries: {result.entries_added} added, {result.entries_replaced} replaced, {result.entries_kept} kept; "
        f"measurements: {result.measurements_added} added, {result.measurements_kept} known"
    )
    for each in result.contradictions:
        entry = each.entry
        print(f"contradicted: {each}")
        print(
            f"  let a race decide: tiledsched tune {entry.kernel} --arch {entry.arch} --regime {entry.regime} "
            f"-p {text.format_problem(entry.problem)}"
        )
