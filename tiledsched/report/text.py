"""Writes the report: `write_report` makes the document and all files of its folder."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from tiledsched.core.device import describe_gpus
from tiledsched.core.groups import nested
from tiledsched.core.problem import Problem, unit_text
from tiledsched.core.schedule import SHORT
from tiledsched.core.text import NOTHING, class_words, code, microseconds, percent_cell, plural, short
from tiledsched.report import charts
from tiledsched.report.analysis import few_schedules
from tiledsched.report.answer import answer, next_step, target_of
from tiledsched.report.axes import cell
from tiledsched.report.csv_files import knobs_csv, regimes_csv, rules_csv, schedules_csv, sensitivity_csv, winners_csv
from tiledsched.report.document import Block, Chart, Explorer, ExplorerCase, Heading, Paragraph, Table, write_document
from tiledsched.report.first_screen import facts, lead, name_of, next_of, opened_on, shown_problems, status
from tiledsched.report.records import MEASURED, DeviceConditions, ProblemReport, Report, Section
from tiledsched.report.rules import rules_of
from tiledsched.report.vega import Spec
from tiledsched.report.views import (
    FEWEST_DOTS,
    KNOB,
    MOST_PROGRAMS,
    choices_of,
    curve_rows,
    distinct,
    explored,
    source_of,
    views_of,
)

RATES = "Rates of the best schedules"


def write_report(reports: Report | Sequence[Report], out_dir: str | Path) -> list[Path]:
    """Write report.md, report.html, the CSV files and the charts to a folder; returns the files written.

    Several reports, of one kernel on several archs, stand in one document that begins by comparing them; their other files have
    the arch in their names. The folder is made where needed. Files in it with other names are left alone.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    several = [reports] if isinstance(reports, Report) else list(reports)
    tables = {
        f"{report.arch}_{name}" if len(several) > 1 else name: content
        for report in several
        for name, content in _tables(report).items()
    }
    return write_document(
        Path(out_dir), document(several), title=_title(several), markdown="report.md", page="report.html", more=tables
    )


def _tables(report: Report) -> dict[str, str]:
    """The CSV files, by name."""
    return {
        "schedules.csv": schedules_csv(report),
        "sensitivity.csv": sensitivity_csv(report),
        "knobs.csv": knobs_csv(report),
        "winners.csv": winners_csv(report),
        **({"rules.csv": rules} if (rules := rules_csv(report)).strip() else {}),
        **({"regimes.csv": regimes_csv(report)} if report.regimes else {}),
    }


def document(reports: Report | Sequence[Report]) -> list[Block]:
    """The whole report: the answer, the views of one problem, the charts of all problems, then the figures."""
    several = [reports] if isinstance(reports, Report) else list(reports)
    blocks = _explorer(several)
    if not blocks:
        for report in several:
            blocks += [Paragraph(text=answer(report)[0], warning=True), Paragraph(text=f"Next: {next_step(report)}")]
        blocks.insert(2, Heading(text=_title(several), level=1))
        return blocks + [block for report in several for block in _figures(report, "")]
    blocks += _side_by_side(several) if len(several) > 1 else []
    for report in several:
        blocks += _all_problems(report, f" on {report.arch}" if len(several) > 1 else "")
    for report in several:
        blocks += _figures(report, f" ({report.arch})" if len(several) > 1 else "")
    if len(several) == 1:
        folded = any(block.views for block in blocks if isinstance(block, Explorer))
        heading = Heading(text=RATES, folded=folded)
        blocks += _rates(several, heading, f"rates-{several[0].arch}", "Each dot is a problem with its best schedule.")
    return blocks


def _rates(reports: Sequence[Report], heading: Heading, name: str, text: str) -> list[Block]:
    """The chart of rates under a heading, with a text after it; nothing where no rate is known."""
    spec = charts.rates(reports)
    return [heading, Chart(name=name, spec=spec, text=RATES), Paragraph(text=text)] if spec else []


def _title(reports: Sequence[Report]) -> str:
    where = [describe_gpus(each.arch, (one.device_name for one in each.measured.problems)) for each in reports]
    return f"How much the schedule of {reports[0].kernel} matters on {' and '.join(where)}"


def _explorer(reports: Sequence[Report]) -> list[Block]:
    """The views of one problem at a time."""
    cases: list[ExplorerCase] = []
    shared: dict[str, list[dict[str, Any]]] = {}
    by_case = [(report, one) for report in reports for one in shown_problems(report)]
    if not by_case:
        return []
    optional = [
        name for name in reports[0].axes.optional if len({getattr(one.problem, name) for _, one in by_case}) > 1
    ]
    most = max(FEWEST_DOTS, MOST_PROGRAMS // len(by_case))
    chosen = [choices_of(report, one, optional) for report, one in by_case]
    differing = {title for title in chosen[0] if len({values[title] for values in chosen}) > 1}
    for (report, one), values in zip(by_case, chosen, strict=True):
        roofs, curve = f"{report.arch} {one.device_name}", f"{report.arch} {one.provenance} {one.group}"
        if roofs not in shared:
            shared[roofs] = charts.roofs(report, one)
        if curve not in shared:
            alike = [each for each in report.problems if (each.provenance, each.group) == (one.provenance, one.group)]
            points = curve_rows(alike, partial(name_of, report=report))
            shared[curve] = points if len({point["size"] for point in points}) > 1 else []
        rows, notes, pair = views_of(one, most, report.tile_knobs)
        cases.append(
            ExplorerCase(
                values={title: value for title, value in values.items() if title in differing},
                title=f"{report.kernel} {one.problem}",
                source=source_of(report, one),
                status=status(one, report),
                measured=one.provenance == MEASURED,
                next=next_of(one, report),
                facts=facts(one, report),
                lead=lead(one, report),
                target=shlex.join(target_of(report, one)),
                pair=[f"{KNOB}{knob}" for knob in pair],
                rows={
                    **rows,
                    "roofline": rows["roofline"] if shared[roofs] else (),
                    "roofs": roofs,
                    "curve": curve if shared[curve] else (),
                },
                notes={**notes, "roofline": charts.share_of_ceiling(report, one)},
            )
        )
    views = [view for view in charts.views(reports) if any(case.rows[view.main] for case in cases)]
    problems = [one for _, one in by_case]
    names = [
        f"`{letters}` is `{knob}`"
        for knob, letters in SHORT.items()
        if any(knob in one.best.schedule for one in problems)
    ]
    text = "Click a square, a dot or a mark for its schedule in full, what it takes of the GPU, and commands that reproduce it."
    if names:
        text += f" In schedules, {', '.join(names)}; a knob that is not named is at its plainest value."
    return [Explorer(views=views, cases=cases, shared=shared, first=opened_on(problems), marks=text)]


def _all_problems(report: Report, after: str) -> list[Block]:
    """What all problems say together: the answer, and charts."""
    first, *rest = answer(report)
    measured = bool(report.measured.problems)
    blocks: list[Block] = [
        Heading(text=f"All problems{after}"),
        Paragraph(text=first, warning=not measured, measured=measured),
        *(Paragraph(text=each) for each in rest),
        *([Paragraph(text=text)] if (text := next_step(report)) else []),
        *([Paragraph(text=_left_out(report))] if report.left_out else []),
    ]
    for section in (report.measured, report.modelled):
        problems = explored(section.problems)
        if not problems:
            continue
        name = f"{section.provenance}-{report.arch}"
        wanted: list[tuple[str, str, Spec | None]] = [
            (
                "costs",
                "Each dot is a problem: how many times as long as the best it takes with the second best tile, with what would "
                "be served without tuning, with the compiler defaults, and with the median of all programs tried. The bold tick "
                "is the median over problems.",
                charts.costs(report, problems),
            ),
            (
                "knobs",
                "Each line compares programs of one problem that differ in this knob alone, and is the mean "
                f"over problems with {'its 95% interval' if section.provenance == MEASURED else 'the range of the estimates'}. "
                "Orange knobs are best at different values for different problems (the folded table of rules says which, where "
                "one was found); blue ones can be left at one value.",
                charts.knobs(report, problems),
            ),
        ]
        for kind, text, spec in wanted:
            if spec is not None:
                blocks += [Chart(name=f"{kind}-{name}", spec=spec, text=spec["title"]["text"]), Paragraph(text=text)]
    return blocks


def _left_out(report: Report) -> str:
    """Which problems the report is on, of a database that knows more of them than a page can show."""
    known = len({one.problem for one in report.problems} | {entry.problem for entry in report.unmeasured})
    every = plural(known + report.left_out, "problem")
    return (
        f"{every} of this kernel are known. This report is on {known:,} of them: those that ship, and those that were tuned "
        "last. `tiledsched report --seen` is on the problems that your programs called, and `tiledsched db query` finds the "
        "others."
    )


def _few(problems: Sequence[ProblemReport], after: str) -> list[Block]:
    """How few schedules are enough."""
    sets, sentence = few_schedules(problems)
    rows = [(f"{limit * 100:.0f}%", str(len(chosen)), ", ".join(map(short, chosen))) for limit, chosen in sets.items()]
    head = ("within", "schedules", "which")
    return _part(f"How few schedules are enough{after}", head, rows, sentence) if sentence else []


def _side_by_side(reports: Sequence[Report]) -> list[Block]:
    """The problems that several archs have in common."""
    best = nested(
        (one.problem, report.arch, one)
        for report in reports
        for one in (*report.modelled.problems, *report.measured.problems)  # what was measured is told
        if one.accum_mode == "fp32"
    )
    rows = [
        (
            str(problem),
            *(
                f"{microseconds(found[report.arch].best.us)} µs {found[report.arch].provenance}: "
                f"{short(found[report.arch].best.schedule)}"
                if report.arch in found
                else NOTHING
                for report in reports
            ),
        )
        for problem, found in sorted(best.items())
        if len(found) > 1
    ]
    text = "Each dot is a problem with its best schedule; only problems of several GPUs are drawn."
    title = f"Best schedules of {plural(len(rows), 'problem')} on each GPU"
    return [
        *_rates(reports, Heading(text="The same problems on each GPU"), "rates", text),
        *_part(title, ("problem", *(report.arch for report in reports)), rows),
    ]


def _part(
    title: str, head: Iterable[str], rows: Iterable[Iterable[str]], text: str = "", charts: Sequence[Block] = ()
) -> list[Block]:
    """A folded table under a heading, with a text and charts before it; nothing where it has no rows."""
    table = _table(head, rows)
    before = [Paragraph(text=text)] if text else []
    return [Heading(text=title, folded=True), *before, *charts, table] if table.rows else []


def _with_accumulators(problem: Problem, accum_mode: str) -> str:
    """A problem, with its class where that is not fp32."""
    return str(problem) + (f", {class_words(accum_mode)}" if accum_mode != "fp32" else "")


def _figures(report: Report, after: str) -> list[Block]:
    """Tables, folded."""
    blocks = [
        block
        for section in (report.measured, report.modelled)
        if section.problems
        for block in _section(section, report, f", {section.provenance}{after}")
    ]
    blocks += _regimes(report, after)
    blocks += _part(
        f"Knobs that do not change the machine code{after}",
        ("knob", "pairs built", "same machine code", "share"),
        (
            (f"`{knob.knob}`", f"{knob.pairs:,}", f"{knob.same:,}", percent_cell(knob.same / knob.pairs))
            for knob in report.inert
        ),
        f"Over {plural(report.builds, 'build')}: pairs of schedules that differ in one knob only, and how many of them "
        "are the same machine code. A grid may depend on a knob that the machine code does not.",
    )
    blocks += _part(
        f"Served without a measurement or an estimate{after}",
        ("problem", "how it is known", "schedule", "source"),
        (
            (
                _with_accumulators(entry.problem, entry.accum_mode),
                entry.provenance,
                short(entry.schedule),
                entry.source or NOTHING,
            )
            for entry in report.unmeasured
        ),
    )
    blocks += _part(
        f"Tuned with --numerics invariant{after}",
        ("problem", "schedule", "group and price"),
        ((str(each.problem), short(each.schedule), each.batch_invariant) for each in report.invariant),
    )
    # The problems for which only what computes the bits of what was served could win.
    blocks += _part(
        f"Tuned with --numerics same{after}",
        ("problem", "schedule", "whose numbers"),
        (
            (str(one.problem), short(one.served.schedule), one.served.same_numbers)
            for one in report.measured.problems
            if one.served is not None and one.served.same_numbers
        ),
    )
    blocks += _part(
        f"Candidates that failed{after}",
        ("stage", "kind", "candidates", "for example", "schedule"),
        (
            (line.stage, line.kind, str(line.candidates), code(line.example), short(line.schedule))
            for line in report.failures
        ),
    )
    return blocks + _conditions(report, after)


def _section(section: Section, report: Report, after: str) -> list[Block]:
    blocks: list[Block] = [Heading(text=f"Schedules of {plural(len(section.problems), 'problem')}{after}", folded=True)]
    for _, members in groupby(section.problems, key=lambda one: one.group):
        group = list(members)
        blocks += [Heading(text=report.group_text(group[0]), level=3), _best_table(group, report)]
    blocks += _rules(section, report, after)
    blocks += _few(explored(section.problems), after)
    return blocks


def _best_table(group: Sequence[ProblemReport], report: Report) -> Table:
    """What is served for each problem of a group, what ties with it, and what other choices cost."""
    columns = report.axes.columns_of([one.problem for one in group])
    return _table(
        (
            "problem",
            "served",
            f"{group[0].provenance} µs",
            "rate",
            "ties",
            "best, where not served",
            "second best tile takes longer by",
            "served without tuning takes longer by",
            "compiler defaults take longer by",
        ),
        (
            (
                " ".join(f"{title}={cell(one.problem, fields)}" for title, fields in columns.items()),
                short(one.explained.schedule if one.explained else one.best.schedule),
                microseconds(one.serves.us) if one.serves else NOTHING,
                f"{one.serves.rate:,.1f} {unit_text(one.problem)}" if one.serves else NOTHING,
                str(len(one.ties)) if one.ties else NOTHING,
                NOTHING if one.serves is one.best else f"{short(one.best.schedule)} {microseconds(one.best.us)} µs",
                percent_cell(one.tile_drop),
                percent_cell(one.untuned.relative - 1 if one.untuned and one.untuned.relative else None),
                percent_cell(one.default_drop),
            )
            for one in group
        ),
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    return Table(head=tuple(head), rows=tuple(map(tuple, rows)))


def _rules(section: Section, report: Report, after: str) -> list[Block]:
    """For which problems each value of a knob is good."""
    return _part(
        f"For which problems a value is good{after}",
        ("rule", "right for", "saves"),
        (
            (
                rule.text,
                f"{rule.right} of {rule.problems}, one value for all {rule.constant_right}",
                percent_cell(rule.saved),
            )
            for rule in rules_of(section.problems, report.tile)
        ),
        "A value is good for a problem if the best program with it takes at most 1% longer than the best of all (of estimates: "
        "longer by at most the model's error), or cannot be told apart from it. The winners of all searches count. A rule is "
        "right for a problem if the value it names is good there. It is judged on problems that it was made without, a fifth "
        "at a time. One value for all is the one that is good for most. A knob has no rule where chance may have made it, or "
        "where its values differ by no more than noise. `saves` is how much less time the rule's value takes than the one "
        "value for all, where the two differ and many programs of the problem were timed.",
    )


def _regimes(report: Report, after: str) -> list[Block]:
    spec = charts.regimes(report)
    title = "What the winner of one regime costs in the other"
    return _part(
        f"Burst against sustained{after}",
        (
            "problem",
            "programs in both",
            "burst winner",
            "sustained winner",
            "burst winner when sustained",
            "sustained winner in a burst",
        ),
        (
            (
                _with_accumulators(one.problem, one.accum_mode),
                str(one.programs),
                short(one.burst_winner),
                "the same" if one.same else short(one.sustained_winner),
                percent_cell(one.burst_loss) + ("*" if one.burst_loss_distinct else ""),
                percent_cell(one.sustained_loss) + ("*" if one.sustained_loss_distinct else ""),
            )
            for one in report.regimes
        ),
        f"Of {plural(len(report.regimes), 'problem')} with programs measured in both regimes, "
        f"{sum(not one.same for one in report.regimes)} have another winner at the power cap. Each figure says "
        f"how much longer the winner of "
        "one regime takes in the other than that regime's own winner, both timed in that other regime; a star "
        "marks 95% intervals that are apart.",
        [Chart(name=f"regimes-{report.arch}", spec=spec, text=title)] if spec else (),
    )


def _conditions(report: Report, after: str) -> list[Block]:
    blocks: list[Block] = [
        block
        for device in report.conditions
        for block in (
            Heading(text=f"Conditions: {device.device.name}{after}", folded=True),
            _condition_table(device, report.regime),
        )
    ]
    if report.elsewhere:
        left_out = plural(report.elsewhere, "measurement")
        blocks.append(Paragraph(text=f"Left out: {left_out} of another regime, device, compiler or way of timing."))
    found = sum(one.programs for one in report.measured.problems)
    listed = sum(len(distinct(one)) for one in report.measured.problems)
    if listed < found:
        text = (
            f"This report lists {listed:,} of the {found:,} measured programs: of each problem the fastest, the fastest of each "
            "tile, the slowest, what is served, and others of every speed. Counts and medians are of all; effects of knobs "
            "are of those listed."
        )
        blocks.append(Paragraph(text=text))
    compilers = report.model_compilers if report.modelled.problems else ()
    return blocks + _part(
        f"Conditions: model{after}",
        ("condition", "value"),
        (("modelled from builds by", compiler) for compiler in compilers),
    )


def _condition_table(device: DeviceConditions, regime: str) -> Table:
    gpu = device.device
    memory = f", {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else ""
    cache = f", {gpu.l2_bytes / 2**20:.0f} MiB of L2" if gpu.l2_bytes else ""
    reasons = (f"{name} (in {plural(count, 'measurement')})" for name, count in device.throttle_reasons)
    rows = (
        ("device", f"{gpu.arch}, {gpu.sm_count} SMs{memory}{cache}"),
        ("regime", regime),
        ("driver", ", ".join(device.drivers) or NOTHING),
        ("compiler", "; ".join(device.compilers)),
        ("kernel source", ", ".join(device.source_hashes) or NOTHING),
        ("runner", ", ".join(device.runners)),
        ("SM clock", _clock(device.sm_clock_mhz)),
        ("memory clock", _clock(device.memory_clock_mhz)),
        ("highest power", f"{device.power_w:.0f} W" if device.power_w else "not known"),
        ("highest temperature", f"{device.temperature_c} °C" if device.temperature_c else "not known"),
        ("throttle reasons", ", ".join(reasons) or ("none seen" if device.sm_clock_mhz else "not known")),
        ("taken", f"{device.first:%Y-%m-%d %H:%M} to {device.last:%Y-%m-%d %H:%M} UTC"),
        ("measurements", f"{device.measurements:,} of {device.samples:,} samples in all"),
    )
    return Table(head=("condition", "value"), rows=rows)


def _clock(mhz: tuple[int, int] | None) -> str:
    return f"{' to '.join(map(str, dict.fromkeys(mhz)))} MHz" if mhz else "not known"
