"""Writes the report: `write_report` makes the document and all files of its folder."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tiledsched.core.labels import format_problem
from tiledsched.core.problem import Problem, unit_of
from tiledsched.core.schedule import Schedule
from tiledsched.measure.estimate import Timing
from tiledsched.report import charts
from tiledsched.report.axes import cell, show
from tiledsched.report.csv_files import (
    importance_csv,
    interactions_csv,
    regimes_csv,
    regret_csv,
    schedules_csv,
    sensitivity_csv,
)
from tiledsched.report.document import NOTHING, Block, Cards, Chart, Contents, Heading, Paragraph, Table, write_document
from tiledsched.report.rate_charts import rates_of
from tiledsched.report.records import (
    MEASURED,
    MODELLED,
    DeviceConditions,
    Interaction,
    KnobShare,
    ProblemReport,
    Report,
    Section,
    Tile,
)
from tiledsched.report.regret import broad, enough

NOT_MEASURED = "not measured"


def write_report(reports: Report | Sequence[Report], out_dir: str | Path) -> list[Path]:
    """Write report.md, report.html, the CSV files and the charts to a folder; returns the files written.

    Several reports, of one kernel on several archs, stand in one document that begins by comparing them; their other files have
    the arch in their names. The folder is made where needed. Files in it with other names are left alone.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    several = [reports] if isinstance(reports, Report) else list(reports)
    folder = Path(out_dir)
    blocks = document(several[0]) if len(several) == 1 else side_by_side(several)
    tables: dict[str, str] = {}
    for report in several:
        before = f"{report.arch}_" if len(several) > 1 else ""
        tables |= {before + name: content for name, content in _tables(report).items()}
    return write_document(folder, blocks, title=_title(several), markdown="report.md", page="report.html", more=tables)


def _tables(report: Report) -> dict[str, str]:
    """The CSV files, by name."""
    return {
        "schedules.csv": schedules_csv(report),
        "sensitivity.csv": sensitivity_csv(report),
        **({"regimes.csv": regimes_csv(report)} if report.regimes else {}),
        **({"interactions.csv": interactions_csv(report)} if report.measured.interactions else {}),
        **({"importance.csv": importance_csv(report)} if report.measured.shares else {}),
        **({"regret.csv": regret_csv(report)} if len(broad(report.measured.problems)) > 1 else {}),
    }


def document(report: Report) -> list[Block]:
    """The whole report: the answer, the charts, then every figure."""
    warning = [Paragraph(text=report.warning, warning=True)] if report.warning else []
    return [*warning, Heading(text=_title([report]), level=1), *_answer(report), Contents(), *_body(report, "")]


def side_by_side(reports: Sequence[Report]) -> list[Block]:
    """The report on several archs: first their answers and the problems they share, then each arch."""
    blocks: list[Block] = [Heading(text=_title(reports), level=1)]
    blocks += [_overview(reports)]
    if (spec := rates_of(reports)) is not None:
        blocks.append(Chart(name="rates", spec=spec, text="Rates of the best schedules, arch by arch"))
    blocks += [Contents(), Heading(text="The same problems"), _shared(reports)]
    for report in reports:
        blocks.append(Heading(text=f"{report.kernel} on {report.arch}"))
        blocks += [Paragraph(text=report.warning, warning=True)] if report.warning else []
        blocks += [*_answer(report), *_body(report, report.arch)]
    return blocks


def _overview(reports: Sequence[Report]) -> Table:
    """A table with the answer of each arch."""
    names = list(dict.fromkeys(name for report in reports for name in _figures(report)))
    rows = []
    for report in reports:
        figures = _figures(report)
        problems = _main(report).problems
        where = ", ".join(sorted({one.device_name for one in problems})) or "no GPU: modelled"
        rows.append(
            (report.arch, where, str(len(problems)), *(figures.get(name, ("not known", ""))[0] for name in names))
        )
    return _table(("arch", "measured on", "problems", *names), rows)


def _shared(reports: Sequence[Report]) -> Table:
    """A table of the problems that are in more than one report: their time and schedule in each."""
    best: dict[Problem, dict[str, ProblemReport]] = {}
    for report in reports:
        for one in (*report.modelled.problems, *report.measured.problems):  # what was measured is told
            if one.accum_mode == "fp32":
                best.setdefault(one.problem, {})[report.arch] = one
    archs = [report.arch for report in reports]
    head = ["problem", *(f"{arch}, {what}" for arch in archs for what in ("us", "schedule"))]
    rows = []
    for problem, found in sorted(best.items()):
        if len(found) > 1:
            row = [str(problem)]
            for arch in archs:
                here = found.get(arch)
                row += (
                    [f"{_us(here.best.us)} {here.provenance}", _short(here.best.schedule)]
                    if here
                    else [NOTHING, NOTHING]
                )
            rows.append(row)
    return _table(head, rows)


def _answer(report: Report) -> list[Block]:
    """The first screen: what the choice of schedule is worth here."""
    section = _main(report)
    blocks: list[Block] = [Paragraph(text=line) for line in _summary(report)[:1]]
    if figures := _figures(report):
        blocks.append(Cards(items=tuple(figures.values())))
    elif section.problems:
        todo = f"tiledsched tune {report.kernel} --arch {report.arch}"
        blocks.append(Paragraph(text=f"Only chosen schedules are known here; `{todo}` finds what others cost."))
    if (spec := charts.costs(section)) is not None:
        text = (
            f"What a choice costs: each dot is a problem, {section.provenance}, and how much longer it takes with that choice in "
            "place of the best; the red tick is the geometric mean."
        )
        blocks += [Chart(name=f"costs-{report.arch}", spec=spec, text=text), Paragraph(text=text)]
    return blocks


def _main(report: Report) -> Section:
    """The section that the answer is taken from: the measured one, where anything was measured."""
    return report.measured if report.measured.problems else report.modelled


def _figures(report: Report) -> dict[str, tuple[str, str]]:
    """The figures of the answer: name -> (figure, the rest of the sentence)."""
    section = _main(report)
    kind = "" if section.provenance == MEASURED else f", {MODELLED}"
    found: dict[str, tuple[str, str]] = {}

    def mean(what: str, drop_of: Callable[[ProblemReport], float | None]) -> None:
        known = [(drop, one) for one in section.problems if (drop := drop_of(one)) is not None]
        if known:
            joined = statistics.geometric_mean([1 + drop for drop, _ in known]) - 1
            most, where = max(known, key=lambda each: each[0])
            over = f"{_count(len(known), 'problem')}{kind}"
            rest = f"{what} costs ({over}); most: {most * 100:+.0f}% for {where.problem}"
            found[what] = f"{joined * 100:+.1f}%", rest

    mean("the default schedule", lambda one: one.default_drop)
    mean("the second best tile", lambda one: one.tile_drop)
    covered = enough(broad(section.problems))[-1:] if section.provenance == MEASURED else []
    if covered and covered[0].problems > 1:
        limit = f"{covered[0].limit * 100:.0f}%"
        rest = f"or fewer keep all {covered[0].problems} problems with a landscape within {limit} of their best"
        found[f"enough for {limit}"] = _count(len(covered[0].schedules), "schedule"), rest
    return found


def _body(report: Report, arch: str) -> list[Block]:
    """Charts, then tables. Where `arch` is given, headings end with it, because other archs are in the document."""
    after = f" ({arch})" if arch else ""
    blocks: list[Block] = [Paragraph(text=line) for line in _summary(report)[1:]]
    sections = [section for section in (report.measured, report.modelled) if section.problems]
    for section in sections:
        for name, (heading, text, spec) in charts.of_section(section, report).items():
            blocks += [
                Heading(text=heading),
                Paragraph(text=text),
                Chart(name=f"{name}-{report.arch}", spec=spec, text=f"{heading}: {text}"),
            ]
            if name == f"regret-{MEASURED}":
                blocks += _enough(section)
    blocks += _regimes(report)
    for section in sections:
        blocks += _section(section, report)
    blocks += [*_inert(report), *_unmeasured(report), *_failures(report), *_conditions(report)]
    return [replace(block, text=block.text + after) if isinstance(block, Heading) else block for block in blocks]


def _enough(section: Section) -> list[Block]:
    """How few schedules are enough."""
    text = (
        "How few schedules keep every problem with a landscape within a limit of its best, found greedily; a schedule "
        "covers only what it was timed on."
    )
    rows = [
        (
            f"{one.limit * 100:.0f}%",
            str(len(one.schedules)),
            str(one.problems),
            ", ".join(map(_short, one.schedules[:3])) + (", ..." if len(one.schedules) > 3 else ""),
        )
        for one in enough(broad(section.problems))
    ]
    return [Paragraph(text=text), _table(("limit", "schedules", "problems", "the first of them"), rows)]


def _title(reports: Sequence[Report]) -> str:
    return f"Tiling sensitivity on {', '.join(report.arch for report in reports)}: {reports[0].kernel}"


def _summary(report: Report) -> list[str]:
    lines = []
    if found := report.measured.problems:
        devices = ", ".join(sorted({one.device_name for one in found}))
        samples = sum(device.samples for device in report.conditions)
        lines.append(
            f"Measured: {_count(len(found), 'problem')} on {devices}, {report.regime} regime; "
            f"{_count(sum(len(one.timed) for one in found), 'schedule')}, which are "
            f"{_count(sum(one.programs for one in found), 'distinct program')}; "
            f"{_count(sum(one.measurements for one in found), 'measurement')} of {samples:,} samples in all."
        )
    lines += [
        f"The clock of {device.device.name} was held down {device.held_down}. Times at a low clock decide little."
        for device in report.conditions
        if device.held_down
    ]
    if len({compiler for device in report.conditions for compiler in device.compilers}) > 1:
        lines.append("Each problem's times are of one compiler: the one that most of its schedules were measured with.")
    if found := report.modelled.problems:
        lines.append(f"Modelled, not measured: {_count(len(found), 'problem')}. These stand in a section of their own.")
    if report.elsewhere:
        lines.append(
            f"Left out: {_count(report.elsewhere, 'measurement')} of another regime, device, compiler or way of timing."
        )
    if report.measured.problems or report.modelled.problems:
        lines.append("A drop is how much longer the other schedule takes: its time / the best time - 1.")
    return lines


def _section(section: Section, report: Report) -> list[Block]:
    name = section.provenance
    blocks: list[Block] = [Heading(text=f"Best schedules, {name}", folded=True)]
    for _, members in groupby(section.problems, key=lambda one: one.group):
        group = list(members)
        blocks += [Heading(text=_group_title(group[0], report), level=3), _best_table(group, report)]
    if section.sensitivity:
        blocks += [Heading(text=f"Tiling sensitivity, {name}", folded=True), *_sensitivity(section, report)]
    if section.knobs:
        blocks += [Heading(text=f"Every knob, {name}", folded=True), *_knobs(section)]
    if section.shares:
        blocks += [
            Heading(text="Which knobs matter", folded=True),
            Paragraph(text=SHARES),
            shares_table(section.shares),
        ]
    if section.interactions:
        blocks += [
            Heading(text="Which knobs depend on each other", folded=True),
            Paragraph(text=INTERACTIONS),
            interactions_table(section.interactions),
        ]
    if any(one.best.facts for one in section.problems):
        blocks += [Heading(text=f"Resources of the winners, {name}", folded=True), _resources(section)]
    if name == MEASURED:
        blocks += [Heading(text="Evidence", folded=True), _evidence(section, report)]
    return blocks


def _group_title(one: ProblemReport, report: Report) -> str:
    accum = f"{one.accum_mode} accumulators" if one.accum_mode != "fp32" else ""
    what = ", ".join(part for part in (report.axes.describe_shared(one.problem), accum) if part)
    where = one.device_name or report.arch
    return f"{what} on {where}" if what else where


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], *, modelled_from: int | None = None) -> Table:
    """A table; the titles of columns from `modelled_from` on say that they are modelled."""
    titles = tuple(
        title if modelled_from is None or place < modelled_from else f"modelled {title}"
        for place, title in enumerate(head)
    )
    return Table(head=titles, rows=tuple(map(tuple, rows)))


def _accum(report: Report, text: str) -> list[str]:
    """A cell for the accumulator mode, where it is worth a column; else no cell."""
    return [text] if report.accuracy_classes else []


def _best_table(group: Sequence[ProblemReport], report: Report) -> Table:
    sizes = report.axes.columns_of([one.problem for one in group])
    units = list(dict.fromkeys(unit_of(one.problem) for one in group))
    measured = group[0].provenance == MEASURED
    head = [
        *sizes,
        "best",
        "µs",
        *(["95% interval"] if measured else []),
        *units,
        "runner-up",
        "drop",
        *(["ties"] if measured else []),
        "default's drop",
        "median's drop",
        "worst",
    ]
    lacking = measured and any(one.default is None for one in group)
    head += ["to measure the rest"] if lacking else []
    return _table(
        head,
        (
            (
                *(cell(one.problem, fields) for fields in sizes.values()),
                _short(one.best.schedule),
                _us(one.best.us),
                *([_interval(one.best.timing)] if measured else []),
                *(f"{one.best.rate:.1f}" if unit_of(one.problem) == unit else NOTHING for unit in units),
                _short(one.runner_up.schedule) if one.runner_up else NOTHING,
                _percent(one.runner_up_drop),
                *([str(len(one.ties))] if measured else []),
                _percent(one.default_drop, NOT_MEASURED if measured else NOTHING),
                _percent(one.median_drop if one.programs > 1 else None),
                f"{one.worst.relative:.2f}x" if one.programs > 1 else NOTHING,
                *([_to_measure(one, report) if one.default is None else NOTHING] if lacking else []),
            )
            for one in group
        ),
        modelled_from=None if measured else len(sizes),
    )


def _to_measure(one: ProblemReport, report: Report) -> str:
    """The command that measures the default of a problem and a choice of other programs."""
    return _code(
        shlex.join(
            ["tiledsched", "record", report.kernel, "--arch", report.arch, "--problem", format_problem(one.problem)]
        )
    )


def _sensitivity(section: Section, report: Report) -> list[Block]:
    axes, tile = report.axes, " x ".join(report.tile_knobs or ())
    identity = ["device", *axes.titles.values(), *_accum(report, "accum"), axes.swept_title, "problems"]
    text = (
        f"Each tile ({tile}) is judged by its best schedule over all other knobs; where a regime joins several problems, "
        f"by the geometric mean. Short is {axes.swept_title} up to 1024, medium up to 4096, long above."
    )
    return [
        Paragraph(text=text),
        _table(
            [*identity, "best tile", "runner-up tile", "drop", "worst tile's drop"],
            (
                (
                    line.device_name or NOTHING,
                    *map(show, line.shared),
                    *_accum(report, line.accum_mode),
                    f"{line.regime} ({', '.join(map(str, line.sizes))})",
                    str(line.problems),
                    _tile(line.best),
                    _tile(line.runner_up),
                    _percent(line.drop),
                    _percent(line.spread),
                )
                for line in section.sensitivity
            ),
            modelled_from=_from(section, len(identity)),
        ),
    ]


def _knobs(section: Section) -> list[Block]:
    text = (
        "Programs of one problem that differ in one knob alone are compared in pairs whose faster program is within 30% of the "
        "best. Each figure is the time with a value over the time with the value in the third column, and its 95% interval."
    )
    return [
        Paragraph(text=text),
        _table(
            ("knob", "advice", "compared with", "time with another value", "pairs"),
            (
                (
                    f"`{verdict.knob}`",
                    verdict.advice,
                    show(verdict.value),
                    ", ".join(
                        f"{show(each.value)}: "
                        + (
                            "untried"
                            if each.ratio is None
                            else f"{each.ratio:.3f} [{each.ci_low:.3f}, {each.ci_high:.3f}]"
                        )
                        for each in verdict.effects
                    ),
                    ", ".join(str(each.pairs) for each in verdict.effects),
                )
                for verdict in section.knobs
            ),
            modelled_from=_from(section, 1),
        ),
    ]


def _from(section: Section, columns: int) -> int | None:
    return None if section.provenance == MEASURED else columns


SHARES = (
    "How much of the difference between the fastest tenth of the programs and all of them each knob accounts for (Optuna's "
    "PED-ANOVA), as the mean share over problems and the largest of any. A knob can be important here and yet be settled: "
    "a value that ruins a program separates the good from the rest."
)
INTERACTIONS = (
    "Changes of one knob, all else equal, that do one thing under a circumstance and another elsewhere: the mean change of the "
    "time, over pairs whose faster program is within 30% of the best. Of each change the circumstance that differs most."
)


def shares_table(shares: Sequence[KnobShare]) -> Table:
    """The importance of each knob, as a table."""
    return _table(
        ("knob", "mean share", "largest share", "problems"),
        ((f"`{one.knob}`", _percent(one.share), _percent(one.largest), str(one.problems)) for one in shares),
    )


def interactions_table(found: Sequence[Interaction]) -> Table:
    """The interactions of knobs, as a table with one change to a row."""
    return _table(
        ("change", "circumstance", "time with it", "pairs", "time elsewhere", "pairs"),
        (
            (
                f"`{one.knob}`: {show(one.before)} to {show(one.after)}",
                f"`{one.circumstance}`",
                f"{one.effect_with * 100:+.1f}%",
                str(one.pairs_with),
                f"{one.effect_without * 100:+.1f}%",
                str(one.pairs_without),
            )
            for one in found
        ),
    )


def _resources(section: Section) -> Table:
    measured = section.provenance == MEASURED
    # Resources are facts of the machine code, not estimates; only the choice of the schedule is the model's.
    head = [
        "device",
        "problem",
        "schedule" if measured else "modelled best",
        "registers",
        "threads",
        "spill bytes",
        "shared KiB",
        "CTAs/SM",
        "code KiB",
        *(["worst tile error"] if measured else []),
        "fingerprint",
    ]
    rows = []
    for one in section.problems:
        if (facts := one.best.facts) is not None:
            error = one.best.worst_tile_error
            rows.append(
                (
                    one.device_name or NOTHING,
                    str(one.problem),
                    _short(one.best.schedule),
                    str(facts.registers),
                    str(facts.threads),
                    str(facts.spill_bytes),
                    f"{facts.shared_bytes / 1024:.1f}",
                    str(facts.ctas_per_sm),
                    f"{facts.code_bytes / 1024:.1f}",
                    *([f"{error:.1e}" if error is not None else NOTHING] if measured else []),
                    f"`{one.best.fingerprint}`",
                )
            )
    return _table(head, rows)


def _evidence(section: Section, report: Report) -> Table:
    head = (
        "device",
        "problem",
        *_accum(report, "accum"),
        "schedules",
        "programs",
        "measurements",
        "samples of the best",
        "served",
        "tied with the best",
    )
    return _table(
        head,
        (
            (
                one.device_name,
                str(one.problem),
                *_accum(report, one.accum_mode),
                str(len(one.timed)),
                str(one.programs),
                str(one.measurements),
                str(one.best.samples),
                _served(one),
                ", ".join(map(_short, one.ties)) or NOTHING,
            )
            for one in section.problems
        ),
    )


def _served(one: ProblemReport) -> str:
    if one.served is None:
        return NOTHING
    best = {one.best.schedule, *(timed.schedule for timed in one.timed if timed.same_program_as == one.best.schedule)}
    return f"{one.served.provenance}: {'the best' if one.served.schedule in best else _short(one.served.schedule)}"


def _regimes(report: Report) -> list[Block]:
    if not report.regimes:
        return []
    text = (
        f"Of {_count(len(report.regimes), 'problem')} with programs measured in both regimes, "
        f"{sum(not one.same for one in report.regimes)} have another "
        "winner at the power cap. A loss is what serving the winner of one regime costs in the other: its time / the "
        "other winner's - 1, both taken in that other regime; it is sure where their 95% intervals are apart."
    )
    head = (
        "device",
        "problem",
        *_accum(report, "accum"),
        "programs in both",
        "burst winner",
        "sustained winner",
        "burst winner's loss when sustained",
        "sure",
        "sustained winner's loss in burst",
        "sure",
    )
    return [
        Heading(text="Burst against sustained"),
        Paragraph(text=text),
        *(
            Chart(name=f"regimes-{report.arch}", spec=spec, text="What the winner of one regime costs in the other")
            for spec in [charts.regimes(report)]
            if spec
        ),
        _table(
            head,
            (
                (
                    one.device_name,
                    str(one.problem),
                    *_accum(report, one.accum_mode),
                    str(one.programs),
                    _short(one.burst_winner),
                    "the same" if one.same else _short(one.sustained_winner),
                    _percent(one.burst_loss),
                    show(one.burst_loss_distinct),
                    _percent(one.sustained_loss),
                    show(one.sustained_loss_distinct),
                )
                for one in report.regimes
            ),
        ),
    ]


def _inert(report: Report) -> list[Block]:
    if not report.inert:
        return []
    text = (
        f"Over {_count(report.builds, 'build')}: pairs of schedules that differ in one knob only, and how many of them "
        "are the same machine code. A grid may depend on a knob that the machine code does not."
    )
    head = ("knob", "pairs built", "same machine code", "share", "inert")
    return [
        Heading(text="Knobs that change nothing", folded=True),
        Paragraph(text=text),
        _table(
            head,
            (
                (
                    f"`{knob.knob}`",
                    f"{knob.pairs:,}",
                    f"{knob.same:,}",
                    _percent(knob.same / knob.pairs),
                    show(knob.inert),
                )
                for knob in report.inert
            ),
        ),
    ]


def _unmeasured(report: Report) -> list[Block]:
    if not report.unmeasured:
        return []
    head = ("problem", *_accum(report, "accum"), "provenance", "schedule", "source")
    return [
        Heading(text="Served without a measurement or a model", folded=True),
        _table(
            head,
            (
                (
                    str(entry.problem),
                    *_accum(report, entry.accum_mode),
                    entry.provenance,
                    _short(entry.schedule),
                    entry.source or NOTHING,
                )
                for entry in report.unmeasured
            ),
        ),
    ]


def _failures(report: Report) -> list[Block]:
    if not report.failures:
        return [Heading(text="Failures", folded=True), Paragraph(text="No candidate failed.")]
    return [
        Heading(text="Failures", folded=True),
        _table(
            ("stage", "kind", "candidates", "for example", "schedule"),
            (
                (line.stage, line.kind, str(line.candidates), _code(line.example), _short(line.schedule))
                for line in report.failures
            ),
        ),
    ]


def _conditions(report: Report) -> list[Block]:
    blocks: list[Block] = []
    for device in report.conditions:
        blocks += [
            Heading(text=f"Conditions: {device.device.name}", folded=True),
            _condition_table(device, report.regime),
        ]
    if report.modelled.problems and report.model_compilers:
        rows = tuple(("modelled from builds by", compiler) for compiler in report.model_compilers)
        blocks += [Heading(text="Conditions: model", folded=True), Table(head=("condition", "value"), rows=rows)]
    return blocks


def _condition_table(device: DeviceConditions, regime: str) -> Table:
    gpu = device.device
    memory = f", {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else ""
    cache = f", {gpu.l2_bytes / 2**20:.0f} MiB of L2" if gpu.l2_bytes else ""
    reasons = (f"{name} (in {_count(count, 'measurement')})" for name, count in device.throttle_reasons)
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
    if mhz is None:
        return "not known"
    return f"{mhz[0]} MHz" if mhz[0] == mhz[1] else f"{mhz[0]} to {mhz[1]} MHz"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _us(us: float) -> str:
    return f"{us:,.1f}" if us >= 100 else f"{us:.2f}"


def _interval(time: Timing | None) -> str:
    return f"[{_us(time.ci_low_us)}, {_us(time.ci_high_us)}]" if time else NOTHING


def _percent(fraction: float | None, unknown: str = NOTHING) -> str:
    return unknown if fraction is None else f"{fraction * 100:,.1f}%"


def _short(schedule: Schedule) -> str:
    return _code(schedule.short())


def _tile(tile: Tile | None) -> str:
    return f"{tile[0]}x{tile[1]}" if tile else NOTHING


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`" if text else NOTHING
