"""The report as a document, and everything written to its folder. `write_report` is the way in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from tiledsched.build.cubin import ResourceFacts
from tiledsched.errors import ConfigError
from tiledsched.report import plots
from tiledsched.report.axes import cell, show
from tiledsched.report.csv_files import importance_csv, interactions_csv, regimes_csv, schedules_csv, sensitivity_csv
from tiledsched.report.document import NOTHING, Block, Heading, Image, Paragraph, Table, to_html, to_markdown
from tiledsched.report.records import (
    MEASURED,
    DeviceConditions,
    Interaction,
    KnobShare,
    ProblemReport,
    Report,
    Section,
    Tile,
    TileSensitivity,
)

T = TypeVar("T")
Column = tuple[str, Callable[[T], str]]
"""A title, and what stands under it for an item."""

NO_PLOTS = "Heat maps are given as tables: for pictures, run `pip install 'tiledsched[report]'`."


def write_report(report: Report, out_dir: str | Path) -> list[Path]:
    """Write report.md, report.html, the CSV files and the heat maps; the files written.

    The folder is made where needed. Files in it with other names are left alone.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    folder = Path(out_dir)
    images = plots.heat_maps(report)
    blocks = document(report, images)
    files: dict[str, bytes] = {
        "report.md": to_markdown(blocks).encode(),
        "report.html": to_html(blocks, title=_title(report)).encode(),
        "schedules.csv": schedules_csv(report).encode(),
        "sensitivity.csv": sensitivity_csv(report).encode(),
        **({"regimes.csv": regimes_csv(report).encode()} if report.regimes else {}),
        **({"interactions.csv": interactions_csv(report).encode()} if report.measured.interactions else {}),
        **({"importance.csv": importance_csv(report).encode()} if report.measured.shares else {}),
        **(images or {}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"cannot write the report to {folder}: {error.strerror}; give another folder with --out"
        ) from error
    return [folder / name for name in files]


def document(report: Report, images: Mapping[str, bytes] | None = None) -> list[Block]:
    """The whole report. `images` are the heat maps by file name; None where they could not be drawn."""
    blocks: list[Block] = [Paragraph(text=report.warning, warning=True)] if report.warning else []
    blocks.append(Heading(text=_title(report), level=1))
    blocks += [Paragraph(text=line) for line in _summary(report)]
    sections = [section for section in (report.measured, report.modelled) if section.problems]
    if images is None and any(plots.with_tiles(section) for section in sections):
        blocks.append(Paragraph(text=NO_PLOTS))
    for section in sections:
        blocks += _section(section, report, images)
    return [*blocks, *_regimes(report), *_inert(report), *_unmeasured(report), *_failures(report), *_conditions(report)]


def _title(report: Report) -> str:
    return f"Tiling sensitivity on {report.arch}: {report.kernel}"


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
    if found := report.modelled.problems:
        lines.append(f"Modelled, not measured: {_count(len(found), 'problem')}. These stand in a section of their own.")
    if report.elsewhere:
        lines.append(f"Left out: {_count(report.elsewhere, 'measurement')} of another regime or device.")
    if report.measured.problems or report.modelled.problems:
        lines.append("A drop is how much longer the other schedule takes: its time / the best time - 1.")
    return lines


def _section(section: Section, report: Report, images: Mapping[str, bytes] | None) -> list[Block]:
    name = section.provenance
    blocks: list[Block] = [Heading(text=f"Best schedules, {name}")]
    for _, members in groupby(section.problems, key=lambda one: one.group):
        group = list(members)
        blocks += [Heading(text=_group_title(group[0], report), level=3), _best_table(group, report)]
    if section.sensitivity:
        blocks += [Heading(text=f"Tiling sensitivity, {name}"), *_sensitivity(section, report)]
    if section.knobs:
        blocks += [Heading(text=f"Knobs, {name}"), *_knobs(section)]
    if section.shares:
        blocks += [Heading(text="Which knobs matter"), Paragraph(text=SHARES), shares_table(section.shares)]
    if section.interactions:
        blocks += [Heading(text="Which knobs depend on each other"), Paragraph(text=INTERACTIONS),
                   interactions_table(section.interactions)]  # fmt: skip
    if any(one.best.facts for one in section.problems):
        blocks += [Heading(text=f"Resources of the winners, {name}"), _resources(section)]
    blocks += _heat_maps(section, report, images)
    if name == MEASURED:
        blocks += [Heading(text="Evidence"), _evidence(section, report)]
    return blocks


def _group_title(one: ProblemReport, report: Report) -> str:
    accum = f"{one.accum_mode} accumulators" if one.accum_mode != "fp32" else ""
    what = ", ".join(part for part in (report.axes.describe_shared(one.problem), accum) if part)
    where = one.device_name or report.arch
    return f"{what} on {where}" if what else where


def _table(items: Iterable[T], *columns: Column[T]) -> Table:
    """One row for each item."""
    rows = tuple(tuple(text(one) for _, text in columns) for one in items)
    return Table(head=tuple(title for title, _ in columns), rows=rows)


def _labelled(provenance: str, columns: Iterable[Column[T]]) -> list[Column[T]]:
    """The columns, with `modelled` in their titles where that is what they are."""
    return [(title if provenance == MEASURED else f"modelled {title}", text) for title, text in columns]


def _accum(report: Report) -> list[Column[Any]]:
    return [("accum", lambda one: one.accum_mode)] if report.accuracy_classes else []


def _best_table(group: Sequence[ProblemReport], report: Report) -> Table:
    sizes = report.axes.columns_of([one.problem for one in group])
    identity: list[Column[ProblemReport]] = [
        (title, lambda one, fields=fields: cell(one.problem, fields)) for title, fields in sizes.items()]  # type: ignore[misc]  # fmt: skip
    measured: list[Column[ProblemReport]] = [
        ("95% interval", lambda one: _interval(one.best.ci_low_us, one.best.ci_high_us)),
        ("ties", lambda one: str(len(one.ties)))]  # fmt: skip
    interval, ties = ([column] if group[0].provenance == MEASURED else [] for column in measured)
    rates: list[Column[ProblemReport]] = [
        (unit, lambda one, unit=unit: f"{one.best.rate:.1f}" if one.unit == unit else NOTHING)  # type: ignore[misc]
        for unit in dict.fromkeys(one.unit for one in group)]  # fmt: skip
    return _table(group, *identity, *_labelled(group[0].provenance, [
        ("best", lambda one: f"`{one.best.schedule.short()}`"),
        ("µs", lambda one: _us(one.best.us)),
        *interval,
        *rates,
        ("runner-up", lambda one: f"`{one.runner_up.schedule.short()}`" if one.runner_up else NOTHING),
        ("drop", lambda one: _percent(one.runner_up_drop)),
        *ties,
        ("default's drop", lambda one: _percent(one.default_drop)),
        ("median's drop", lambda one: _percent(one.median_drop if one.programs > 1 else None)),
        ("worst", lambda one: f"{one.worst.relative:.2f}x" if one.programs > 1 else NOTHING),
    ]))  # fmt: skip


def _sensitivity(section: Section, report: Report) -> list[Block]:
    axes, tile = report.axes, " x ".join(report.tile_knobs or ())
    shared: list[Column[TileSensitivity]] = [
        (axes.title(name), lambda line, place=place: show(line.shared[place]))  # type: ignore[misc]
        for place, name in enumerate(axes.shared)]  # fmt: skip
    return [
        Paragraph(
            text=f"Each tile ({tile}) is judged by its best schedule over all other knobs; where a regime joins several "
            f"problems, by the geometric mean. Short is {axes.swept_title} up to 1024, medium up to 4096, long above."
        ),
        _table(
            section.sensitivity,
            ("device", lambda line: line.device_name or NOTHING),
            *shared,
            *_accum(report),
            (axes.swept_title, lambda line: f"{line.regime} ({', '.join(map(str, line.sizes))})"),
            ("problems", lambda line: str(line.problems)),
            *_labelled(section.provenance, [
                ("best tile", lambda line: _tile(line.best)),
                ("runner-up tile", lambda line: _tile(line.runner_up)),
                ("drop", lambda line: _percent(line.drop)),
                ("worst tile's drop", lambda line: _percent(line.spread)),
            ]),
        ),
    ]  # fmt: skip


def _knobs(section: Section) -> list[Block]:
    return [
        Paragraph(
            text="Pairs are schedules of one problem that differ in that knob only; a change is slower / faster - 1. "
            "The last column is what holding the knob at a value costs when all others stay free (1.000: nothing), a "
            "geometric mean over the problems that have the value."
        ),
        _table(section.knobs, ("knob", lambda effect: f"`{effect.knob}`"), *_labelled(section.provenance, [
            ("pairs", lambda effect: f"{effect.pairs:,}"),
            ("mean change", lambda effect: _percent(effect.mean_change)),
            ("largest change", lambda effect: _percent(effect.largest_change)),
            ("best time with the knob held / best time",
             lambda effect: ", ".join(f"{show(line.value)}: {line.ratio:.3f}" for line in effect.values)),
        ])),
    ]  # fmt: skip


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
    """Importance by knob."""
    return _table(shares, ("knob", lambda one: f"`{one.knob}`"), ("mean share", lambda one: _percent(one.share)),
                  ("largest share", lambda one: _percent(one.largest)), ("problems", lambda one: str(one.problems)))  # fmt: skip


def interactions_table(found: Sequence[Interaction]) -> Table:
    """Interactions, one change to a row."""
    return _table(
        found,
        ("change", lambda one: f"`{one.knob}`: {show(one.before)} to {show(one.after)}"),
        ("circumstance", lambda one: f"`{one.circumstance}`"),
        ("time with it", lambda one: f"{one.effect_with * 100:+.1f}%"),
        ("pairs", lambda one: str(one.pairs_with)),
        ("time elsewhere", lambda one: f"{one.effect_without * 100:+.1f}%"),
        ("pairs", lambda one: str(one.pairs_without)),
    )


def _resources(section: Section) -> Table:
    found = [(one, one.best.facts) for one in section.problems if one.best.facts is not None]
    measured = section.provenance == MEASURED
    error: list[Column[tuple[ProblemReport, ResourceFacts]]] = [
        ("worst tile error", lambda one: f"{one[0].best.worst_tile_error:.1e}"
         if one[0].best.worst_tile_error is not None else NOTHING)]  # fmt: skip
    return _table(
        found,
        ("device", lambda one: one[0].device_name or NOTHING),
        ("problem", lambda one: str(one[0].problem)),
        # Resources are facts of the machine code, not estimates; only the choice of the schedule is the model's.
        ("schedule" if measured else "modelled best", lambda one: f"`{one[0].best.schedule.short()}`"),
        ("registers", lambda one: str(one[1].registers)),
        ("threads", lambda one: str(one[1].threads)),
        ("spill bytes", lambda one: str(one[1].spill_bytes)),
        ("shared KiB", lambda one: f"{one[1].shared_bytes / 1024:.1f}"),
        ("CTAs/SM", lambda one: str(one[1].ctas_per_sm)),
        ("code KiB", lambda one: f"{one[1].code_bytes / 1024:.1f}"),
        *(error if measured else []),
        ("fingerprint", lambda one: f"`{one[0].best.fingerprint}`"),
    )


def _heat_maps(section: Section, report: Report, images: Mapping[str, bytes] | None) -> list[Block]:
    problems = plots.with_tiles(section)
    if not problems:
        return []
    blocks: list[Block] = [Heading(text=f"Heat maps, {section.provenance}")]
    for one in problems:
        name, title = plots.file_name(one), plots.title(one, report.arch)
        if images is not None and name in images:
            blocks.append(Image(name=name, png=images[name], text=f"Heat map: {title}"))
        elif images is None:
            blocks += [Heading(text=title, level=3), _heat_table(one, report)]
    return blocks


def _heat_table(one: ProblemReport, report: Report) -> Table:
    first, second = report.tile_knobs or ("", "")
    cells = {tile.tile: f"{tile.relative:.3f}" for tile in one.tiles}
    columns: list[Column[int]] = [
        (f"{one.provenance} time / best, {second}={value}", lambda row, value=value: cells.get((row, value), NOTHING))  # type: ignore[misc]
        for value in sorted({tile[1] for tile in cells})]  # fmt: skip
    return _table(sorted({tile[0] for tile in cells}), (first, str), *columns)


def _served(one: ProblemReport) -> str:
    if one.served is None:
        return NOTHING
    best = {one.best.schedule, *(timed.schedule for timed in one.timed if timed.same_program_as == one.best.schedule)}
    what = "the best" if one.served.schedule in best else f"`{one.served.schedule.short()}`"
    return f"{one.served.provenance}: {what}"


def _evidence(section: Section, report: Report) -> Table:
    return _table(
        section.problems,
        ("device", lambda one: one.device_name),
        ("problem", lambda one: str(one.problem)),
        *_accum(report),
        ("schedules", lambda one: str(len(one.timed))),
        ("programs", lambda one: str(one.programs)),
        ("measurements", lambda one: str(one.measurements)),
        ("samples of the best", lambda one: str(one.best.samples)),
        ("served", _served),
        ("tied with the best", lambda one: ", ".join(f"`{tie.short()}`" for tie in one.ties) or NOTHING),
    )


def _regimes(report: Report) -> list[Block]:
    if not report.regimes:
        return []
    changed = sum(not one.same for one in report.regimes)
    text = (
        f"Of {_count(len(report.regimes), 'problem')} with programs measured in both regimes, {changed} have another "
        "winner at the power cap. A loss is what serving the winner of one regime costs in the other: its time / the "
        "other winner's - 1, both taken in that other regime; it is sure where their 95% intervals are apart."
    )
    return [Heading(text="Burst against sustained"), Paragraph(text=text), _table(
        report.regimes,
        ("device", lambda one: one.device_name),
        ("problem", lambda one: str(one.problem)),
        *_accum(report),
        ("programs in both", lambda one: str(one.programs)),
        ("burst winner", lambda one: f"`{one.burst_winner.short()}`"),
        ("sustained winner", lambda one: "the same" if one.same else f"`{one.sustained_winner.short()}`"),
        ("burst winner's loss when sustained", lambda one: _percent(one.burst_loss)),
        ("sure", lambda one: show(one.burst_loss_distinct)),
        ("sustained winner's loss in burst", lambda one: _percent(one.sustained_loss)),
        ("sure", lambda one: show(one.sustained_loss_distinct)),
    )]  # fmt: skip


def _inert(report: Report) -> list[Block]:
    if not report.inert:
        return []
    text = (
        f"Over {_count(report.builds, 'build')}: pairs of schedules that differ in one knob only, and how many of them "
        "are the same machine code. A grid may depend on a knob that the machine code does not."
    )
    return [Heading(text="Knobs that change nothing"), Paragraph(text=text), _table(
        report.inert,
        ("knob", lambda knob: f"`{knob.knob}`"),
        ("pairs built", lambda knob: f"{knob.pairs:,}"),
        ("same machine code", lambda knob: f"{knob.same:,}"),
        ("share", lambda knob: _percent(knob.same / knob.pairs)),
        ("inert", lambda knob: show(knob.inert)),
    )]  # fmt: skip


def _unmeasured(report: Report) -> list[Block]:
    if not report.unmeasured:
        return []
    return [Heading(text="Served without a measurement or a model"), _table(
        report.unmeasured,
        ("problem", lambda entry: str(entry.problem)),
        *_accum(report),
        ("provenance", lambda entry: entry.provenance),
        ("schedule", lambda entry: f"`{entry.schedule.short()}`"),
        ("source", lambda entry: entry.source or NOTHING),
    )]  # fmt: skip


def _failures(report: Report) -> list[Block]:
    if not report.failures:
        return [Heading(text="Failures"), Paragraph(text="No candidate failed.")]
    return [Heading(text="Failures"), _table(
        report.failures,
        ("stage", lambda line: line.stage),
        ("kind", lambda line: line.kind),
        ("candidates", lambda line: str(line.candidates)),
        ("for example", lambda line: _code(line.example)),
        ("schedule", lambda line: f"`{line.schedule.short()}`"),
    )]  # fmt: skip


def _conditions(report: Report) -> list[Block]:
    blocks: list[Block] = []
    for device in report.conditions:
        blocks += [Heading(text=f"Conditions: {device.device.name}"), _condition_table(device, report.regime)]
    if report.modelled.problems and report.model_compilers:
        rows = tuple(("modelled from builds by", compiler) for compiler in report.model_compilers)
        blocks += [Heading(text="Conditions: model"), Table(head=("condition", "value"), rows=rows)]
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


def _interval(low: float | None, high: float | None) -> str:
    return NOTHING if low is None or high is None else f"[{_us(low)}, {_us(high)}]"


def _percent(fraction: float | None) -> str:
    return NOTHING if fraction is None else f"{fraction * 100:,.1f}%"


def _tile(tile: Tile | None) -> str:
    return f"{tile[0]}x{tile[1]}" if tile else NOTHING


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`" if text else NOTHING
