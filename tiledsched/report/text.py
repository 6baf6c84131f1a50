"""The report as a document, and everything written to its folder. `write_report` is the way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tiledsched.errors import ConfigError
from tiledsched.report import plots
from tiledsched.report.csv_files import importance_csv, interactions_csv, regimes_csv, schedules_csv, sensitivity_csv
from tiledsched.report.document import NOTHING, Block, Heading, Image, Paragraph, Table, to_html, to_markdown
from tiledsched.report.records import (
    MEASURED,
    MODELLED,
    DeviceConditions,
    Interaction,
    KnobImportance,
    KnobShare,
    ProblemReport,
    Report,
    Section,
    Tile,
)
from tiledsched.schedule import KnobValue

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
        "report.html": to_html(blocks, title=f"Tiling sensitivity on {report.arch}").encode(),
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
    blocks.append(Heading(text=f"Tiling sensitivity on {report.arch}", level=1))
    blocks += [Paragraph(text=line) for line in _summary(report)]
    sections = [section for section in (report.measured, report.modelled) if section.problems]
    if images is None and any(plots.with_tiles(section) for section in sections):
        blocks.append(Paragraph(text=NO_PLOTS))
    for section in sections:
        blocks += _section(section, report.arch, images)
    return [*blocks, *_regimes(report), *_inert(report), *_unmeasured(report), *_failures(report), *_conditions(report)]


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


def _section(section: Section, arch: str, images: Mapping[str, bytes] | None) -> list[Block]:
    measured = section.provenance == MEASURED
    name = "measured" if measured else "modelled"
    blocks: list[Block] = [Heading(text=f"Best schedules, {name}")]
    for _, members in groupby(section.problems, key=lambda one: one.group):
        group = list(members)
        blocks += [Heading(text=_group_title(group[0], arch), level=3), _best_table(group)]
    if section.sensitivity:
        blocks += [Heading(text=f"Tiling sensitivity, {name}"), *_sensitivity(section)]
    if section.knobs:
        blocks += [Heading(text=f"Knobs, {name}"), *_knobs(section)]
    if section.shares:
        blocks += [Heading(text="Which knobs matter"), Paragraph(text=SHARES), shares_table(section.shares)]
    if section.interactions:
        blocks += [Heading(text="Which knobs depend on each other"), Paragraph(text=INTERACTIONS),
                   interactions_table(section.interactions)]  # fmt: skip
    if any(one.best.facts for one in section.problems):
        blocks += [Heading(text=f"Resources of the winners, {name}"), _resources(section)]
    blocks += _heat_maps(section, arch, images)
    if measured:
        blocks += [Heading(text="Evidence"), _evidence(section)]
    return blocks


def _group_title(one: ProblemReport, arch: str) -> str:
    parts = [f"D={one.problem.head_dim} {one.problem.dtype}"]
    parts += ["causal"] if one.problem.causal else []
    parts += [f"{one.accum_mode} accumulators"] if one.accum_mode != "fp32" else []
    return f"{', '.join(parts)} on {one.device_name or arch}"


def _labelled(provenance: str, table: Table, identity: int) -> Table:
    """The table with `modelled` in the title of every column after the first `identity` ones, where it is so."""
    if provenance != MODELLED:
        return table
    head = (*table.head[:identity], *(f"modelled {title}" for title in table.head[identity:]))
    return Table(head=head, rows=table.rows)


def _best_table(group: Sequence[ProblemReport]) -> Table:
    measured = group[0].provenance == MEASURED
    columns: list[tuple[str, Callable[[ProblemReport], str]]] = [
        ("S", _seq), ("B", lambda one: str(one.problem.batch)), ("H", _heads),
        ("best", lambda one: f"`{one.best.schedule.short()}`"),
        ("µs", lambda one: _us(one.best.us)),
        ("95% interval", lambda one: _interval(one.best.ci_low_us, one.best.ci_high_us)),
        ("TFLOP/s", lambda one: f"{one.best.tflops:.1f}"),
        ("runner-up", lambda one: f"`{one.runner_up.schedule.short()}`" if one.runner_up else NOTHING),
        ("drop", lambda one: _percent(one.runner_up_drop)),
        ("ties", lambda one: str(len(one.ties))),
        ("default's drop", lambda one: _percent(one.default_drop)),
        ("median's drop", lambda one: _percent(one.median_drop if one.programs > 1 else None)),
        ("worst", lambda one: f"{one.worst.relative:.2f}x" if one.programs > 1 else NOTHING),
    ]  # fmt: skip
    if not measured:
        columns = [column for column in columns if column[0] not in ("95% interval", "ties")]
    table = Table(head=tuple(title for title, _ in columns), rows=tuple(
        tuple(text(one) for _, text in columns) for one in group))  # fmt: skip
    return _labelled(group[0].provenance, table, 3)


def _sensitivity(section: Section) -> list[Block]:
    rows = tuple(
        (_where(section, line.device_name), str(line.head_dim), line.dtype, _yes(line.causal), line.accum_mode,
         f"{line.regime} ({', '.join(map(str, line.seq_lens))})", str(line.problems), _tile(line.best),
         _tile(line.runner_up), _percent(line.drop), _percent(line.spread))
        for line in section.sensitivity
    )  # fmt: skip
    head = (
        "device",
        "D",
        "dtype",
        "causal",
        "accum",
        "S",
        "problems",
        "best tile",
        "runner-up tile",
        "drop",
        "worst tile's drop",
    )
    return [
        Paragraph(
            text="Each tile (tile_m x tile_n) is judged by its best schedule over all other knobs; where a regime "
            "joins several problems, by the geometric mean. Short is S up to 1024, medium up to 4096, long above."
        ),
        _labelled(section.provenance, Table(head=head, rows=rows), 7),
    ]


def _knobs(section: Section) -> list[Block]:
    rows = tuple(
        (f"`{effect.knob}`", f"{effect.pairs:,}", _percent(effect.mean_change), _percent(effect.largest_change),
         _values(effect)) for effect in section.knobs
    )  # fmt: skip
    head = ("knob", "pairs", "mean change", "largest change", "best time with the knob held / best time")
    return [
        Paragraph(
            text="Pairs are schedules of one problem that differ in that knob only; a change is slower / faster - 1. "
            "The last column is what holding the knob at a value costs when all others stay free (1.000: nothing), a "
            "geometric mean over the problems that have the value."
        ),
        _labelled(section.provenance, Table(head=head, rows=rows), 1),
    ]


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
    rows = tuple((f"`{one.knob}`", _percent(one.share), _percent(one.largest), str(one.problems)) for one in shares)
    return Table(head=("knob", "mean share", "largest share", "problems"), rows=rows)


def interactions_table(found: Sequence[Interaction]) -> Table:
    """Interactions, one change to a row."""
    rows = tuple(
        (f"`{one.knob}`: {_value(one.before)} to {_value(one.after)}", f"`{one.circumstance}`", _change(one.effect_with),
         str(one.pairs_with), _change(one.effect_without), str(one.pairs_without)) for one in found
    )  # fmt: skip
    return Table(head=("change", "circumstance", "time with it", "pairs", "time elsewhere", "pairs"), rows=rows)


def _change(fraction: float) -> str:
    return f"{fraction * 100:+.1f}%"


def _values(effect: KnobImportance) -> str:
    return ", ".join(f"{_value(line.value)}: {line.ratio:.3f}" for line in effect.values)


def _resources(section: Section) -> Table:
    rows = []
    for one in section.problems:
        if (facts := one.best.facts) is not None:
            error = one.best.worst_tile_error
            rows.append((
                _where(section, one.device_name), str(one.problem), f"`{one.best.schedule.short()}`",
                str(facts.registers), str(facts.threads), str(facts.spill_bytes), f"{facts.shared_bytes / 1024:.1f}",
                str(facts.ctas_per_sm), f"{facts.code_bytes / 1024:.1f}",
                f"{error:.1e}" if error is not None else NOTHING,
                f"`{one.best.fingerprint}`",
            ))  # fmt: skip
    head = ("device", "problem", "schedule", "registers", "threads", "spill bytes", "shared KiB", "CTAs/SM", "code KiB",
            "worst tile error", "fingerprint")  # fmt: skip
    if section.provenance == MEASURED:
        return Table(head=head, rows=tuple(rows))
    # Resources are facts of the machine code, not estimates; only the choice of the schedule is the model's.
    head = (*head[:2], "modelled best", *head[3:])
    return Table(head=(*head[:9], head[10]), rows=tuple((*row[:9], row[10]) for row in rows))


def _heat_maps(section: Section, arch: str, images: Mapping[str, bytes] | None) -> list[Block]:
    problems = plots.with_tiles(section)
    if not problems:
        return []
    blocks: list[Block] = [Heading(text=f"Heat maps, {section.provenance}")]
    for one in problems:
        name = plots.file_name(one)
        if images is not None and name in images:
            blocks.append(Image(name=name, png=images[name], text=f"Heat map: {plots.title(one, arch)}"))
        elif images is None:
            blocks += [Heading(text=plots.title(one, arch), level=3), _heat_table(one)]
    return blocks


def _heat_table(one: ProblemReport) -> Table:
    tile_ms = sorted({tile.tile[0] for tile in one.tiles})
    tile_ns = sorted({tile.tile[1] for tile in one.tiles})
    cells = {tile.tile: f"{tile.relative:.3f}" for tile in one.tiles}
    rows = tuple((str(m), *(cells.get((m, n), NOTHING) for n in tile_ns)) for m in tile_ms)
    head = ("tile_m", *(f"{one.provenance} time / best, tile_n={n}" for n in tile_ns))
    return Table(head=head, rows=rows)


def _evidence(section: Section) -> Table:
    rows = []
    for one in section.problems:
        served = NOTHING
        if one.served is not None:
            same = one.served.schedule in (one.best.schedule, *(
                timed.schedule for timed in one.timed if timed.same_program_as == one.best.schedule))  # fmt: skip
            served = f"{one.served.provenance}: " + ("the best" if same else f"`{one.served.schedule.short()}`")
        rows.append((_where(section, one.device_name), str(one.problem), one.accum_mode, str(len(one.timed)),
                     str(one.programs), str(one.measurements), str(one.best.samples), served,
                     ", ".join(f"`{tie.short()}`" for tie in one.ties) or NOTHING))  # fmt: skip
    head = ("device", "problem", "accum", "schedules", "programs", "measurements", "samples of the best", "served",
            "tied with the best")  # fmt: skip
    return Table(head=head, rows=tuple(rows))


def _regimes(report: Report) -> list[Block]:
    if not report.regimes:
        return []
    rows = tuple(
        (one.device_name, str(one.problem), one.accum_mode, str(one.programs), f"`{one.burst_winner.short()}`",
         "the same" if one.same else f"`{one.sustained_winner.short()}`",
         _percent(one.burst_loss), _yes(one.burst_loss_distinct),
         _percent(one.sustained_loss), _yes(one.sustained_loss_distinct)) for one in report.regimes
    )  # fmt: skip
    changed = sum(not one.same for one in report.regimes)
    text = (
        f"Of {_count(len(report.regimes), 'problem')} with programs measured in both regimes, {changed} have another "
        "winner at the power cap. A loss is what serving the winner of one regime costs in the other: its time / the "
        "other winner's - 1, both taken in that other regime; it is sure where their 95% intervals are apart."
    )
    head = ("device", "problem", "accum", "programs in both", "burst winner", "sustained winner",
            "burst winner's loss when sustained", "sure", "sustained winner's loss in burst", "sure")  # fmt: skip
    return [Heading(text="Burst against sustained"), Paragraph(text=text), Table(head=head, rows=rows)]


def _inert(report: Report) -> list[Block]:
    if not report.inert:
        return []
    rows = tuple((f"`{knob.knob}`", f"{knob.pairs:,}", f"{knob.same:,}", _percent(knob.same / knob.pairs),
                  _yes(knob.inert)) for knob in report.inert)  # fmt: skip
    text = (
        f"Over {_count(report.builds, 'build')}: pairs of schedules that differ in one knob only, and how many of them "
        "are the same machine code. A persistent kernel's grid also depends on `occupancy`."
    )
    head = ("knob", "pairs built", "same machine code", "share", "inert")
    return [Heading(text="Knobs that change nothing"), Paragraph(text=text), Table(head=head, rows=rows)]


def _unmeasured(report: Report) -> list[Block]:
    if not report.unmeasured:
        return []
    rows = tuple((str(entry.problem), entry.accum_mode, entry.provenance, f"`{entry.schedule.short()}`",
                  entry.source or NOTHING) for entry in report.unmeasured)  # fmt: skip
    head = ("problem", "accum", "provenance", "schedule", "source")
    return [Heading(text="Served without a measurement or a model"), Table(head=head, rows=rows)]


def _failures(report: Report) -> list[Block]:
    if not report.failures:
        return [Heading(text="Failures"), Paragraph(text="No candidate failed.")]
    rows = tuple((line.stage, line.kind, str(line.candidates), _code(line.example), f"`{line.schedule.short()}`")
                 for line in report.failures)  # fmt: skip
    head = ("stage", "kind", "candidates", "for example", "schedule")
    return [Heading(text="Failures"), Table(head=head, rows=rows)]


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


def _seq(one: ProblemReport) -> str:
    problem = one.problem
    return str(problem.seq_q) if problem.seq_q == problem.seq_k else f"{problem.seq_q}/{problem.seq_k}"


def _heads(one: ProblemReport) -> str:
    problem = one.problem
    return str(problem.heads) if problem.heads == problem.kv_heads else f"{problem.heads}/{problem.kv_heads}"


def _tile(tile: Tile | None) -> str:
    return f"{tile[0]}x{tile[1]}" if tile else NOTHING


def _value(value: KnobValue) -> str:
    return _yes(value) if isinstance(value, bool) else str(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _where(section: Section, device_name: str) -> str:
    return device_name if section.provenance == MEASURED else NOTHING


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`" if text else NOTHING
