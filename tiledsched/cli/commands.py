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
from tiledsched.cli.problems import problems_of
from tiledsched.config import Settings, load_settings
from tiledsched.errors import ConfigError

if TYPE_CHECKING:
    from tiledsched.build.artifacts import ArtifactStore
    from tiledsched.build.toolchain import Toolchain
    from tiledsched.config import Settings
    from tiledsched.kernel import KernelClass
    from tiledsched.problem import Problem
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
    return problems_of(options.declaration, options)


def _space(options: argparse.Namespace) -> SearchSpace:
    from tiledsched.space_files import load_space, space_for

    path = getattr(options, "space", None)  # study compares shipped schedules and takes no file
    space = load_space(path) if path else space_for(options.arch, kernel=options.declaration.name)
    if path and space.kernel != options.declaration.name:
        raise ConfigError(f"{path} is a space of {space.kernel}, not of {options.declaration.name}; name that kernel")
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

    prepare_process()
    settings = _settings(options)
    space = _space(options)
    toolchain = installed_toolchain()
    check_arch(toolchain, options.arch)
    artifacts = ArtifactStore(Path(settings.cache) if settings.cache else None)
    return settings, space, toolchain, options.declaration, artifacts


@contextmanager
def _run(db: TuningDB, options: argparse.Namespace) -> Iterator[int]:
    """A run noted in the database from start to end; its number."""
    left_out = ("run", "db", "json", "verbose", "declaration")
    command = {key: value for key, value in vars(options).items() if key not in left_out}
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
    from tiledsched.tuning import tune as run_tune

    settings, kernel = _settings(options), options.declaration
    problems = _problems(options)
    with output.TuneProgress() as watcher:
        report = run_tune(kernel, problems, arch=options.arch, db=settings.db, cache=settings.cache, effort=options.effort,
                          trials=options.trials, budget_s=options.budget, sampler=options.sampler,
                          neighbours=options.neighbours, seed=options.seed, regime=settings.regime,
                          accum_mode=settings.accum_mode, runner=options.runner, space=options.space,
                          candidates=options.candidates, jobs=options.jobs, compile_timeout_s=options.compile_timeout,
                          watcher=watcher)  # fmt: skip
    if options.json:
        _print_json({"run": report.run_id, "results": [output.result_json(result) for result in report.results],
                     "entries": [output.entry_json(entry) for entry in report.entries]})  # fmt: skip
    else:
        output.print_tune_summary(options.arch, report.results)
        output.print_entries(report.entries)
    return 0


def check(options: argparse.Namespace) -> int:
    """Compare what schedules give in the interpreter with the reference; exit code 1 where some are wrong."""
    from tiledsched.tuning import check as run_check

    named = options.problem or options.suite
    rows = run_check(options.declaration, _problems(options) if named else None, arch=options.arch,
                     schedules=options.schedules, seed=options.seed, progress=output.note)  # fmt: skip
    if options.json:
        _print_json({"rows": [output.check_json(row) for row in rows]})
    else:
        output.print_check(rows)
    return 0 if rows and all(row.passed for row in rows) else 1


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


def explain(options: argparse.Namespace) -> int:
    """Say for each problem what it is served with, and why."""
    from tiledsched.serve.entries import load_table
    from tiledsched.serve.explain import explain_problem

    settings = _settings(options)
    table = load_table(settings, kernel=options.declaration.name)
    found = [explain_problem(table, problem, options.arch, options.device, settings.sources)
             for problem in _problems(options)]  # fmt: skip
    if options.json:
        rows = [each.to_json() for each in found]
        _print_json({**rows[0], "rows": rows})  # of one problem also at the top, where scripts have always found it
    else:
        print("\n\n".join(map(str, found)))
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
    """One session of the repeatability study, or the sum of all."""
    from tiledsched.studies.repeatability.rows import read_rows
    from tiledsched.studies.repeatability.summary import summarise

    if not options.summary:
        return _study_session(options)
    summary = summarise(read_rows(Path(options.summary)))
    if options.json:
        _print_json(summary.to_json())
    else:
        for table in summary.tables():
            output.console().print(table)
    return 0


def _study_session(options: argparse.Namespace) -> int:
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


