"""How entries, landscapes and comparisons are printed, and what they are in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tiledsched.cli.output import note, print_table, print_wrapped, table_lines, width
from tiledsched.core.device import arch_of
from tiledsched.core.groups import grouped, nested
from tiledsched.core.problem import Problem, rate_of, rate_text, unit_text
from tiledsched.core.registry import title_of
from tiledsched.core.text import labels_of, plural
from tiledsched.measure.clocks import describe_throttling
from tiledsched.measure.runner import Device
from tiledsched.store.evidence import stale, stale_by_cause, throttled
from tiledsched.store.records import PROVENANCES, Entry, LandscapeSummary

if TYPE_CHECKING:
    from tiledsched.report.compare import Compared, Comparison
    from tiledsched.rivals.rows import BenchRow
    from tiledsched.serve.entries import Layer
    from tiledsched.store.manifest import ShippedLandscape
    from tiledsched.store.queries import RegimeComparison
    from tiledsched.studies.ablation.ladder import AblationRow

ABLATION = (
    "view",
    "rung",
    "knob",
    "from",
    "to",
    "median_us",
    "ci_low_us",
    "ci_high_us",
    "speedup_over_previous",
    "speedup_over_plain",
    "status",
    "schedule",
)
"""The columns of an ablation that are printed, by their names in its CSV file and JSON."""
MOST_ROWS = 20
"""Problems that a comparison lists, unless all are asked for."""
LEFT = {"arch", "provenance", "schedule"}
"""The columns of entries that are aligned to the left."""


def entry_json(entry: Entry, compiler: str = "") -> dict[str, Any]:
    """The row that `show --json` prints: flat where people filter, nested where evidence lies. `compiler` is the one here."""
    problem = entry.problem
    return {
        "arch": entry.arch,
        "kernel": problem.kernel,
        **short_values(problem),
        **{name: list(value) if isinstance(value, tuple) else value for name, value in problem.values.items()},
        "provenance": entry.provenance,
        "compiler": entry.compiler,
        "stale": stale(entry, compiler),
        "schedule": entry.schedule,
        "median_us": entry.median_us,
        "tflops": entry.tflops,
        "gbps": problem.gbps(entry.median_us) if entry.median_us else None,
        "evidence": entry,
    }


def short_values(problem: Problem) -> dict[str, Any]:
    """Its values by the short names of the kernel's label: of several dims that differ, all, as `1/4096`."""
    labels = labels_of(problem.declaration) if problem.known else {}
    found: dict[str, Any] = {}
    for short, names in labels.items():
        values = dict.fromkeys(getattr(problem, name) for name in names)
        found[short] = next(iter(values)) if len(values) == 1 else "/".join(map(str, values))
    return found


def print_entries(entries: Sequence[Entry], compiler: str = "") -> None:
    """Print what is served with `compiler`: a table for each kernel, or where that is too wide, two lines for each entry."""
    by_kernel = grouped((entry.problem.kernel, entry) for entry in entries)
    for place, found in enumerate(by_kernel.values()):
        print("\n" * (place > 0) + f"tuned schedules of {_title(found[0].problem)}")
        lines = _entry_lines(found, compiler)
        if max(map(len, lines)) > width():
            _print_narrow(found, compiler)
        else:
            print(*lines, sep="\n")
    changed, built = stale_by_cause(entries, compiler)
    if changed:
        kernels = ", ".join(sorted({entry.kernel for entry in changed}))
        note(
            f"stale: the source of {kernels} has changed since the evidence was taken; tune it again, or "
            "run: tiledsched refresh KERNEL"
        )
    slowed = [words for entry in entries if (words := throttled(entry, {}))]
    if slowed:
        note(f"held down: measured {slowed[0]}; tune again when the GPU holds its clock")
    old = sorted({entry.compiler for entry in built})
    if old:
        note(
            f"stale: tileiras {', '.join(old)} built what was measured, and here is {compiler}; run: tiledsched refresh"
        )


def _title(problem: Problem) -> str:
    """The kernel of a problem, and where it is declared if its name does not tell."""
    return title_of(problem.declaration) if problem.known else problem.kernel


def _entry_lines(entries: Sequence[Entry], compiler: str) -> list[str]:
    """The lines of a table of one kernel's entries. The schedule is its last column: it may be as long as it is."""
    rows = [_entry_row(entry, compiler) for entry in entries]
    shown = [
        name for name in rows[0] if len({row[name] for row in rows} - {""}) > 1 or not _may_be_left_out(entries, name)
    ]
    return table_lines(shown, [[row[name] for name in shown] for row in rows], set(shown) - LEFT)


def _entry_row(entry: Entry, compiler: str) -> dict[str, str]:
    us = entry.median_us
    return {
        "arch": entry.arch,
        **_columns(entry.problem),
        "compiler": entry.compiler,
        "provenance": _provenance(entry, compiler),
        "median us": f"{us:.1f}" if us else "-",
        "rate": (rate_text(entry.problem, us) if us else "") or "-",
        "model us": f"{entry.model_us:.1f}" if entry.model_us else "-",
        "runner-up": f"{entry.margin:+.1%}" if entry.margin is not None else "-",
        "ties": str(len(entry.ties)),
        "programs": str(entry.candidates),
        "schedule": entry.schedule.short(),
    }


def _columns(problem: Problem) -> dict[str, str]:
    """Its values as people read them: short names first, then the fields that have no short name."""
    labels = labels_of(problem.declaration) if problem.known else {}
    covered = {name for names in labels.values() for name in names}
    values = {**short_values(problem), **{name: value for name, value in problem.values.items() if name not in covered}}
    words = {True: "yes", False: "no"}
    return {name: words[value] if isinstance(value, bool) else str(value) for name, value in values.items()}


def _may_be_left_out(entries: Sequence[Entry], name: str) -> bool:
    """Whether a column may be left out if all its values are equal: the compiler, and fields that have their default."""
    return name == "compiler" or all(
        name in entry.problem.values and name not in entry.problem.to_json() for entry in entries
    )


def _print_narrow(entries: Sequence[Entry], compiler: str) -> None:
    for entry in entries:
        us = entry.median_us
        timed = ", ".join(filter(None, [f"{us:.1f} us", rate_text(entry.problem, us)])) if us else "not measured"
        print_wrapped(f"{entry.arch} {entry.problem}: {timed} ({_provenance(entry, compiler)})")
        print_wrapped(entry.schedule.short(), "    ")


def _provenance(entry: Entry, compiler: str) -> str:
    """The provenance; the regime, unless it is burst; `held down` where the GPU's clock was, `stale` where another compiler or
    other source made what was measured, `same numbers` where only results that stayed the same could win, and `batch-invariant`
    where a row's bits do not depend on the batch.
    """
    slowed = bool(throttled(entry, {}))
    numbers = "same numbers" if entry.same_numbers else "batch-invariant" * bool(entry.group)
    marks = "held down" * slowed, "stale" * stale(entry, compiler), numbers
    return ", ".join(filter(None, (entry.provenance, "" if entry.regime == "burst" else entry.regime, *marks)))


def print_summary(entries: Sequence[Entry]) -> None:
    """Print for each kernel and arch how many problems are known, how, since when, and from which layer. Archs for which all that
    is alike share a line.
    """
    groups = grouped(((entry.kernel, entry.arch), entry) for entry in entries)
    alike: dict[tuple[str, str, str], list[str]] = {}
    newest: dict[tuple[str, str, str], str] = {}
    modelled: dict[tuple[str, str, str], list[int]] = {}
    for (kernel, arch), found in groups.items():
        counts = {
            provenance: len(problems)
            for provenance in PROVENANCES
            if (problems := {entry.problem for entry in found if entry.provenance == provenance})
        }
        counted = "" if counts.keys() == {"modelled"} else ", ".join(f"{count} {how}" for how, count in counts.items())
        place = kernel, counted, " and ".join(dict.fromkeys(entry.layer for entry in found))
        alike.setdefault(place, []).append(arch)
        modelled.setdefault(place, []).append(counts.get("modelled", 0))
        known = (entry.measurement.created_at if entry.measurement else entry.updated_at for entry in found)
        newest[place] = max([newest.get(place, ""), *(f"{when:%Y-%m-%d}" for when in known if when)])
    print("problems with a schedule, by kernel and arch")
    for place in sorted(alike, key=lambda each: (each[0], not each[1])):
        kernel, counted, layers = place
        archs = sorted(alike[place], key=lambda arch: (len(arch), arch))
        least, most = min(modelled[place]), max(modelled[place])
        counted = counted or f"{least if least == most else f'{least} to {most}'} modelled"
        since = f", newest {newest[place]}" if newest[place] else ""
        each = " each" * (len(archs) > 1)
        print_wrapped(f"{kernel} on {', '.join(archs)}: {counted}{each}{since}, layer {layers}", hanging="  ")


def print_layers(
    layers: Sequence[Layer], entries: Sequence[Entry], covers: Mapping[tuple[str, ...], list[str]]
) -> None:
    """Print which layer answers for each problem, and which others have something for it."""
    for layer in reversed(layers):
        size = plural(len(layer.entries), "entry", "entries")
        print_wrapped(f"{layer.name}: {layer.where}, {size}" + (f"; {layer.error}" if layer.error else ""))
    for entry in entries:
        us = f", {entry.median_us:.1f} us" if entry.median_us else ""
        also = f" (also in {', '.join(covers[entry.key])})" if covers[entry.key] else ""
        print_wrapped(f"{entry.layer:8} {entry.arch} {entry.problem}: {entry.provenance}{us}{also}")


def landscape_json(line: LandscapeSummary) -> dict[str, Any]:
    """One line of `show --landscapes`, for JSON and for people."""
    return {
        "problem": line.problem,
        "device": line.device_name,
        "arch": line.arch,
        "regime": line.regime,
        "distinct_programs": line.distinct_programs,
        "measurements": line.measurements,
    }


def print_landscapes(
    lines: Sequence[LandscapeSummary],
    compared: Sequence[RegimeComparison],
    shipped: Sequence[ShippedLandscape],
    modelled: Sequence[Mapping[str, Any]],
) -> None:
    """Print what ships, a line for each problem that was measured and each file that is only estimated; then what is measured in
    the database, what wins in each regime there, and what serving the other regime's winner costs.
    """
    regimes = grouped(((each.problem.kernel, each.arch, str(each.problem)), each.regime) for each in shipped)
    if regimes:
        print("measured landscapes that ship")
    for (kernel, arch, problem), of in sorted(regimes.items()):
        print_wrapped(f"{kernel} on {arch}: {problem}, {' and '.join(sorted({*of}))}")
    if modelled:
        print("\n" * bool(regimes) + "compiled programs that ship, whose times a report estimates (modelled)")
    for one in modelled:
        counted = f"{one['builds']:,} builds for {plural(one['problems'], 'problem')}, {one['file'].name}"
        print_wrapped(f"{one['kernel']} on {', '.join(one['archs'])}: {counted}", hanging="  ")
    rows = list(map(landscape_json, lines))
    if rows:
        print("\n" * bool(regimes or modelled) + "measured in your database")
        print_table(list(rows[0]), [list(row.values()) for row in rows], ("distinct_programs", "measurements"))
    if compared:
        print("\nburst against sustained: * marks a difference beyond the 95% intervals")
        print_table(
            ("device", "problem", "programs in both", "burst winner", "in sustained", "sustained winner", "in burst"),
            [
                (
                    one.device_name,
                    one.problem,
                    one.programs,
                    one.burst_winner.short(),
                    f"+{one.burst_loss:.1%}" + "*" * one.burst_loss_distinct,
                    "the same" if one.same else one.sustained_winner.short(),
                    f"+{one.sustained_loss:.1%}" + "*" * one.sustained_loss_distinct,
                )
                for one in compared
            ],
        )


def print_compared(found: Comparison, *, everything: bool = False) -> None:
    """Print the verdict, what is unlike between the sides, and what moved from A to B, slower first, with the winners where they
    changed.
    """
    from tiledsched.report.comparison_text import conditions_of, drift_of, reasons_of, side_facts, verdict_of

    print_wrapped(verdict_of(found))
    for name, text in side_facts(found):
        print_wrapped(f"{name}: {text}")
    for text in conditions_of(found):
        print_wrapped(text)
    mean = f", B takes {found.mean:.3f}x the time of A (geometric mean)" if found.mean else ""
    print_wrapped(f"{plural(len(found.rows), 'problem')} on both sides{mean}")
    if drift := drift_of(found):
        print_wrapped(drift)
    rows = [row for row in found.rows if everything or row.verdict != "same" or row.winner_changed]
    shown = rows if everything else rows[:MOST_ROWS]
    if shown:
        print()
        cells = [_compared_row(row, found) for row in shown]
        lines = table_lines(list(cells[0]), [list(row.values()) for row in cells], ("A us", "B us"))
        if max(map(len, lines)) > width():
            for row in cells:
                print_wrapped(f"{row['verdict']} {row['B / A']}, {row['A us']} to {row['B us']} us: {row['problem']}")
                if row["winner"]:
                    print_wrapped(row["winner"], "    ")
        else:
            print(*lines, sep="\n")
    if len(shown) < len(rows):
        print_wrapped(f"{len(rows) - len(shown)} more: --all lists all, and -o DIR writes a page of them")
    reasons = reasons_of(found)
    if reasons:
        print_wrapped("not compared:")
    for side, count, why, _ in reasons:
        print_wrapped(f"{plural(count, 'problem')} of {side}: {why}", "  ")
    print()


def _compared_row(row: Compared, found: Comparison) -> dict[str, str]:
    from tiledsched.report.comparison_text import label_of, unlike_in_a

    winner = "the same machine code" if row.verdict != "same" and row.same_program else ""
    if row.winner_differs:
        winner = f"{'a tie' if row.winner_tied else 'now'}: {row.b.schedule}; in A: {unlike_in_a(row)}"
    bounds = "" if row.verdict == "estimated" else f" [{row.low:.3f}, {row.high:.3f}]"
    return {
        "verdict": row.verdict,
        "B / A": f"{row.ratio:.3f}{bounds}",
        "A us": f"{row.a.us:.1f}",
        "B us": f"{row.b.us:.1f}",
        "problem": label_of(row.b, found),
        "winner": winner,
    }


def print_bench(rows: Sequence[BenchRow]) -> None:
    """Print a table for each regime: a line for each problem, and for each method its rate and its time over ours."""
    for regime, found in grouped((row.regime, row) for row in rows).items():
        methods = list(dict.fromkeys(row.method for row in found))
        cells = nested((row.problem, row.method, row) for row in found)
        units = "/".join(dict.fromkeys(unit_text(problem) for problem in cells))
        print(f"{regime}: {units}, and in brackets the time of each method over ours")
        print_table(
            ("problem", *methods),
            [(problem, *(_bench_cell(mine, method) for method in methods)) for problem, mine in cells.items()],
            right=methods,
        )
    slowed = []
    for row in rows:
        device = Device(name=row.device, arch=arch_of(row.device), sm_count=0)
        words = describe_throttling(row.conditions, device, row.regime)
        slowed += [words] if words else []
    if slowed:
        note(f"clock held down in {len(slowed)} of {plural(len(rows), 'row')}, {slowed[0]}: the rates are too low")


def _bench_cell(rows: Mapping[str, BenchRow], method: str) -> str:
    row, ours = rows.get(method), rows.get("tiledsched")
    if row is None or row.median_us is None:
        return "-" if row is None else row.status
    value = row.tflops if row.flops else rate_of(row.problem, row.median_us)
    if method in ("tiledsched", "matmul") or ours is None or not ours.median_us:
        return f"{value:.0f}"
    return f"{value:.0f} ({row.median_us / ours.median_us:.2f}x)"


def print_ablation(rows: Sequence[AblationRow]) -> None:
    """Print for each problem the ladder, and the tuned schedule without each knob; of what else was tried, only failures."""
    for problem in dict.fromkeys(row.problem for row in rows):
        print(f"{problem}: from the plain schedule to the tuned one")
        shown = [row for row in rows if row.problem == problem and (row.view != "tried" or row.status != "ok")]
        cells = [row.to_csv() for row in shown]
        print_table(ABLATION, [[row[name] for name in ABLATION] for row in cells], ("rung", *ABLATION[5:10]))
