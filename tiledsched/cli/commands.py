"""What each command calls and prints. Imports stay inside the functions: `show` must not wait for a compiler."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.cli import output
from tiledsched.config import Settings, load_settings
from tiledsched.errors import ConfigError
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.suites import SUITES
from tiledsched.problem import Problem

if TYPE_CHECKING:
    from tiledsched.build.artifacts import ArtifactStore
    from tiledsched.build.toolchain import Toolchain
    from tiledsched.config import Settings
    from tiledsched.kernel import KernelClass
    from tiledsched.schedule import KnobValue
    from tiledsched.space import SearchSpace
    from tiledsched.store.db import TuningDB

SCHEMA_VERSION = 1


def _settings(options: argparse.Namespace) -> Settings:
    flags = {name: getattr(options, name, None) for name in ("db", "regime", "accum_mode")}
    return load_settings(flags)


def _open(options: argparse.Namespace, *, read_only: bool = False) -> TuningDB:
    from tiledsched.store.db import TuningDB

    return TuningDB.open(_settings(options).db, read_only=read_only)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2))


def _problems(options: argparse.Namespace) -> list[Problem]:
    if options.suite:
        return list(SUITES[options.suite].problems)
    masks = {"yes": (True,), "no": (False,), "both": (False, True)}[options.causal]
    return [_detailed(Attention.standard(seq_len=seq_len, head_dim=head_dim, dtype=dtype, causal=causal, batch=options.batch,
                                       heads=options.heads, kv_heads=options.kv_heads), options)
            for dtype in options.dtype for head_dim in options.head_dim for causal in masks
            for seq_len in options.seq_len]  # fmt: skip


def _detailed(problem: Problem, options: argparse.Namespace) -> Problem:
    """`problem` with what its usual sizes do not say."""
    return problem.replace(seq_q=options.seq_q or problem.seq_q, alignment=options.alignment, value_dim=options.value_dim,
                           lse=options.lse)  # fmt: skip


def _space(options: argparse.Namespace) -> SearchSpace:
    from tiledsched.space_files import load_space, space_for

    path = getattr(options, "space", None)  # study compares shipped schedules and takes no file
    space = load_space(path) if path else space_for(options.arch)
    if space.arch != options.arch:
        raise ConfigError(f"{path} is for {space.arch}, not {options.arch}; pass --arch {space.arch}")
    candidates = getattr(options, "candidates", None)
    return space.limited_to(_candidates(candidates), Path(candidates).name) if candidates else space


def _candidates(path: str) -> list[dict[str, KnobValue]]:
    """The schedules in a JSON file.

    Raises:
        ConfigError: the file cannot be read, or is not a list of objects.
    """
    try:
        listed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read candidates from {path}: {error}") from error
    if not (isinstance(listed, list) and listed and all(isinstance(each, dict) for each in listed)):
        raise ConfigError(f"{path} must hold a JSON list of schedules, each an object of knob names and values")
    return listed


def _compiling(options: argparse.Namespace) -> tuple[Settings, SearchSpace, Toolchain, KernelClass, ArtifactStore]:
    """What a command needs that compiles and measures."""
    from tiledsched.build.artifacts import ArtifactStore
    from tiledsched.build.compiler import prepare_process
    from tiledsched.build.toolchain import check_arch, installed_toolchain
    from tiledsched.kernel import kernel_named

    prepare_process()
    settings = _settings(options)
    space = _space(options)
    toolchain = installed_toolchain()
    check_arch(toolchain, options.arch)
    artifacts = ArtifactStore(Path(settings.cache) if settings.cache else None)
    return settings, space, toolchain, kernel_named(space.kernel), artifacts


@contextmanager
def _run(db: TuningDB, options: argparse.Namespace) -> Iterator[int]:
    """A run noted in the database from start to end; its number."""
    command = {key: value for key, value in vars(options).items() if key not in ("run", "db", "json", "verbose")}
    run_id = db.start_run(command, options.arch)
    status = "failed"
    try:
        yield run_id
        status = "done"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        db.finish_run(run_id, status)


def tune(options: argparse.Namespace) -> int:
    """Tune, then print what is served now."""
    settings, space, toolchain, template, artifacts = _compiling(options)
    problems = _problems(options)
    runner = _runner(options, template)
    # Its process starts while we import the rest.
    from tiledsched.build.pool import BuildPool
    from tiledsched.search.tuner import TuneOptions, Tuner

    tune_options = TuneOptions(accum_mode=settings.accum_mode, effort=options.effort, trials=options.trials,
                               budget_s=options.budget, sampler=options.sampler, neighbours=options.neighbours,
                               seed=options.seed, regime=settings.regime, compile_timeout_s=options.compile_timeout)  # fmt: skip
    with _open(options) as db, BuildPool(options.jobs) as pool, output.TuneProgress() as watcher:
        try:
            with _run(db, options) as run_id:
                tuner = Tuner(db, artifacts, space, template, toolchain, tune_options, pool=pool, run_id=run_id,
                              runner=runner, watcher=watcher)  # fmt: skip
                results = tuner.tune(problems)
        finally:
            if runner is not None:
                runner.close()
        entries = [entry for result in results for entry in db.entries(options.arch, problem=result.entry.problem)
                   if entry.key == result.entry.key]  # fmt: skip
    if options.json:
        _print_json({"run": run_id, "results": [output.result_json(result) for result in results],
                     "entries": [output.entry_json(entry) for entry in entries]})  # fmt: skip
    else:
        output.print_tune_summary(options.arch, results, runner is not None)
        output.print_entries(entries)
    return 0


def _folder(path: str) -> Path:
    """A folder to write to, made where needed."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}; give another one") from error
    return Path(path)


def record(options: argparse.Namespace) -> int:
    """Record landscapes, a line for each file as it is written."""
    from tiledsched.build.pool import BuildPool
    from tiledsched.search.record import Recorder, RecordOptions

    if not options.build_only and not options.out:
        raise ConfigError("record needs a folder for the landscapes; pass --out DIR, or --build-only")
    settings, space, toolchain, template, artifacts = _compiling(options)
    problems = _problems(options)
    record_options = RecordOptions(accum_mode=settings.accum_mode, programs=options.programs, seed=options.seed,
                                   sustained_leaders=options.sustained_leaders, budget_s=options.budget,
                                   compile_timeout_s=options.compile_timeout)  # fmt: skip
    folder = _folder(options.out) if options.out else Path()
    runner = None if options.build_only else _runner(options, template, "--build-only")
    results = []
    with _open(options) as db, BuildPool(options.jobs) as pool:
        try:
            with _run(db, options) as run_id:
                recorder = Recorder(db, artifacts, space, template, toolchain, record_options, pool=pool, run_id=run_id,
                                    runner=runner, progress=output.note)  # fmt: skip
                for result in recorder.record(problems, folder):
                    results.append(result)
                    if not options.json:
                        output.print_recorded(result)
        finally:
            if runner is not None:
                runner.close()
    if options.json:
        _print_json({"run": run_id, "problems": [output.recorded_json(result) for result in results]})
    return 0


def _runner(options: argparse.Namespace, template: Any, without: str = "--runner none") -> Any:
    """The GPU, or None where there is none of the arch (an error when it was asked for)."""
    from tiledsched.errors import MeasureError
    from tiledsched.measure.nvml import devices

    wanted = getattr(options, "runner", "gpu")
    if wanted == "none":
        return None
    present = any(device.arch == options.arch for device in devices())
    if not present and wanted == "gpu":
        raise MeasureError(f"no {options.arch} GPU here; run: tiledsched doctor, or use {without}")
    if not present:
        return None
    from tiledsched.measure.gpu import GpuRunner

    return GpuRunner(template, seed=options.seed)


def show(options: argparse.Namespace) -> int:
    """List entries."""
    from tiledsched.serve.entries import load_entries

    entries = [entry for entry in load_entries(_settings(options).db) if options.arch in (None, entry.arch)]
    if options.json:
        _print_json({"entries": [output.entry_json(entry) for entry in entries]})
    elif entries:
        output.print_entries(entries)
    else:
        where = options.arch or "any arch"
        print(f"nothing is tuned for {where}; run: tiledsched tune --arch {options.arch or 'ARCH'}", file=sys.stderr)
    return 0


def explain(options: argparse.Namespace) -> int:
    """Resolve one problem and say why."""
    from tiledsched.serve.entries import load_table
    from tiledsched.serve.explain import explain_problem

    problem = Attention.standard(seq_len=options.seq_len, head_dim=options.head_dim, dtype=options.dtype,
                               causal=options.causal, batch=options.batch, heads=options.heads,
                               kv_heads=options.kv_heads)  # fmt: skip
    settings = _settings(options)
    problem = _detailed(problem, options)
    explanation = explain_problem(load_table(settings), problem, options.arch, options.device, settings.sources)
    if options.json:
        print(json.dumps(explanation.to_json(), indent=2))
    else:
        print(explanation)
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the report and name its files."""
    from tiledsched.report import build_report, write_report
    from tiledsched.search.tuner import modelled_times

    with _open(options, read_only=True) as db:
        found = build_report(db, options.arch, regime=options.regime, device_name=options.device,
                             model_times=modelled_times(options.arch))  # fmt: skip
    files = write_report(found, Path(options.out))
    if options.json:
        _print_json({"files": [str(path) for path in files]})
    else:
        for path in files:
            print(path)
    return 0


def study(options: argparse.Namespace) -> int:
    """One occasion of the repeatability study, or the sum of all."""
    from tiledsched.studies.repeatability.rows import read_rows
    from tiledsched.studies.repeatability.summary import summarise

    if not options.summary:
        return _study_occasion(options)
    summary = summarise(read_rows(Path(options.summary)))
    if options.json:
        _print_json(summary.to_json())
    else:
        for table in summary.tables():
            output.console().print(table)
    return 0


def _study_occasion(options: argparse.Namespace) -> int:
    from datetime import datetime, timezone

    from tiledsched.build.pool import BuildPool
    from tiledsched.measure.gpu import GpuRunner
    from tiledsched.search.programs import Workshop
    from tiledsched.studies.repeatability.methods import make_methods
    from tiledsched.studies.repeatability.occasion import find_field, run_occasion
    from tiledsched.studies.repeatability.rows import append_rows, check_columns

    if not options.arch or not options.csv:
        raise ConfigError("a study needs --arch and --csv; pass both, or --summary FILE")
    path = Path(options.csv)
    check_columns(path)
    began = datetime.now(timezone.utc)
    seed = int(began.timestamp()) if options.seed is None else options.seed
    _, space, toolchain, template, artifacts = _compiling(options)
    runner = GpuRunner(template, seed=seed)
    try:
        if runner.device.arch != options.arch:
            raise ConfigError(f"this GPU is {runner.device.arch}; pass --arch {runner.device.arch}")
        with _open(options) as db, BuildPool(options.jobs) as pool:
            workshop = Workshop(db, artifacts, template, options.arch, toolchain, pool)
            fields = [(problem, find_field(db, workshop, space, problem, runner.device, options.programs))
                      for problem in _problems(options)]  # fmt: skip
        rows = run_occasion(fields, make_methods(options.methods, template, runner), runner, seed=seed, began=began,
                            keep=lambda done: append_rows(done, path), progress=output.note)  # fmt: skip
    finally:
        runner.close()
    if options.json:
        _print_json({"rows": [row.to_csv() for row in rows]})
    else:
        print(f"{len(rows)} rows added to {path}; sum up with: tiledsched study --summary {path}")
    return 0


def landscapes(options: argparse.Namespace) -> int:
    """List what is measured, and where the regimes disagree."""
    from tiledsched.store.exchange import export_landscape, landscape_file_name
    from tiledsched.store.queries import compare_regimes

    if options.format != "tiledsched" and not options.export:
        raise ConfigError("--format says how files are written; pass --export DIR, too")
    with _open(options, read_only=True) as db:
        found = db.landscapes()
        compared = compare_regimes(db)
        if options.export:
            from tiledsched.store.t4 import export_foreign, recorded

            folder = _folder(options.export)
            for line in found:
                paths = [folder / landscape_file_name(line.problem, line.device_name, line.regime)]
                if options.format == "tiledsched":
                    export_landscape(db, paths[0], line.problem, line.device_name, line.regime)
                else:
                    landscape = recorded(db, line.problem, line.device_name, line.regime)
                    paths = export_foreign(landscape, folder, options.format)
                for path in paths:
                    output.note(f"written {path}")
    if options.json:
        _print_json({"landscapes": [output.landscape_json(line) for line in found],
                     "regimes": [one.to_json() for one in compared]})  # fmt: skip
    else:
        output.print_landscapes(found)
        if compared:
            output.print_regimes(compared)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Examine this machine."""
    from tiledsched import doctor as doctor_module

    findings = doctor_module.examine()
    if options.json:
        print(json.dumps(doctor_module.to_json(findings), indent=2))
    else:
        print(doctor_module.to_text(findings))
    return 0


def warmup(options: argparse.Namespace) -> int:
    """Build what this machine will be served, where every process finds it."""
    from tiledsched.measure.nvml import devices
    from tiledsched.serve.bundle import warm_path

    archs = [options.arch] if options.arch else sorted({device.arch for device in devices()})
    if not archs:
        raise ConfigError("there is no GPU here to warm up for; pass --arch, e.g. --arch sm_90")
    settings = _settings(options)
    return _prepare(options, [(arch, warm_path(arch, settings)) for arch in archs])


def bundle(options: argparse.Namespace) -> int:
    """Build what an arch is served, into a file to take elsewhere."""
    return _prepare(options, [(options.arch, Path(options.out))])


def _prepare(options: argparse.Namespace, targets: list[tuple[str, Path]]) -> int:
    from tiledsched.build.artifacts import ArtifactStore
    from tiledsched.build.compiler import prepare_process
    from tiledsched.build.toolchain import check_arch, installed_toolchain
    from tiledsched.kernel import kernel_named
    from tiledsched.serve.bundle import warm_path
    from tiledsched.serve.entries import load_entries, load_table
    from tiledsched.serve.warmup import Wanted, prepare

    prepare_process()
    settings = _settings(options)
    toolchain = installed_toolchain()
    entries, table = load_entries(settings.db), load_table(settings)
    artifacts = ArtifactStore(Path(settings.cache) if settings.cache else None)
    wanted = Wanted(dtypes=tuple(options.dtype), groups=tuple(options.group), any_length=options.any_length,
                    decode=options.decode)  # fmt: skip
    results = []
    for arch, path in targets:
        check_arch(toolchain, arch)
        results.append(prepare(arch, path, entries, table, kernel_named(table.kernel), artifacts, toolchain.compiler,
                               wanted=wanted, others=[warm_path(arch, settings)], jobs=options.jobs,
                               progress=output.note))  # fmt: skip
    _said(options, {"bundles": [result.to_json() for result in results]}, "\n".join(map(str, results)))
    return 1 if any(result.failures for result in results) else 0


def db_export(options: argparse.Namespace) -> int:
    """Write a table."""
    from tiledsched.store.exchange import export_table

    with _open(options, read_only=True) as db:
        if options.out == "-":
            export_table(db, sys.stdout, options.arch)
            return 0
        count = export_table(db, options.out, options.arch)
    _said(options, {"entries": count, "file": options.out}, f"{count} entries written to {options.out}")
    return 0


def db_import(options: argparse.Namespace) -> int:
    """Read a table."""
    from tiledsched.store.exchange import import_table

    with _open(options) as db:
        result = import_table(db, options.file)
    _said(options, result.to_json(), str(result))
    return 0


def db_merge(options: argparse.Namespace) -> int:
    """Read another database."""
    from tiledsched.store.exchange import merge_database

    with _open(options) as db:
        result = merge_database(db, options.other)
    _said(options, result.to_json(), str(result))
    return 0


def db_check(options: argparse.Namespace) -> int:
    """Look for damage; exit code 1 where there is some."""
    with _open(options, read_only=True) as db:
        problems = db.check()
        revision = db.schema_revision
    _said(options, {"problems": problems, "schema": revision},
          "\n".join(problems) if problems else f"no damage found (schema {revision})")  # fmt: skip
    return 1 if problems else 0


def db_upgrade(options: argparse.Namespace) -> int:
    """Upgrade the schema."""
    with _open(options) as db:
        revision = db.upgrade()
    _said(options, {"schema": revision}, f"schema {revision}")
    return 0


def _said(options: argparse.Namespace, value: dict[str, Any], text: str) -> None:
    if options.json:
        _print_json(value)
    else:
        print(text)
