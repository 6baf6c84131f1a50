"""What each command calls and prints. Imports stay inside the functions: `show` must not wait for a compiler."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.cli import output
from tiledsched.config import Settings, load_settings
from tiledsched.errors import ConfigError
from tiledsched.problem import Problem

if TYPE_CHECKING:
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
    masks = {"yes": (True,), "no": (False,), "both": (False, True)}[options.causal]
    return [Problem.standard(seq_len=seq_len, head_dim=head_dim, dtype=dtype, causal=causal, batch=options.batch,
                             heads=options.heads, kv_heads=options.kv_heads)
            for dtype in options.dtype for head_dim in options.head_dim for causal in masks
            for seq_len in options.seq_len]  # fmt: skip


def tune(options: argparse.Namespace) -> int:
    """Tune, then print what is served now."""
    from tiledsched.build.artifacts import ArtifactStore
    from tiledsched.build.compiler import prepare_process
    from tiledsched.build.pool import BuildPool
    from tiledsched.build.toolchain import check_arch, installed_toolchain
    from tiledsched.kernels import template_for
    from tiledsched.search.tuner import TuneOptions, Tuner
    from tiledsched.space import load_space, space_for

    prepare_process()
    settings = _settings(options)
    space = load_space(options.space) if options.space else space_for(options.arch)
    if space.arch != options.arch:
        raise ConfigError(f"{options.space} is for {space.arch}, not {options.arch}; pass --arch {space.arch}")
    problems = _problems(options)
    toolchain = installed_toolchain()
    check_arch(toolchain, options.arch)
    template = template_for(space.kernel)
    tune_options = TuneOptions(accum_mode=settings.accum_mode, trials=options.trials, budget_s=options.budget,
                               sampler=options.sampler, seed=options.seed, regime=settings.regime,
                               compile_timeout_s=options.compile_timeout)  # fmt: skip
    runner = _runner(options, template)
    with _open(options) as db, BuildPool(options.jobs) as pool, output.TuneProgress() as watcher:
        command = {key: value for key, value in vars(options).items() if key not in ("run", "db", "json", "verbose")}
        run_id = db.start_run(command, options.arch)
        status = "failed"
        try:
            tuner = Tuner(db, ArtifactStore(Path(settings.cache) if settings.cache else None), space, template,
                          toolchain, tune_options, pool=pool, run_id=run_id, runner=runner, watcher=watcher)  # fmt: skip
            results = tuner.tune(problems)
            status = "done"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            db.finish_run(run_id, status)
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


def _runner(options: argparse.Namespace, template: Any) -> Any:
    """The GPU, or None where there is none of the arch (an error when it was asked for)."""
    from tiledsched.errors import MeasureError
    from tiledsched.measure.nvml import devices

    if options.runner == "none":
        return None
    present = any(device.arch == options.arch for device in devices())
    if not present and options.runner == "gpu":
        raise MeasureError(f"no {options.arch} GPU here; run: tiledsched doctor, or use --runner none")
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

    problem = Problem.standard(seq_len=options.seq_len, head_dim=options.head_dim, dtype=options.dtype,
                               causal=options.causal, batch=options.batch, heads=options.heads,
                               kv_heads=options.kv_heads)  # fmt: skip
    explanation = explain_problem(load_table(_settings(options)), problem, options.arch, options.device)
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


def bench(options: argparse.Namespace) -> int:
    """Time sdpa beside its baselines."""
    from tiledsched.bench import run_bench

    rows = run_bench(_problems(options), rounds=options.rounds, regime=options.regime, verify=options.verify,
                     progress=output.note)  # fmt: skip
    if options.csv:
        output.write_bench_csv(rows, Path(options.csv))
    if options.json:
        _print_json({"rows": [row.to_json() for row in rows]})
    else:
        output.print_bench(rows)
    return 0


def landscapes(options: argparse.Namespace) -> int:
    """List what is measured."""
    from tiledsched.store.exchange import export_landscape

    with _open(options, read_only=True) as db:
        found = db.landscapes()
        if options.export:
            folder = Path(options.export)
            folder.mkdir(parents=True, exist_ok=True)
            for line in found:
                path = folder / output.landscape_file(line)
                export_landscape(db, path, line.problem, line.device_name, line.regime)
                output.note(f"written {path}")
    if options.json:
        _print_json({"landscapes": [output.landscape_json(line) for line in found]})
    else:
        output.print_landscapes(found)
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
