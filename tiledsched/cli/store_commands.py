"""The commands that list, prepare and keep what is stored: show, landscapes, warmup, bundle, doctor and db."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.cli import output
from tiledsched.cli.commands import _folder, _open, _print_json, _said, _settings
from tiledsched.cli.problems import filtered, own_filters
from tiledsched.core.errors import ConfigError

if TYPE_CHECKING:
    from tiledsched.serve.entries import Layer
    from tiledsched.store.records import Entry, MergeResult


FORMS = {"tiledsched": ".json.xz", "csv": ".csv"}
"""Forms of a landscape that hold every measurement -> ending of the file."""


def _listed(options: argparse.Namespace) -> str | None:
    """The name of the kernel asked for, as tables have it; None for all. One that is not known here is taken at its word."""
    from tiledsched.core.registry import load_kernel

    if options.listed is None:
        return None
    try:
        return load_kernel(options.listed).name
    except ConfigError:
        return str(options.listed)


def show(options: argparse.Namespace) -> int:
    """List entries."""
    from tiledsched.build.toolchain import compiler_at_hand
    from tiledsched.serve.entries import combined, layers
    from tiledsched.store.evidence import for_compiler

    own = own_filters(options)
    kernel = _listed(options) or (options.declaration.name if own else None)
    archs = None if options.arch is None else {options.arch}
    found = layers(_settings(options), archs, kernel or "")
    entries = combined(found)
    if options.compiler == "all":
        compiler = compiler_at_hand()
    else:
        compiler = options.compiler or compiler_at_hand()
        entries = for_compiler(entries, compiler)
    entries = [entry for entry in entries if options.arch in (None, entry.arch) and kernel in (None, entry.kernel)]
    problems = set(filtered(options, (entry.problem for entry in entries)))
    entries = [
        entry
        for entry in entries
        if entry.problem in problems
        and options.regime in (None, entry.regime)
        and (options.provenance is None or entry.provenance in options.provenance)
        and (options.device or "").lower() in entry.device_name.lower()
    ]
    if options.json:
        covered = _covered(found)
        _print_json(
            {
                "layers": [layer.to_json() for layer in found],
                "entries": [
                    {
                        **output.entry_json(entry, compiler),
                        "layer": entry.layer,
                        "covers": [name for name in covered[entry.key] if name != entry.layer],
                    }
                    for entry in entries
                ],
            }
        )
    elif entries and options.layers:
        output.print_layers(found, entries, _covered(found))
    elif entries:
        output.print_entries(entries, compiler)
    elif options.problem or own or options.dtype or options.provenance or options.regime or options.device:
        print("nothing that is tuned is like that; leave out a filter", file=sys.stderr)
    else:
        what = f"of {kernel} " if kernel else ""
        print(
            f"nothing {what}is tuned for {options.arch or 'any arch'}; run: tiledsched tune "
            f"{options.listed + ' ' if kernel else ''}--arch {options.arch or 'ARCH'}",
            file=sys.stderr,
        )
    return 0


def _covered(found: Sequence[Layer]) -> dict[tuple[str, ...], list[str]]:
    """The layers that have something for each key."""
    covered: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for layer in found:
        for entry in layer.entries:
            covered[entry.key].append(layer.name)
    return covered


def landscapes(options: argparse.Namespace) -> int:
    """List what is measured, and where the regimes disagree."""
    from tiledsched.store.exchange import export_landscape, landscape_file_name
    from tiledsched.store.queries import compare_regimes

    if (options.full or options.format != "tiledsched") and not options.export:
        raise ConfigError("--format and --full say how files are written; pass --export DIR, too")
    if options.full and options.format not in FORMS:
        raise ConfigError(f"--full is of {' and '.join(FORMS)}; {options.format} holds one result for each schedule")
    with _open(options, read_only=True) as db:
        kernel = _listed(options)
        found = [line for line in db.landscapes() if kernel in (None, line.problem.kernel)]
        compared = [one for one in compare_regimes(db.latest_measurements()) if kernel in (None, one.problem.kernel)]
        if options.export:
            from tiledsched.store.t4 import export_foreign, recorded

            folder = _folder(options.export)
            for line in found:
                if options.format in FORMS:
                    name = landscape_file_name(line.problem, line.device_name, line.regime, FORMS[options.format])
                    paths = [folder / name]
                    export_landscape(db, paths[0], line.problem, line.device_name, line.regime, full=options.full)
                else:
                    landscape = recorded(db, line.problem, line.device_name, line.regime)
                    paths = export_foreign(landscape, folder, options.format)
                for path in paths:
                    output.note(f"written {path}")
    if options.json:
        _print_json(
            {
                "landscapes": [output.landscape_json(line) for line in found],
                "regimes": [one.to_json() for one in compared],
            }
        )
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
    settings, name = _settings(options), options.declaration.name
    return _prepare(options, [(arch, warm_path(arch, settings, name)) for arch in archs])


def bundle(options: argparse.Namespace) -> int:
    """Build what an arch is served, into a file to take elsewhere; into a folder, under a name that tells its contents."""
    return _prepare(options, [(options.arch, Path(options.out))], options.campaign)


def _prepare(options: argparse.Namespace, targets: list[tuple[str, Path]], campaign: str | None = None) -> int:
    from tiledsched.serve.bundle import warm_path
    from tiledsched.serve.entries import load_entries, load_table
    from tiledsched.serve.warmup import prepare, renamed_by_contents
    from tiledsched.tuning.session import Session

    settings, kernel = _settings(options), options.declaration
    entries, table = load_entries(settings), load_table(settings, kernel=kernel)
    if campaign:
        entries = _of_campaign(options, entries, campaign)
    results = []
    for arch, path in targets:
        session = Session(arch, settings=settings)
        done = prepare(
            arch,
            path / f".{os.getpid()}.zip" if path.is_dir() else path,
            entries,
            table,
            kernel,
            session.artifacts,
            session.toolchain.compiler,
            likely=lambda problem: kernel.likely(problem, options) if kernel.likely else (),
            others=[warm_path(arch, settings, kernel.name)],
            jobs=options.jobs,
            progress=output.note,
        )
        results.append(renamed_by_contents(done, kernel.name) if path.is_dir() else done)
    _said(options, {"bundles": [result.to_json() for result in results]}, "\n".join(map(str, results)))
    return 1 if any(result.failures for result in results) else 0


def _of_campaign(options: argparse.Namespace, entries: list[Entry], campaign: str) -> list[Entry]:
    """Entries of the problems that a campaign did."""
    from tiledsched.fleet.leases import Leases

    with _open(options, read_only=True) as db:
        leases = Leases(db)
        done = {(problem, arch) for problem, arch, _, _ in leases.results(leases.campaign(campaign).id)}
    return [entry for entry in entries if (entry.problem, entry.arch) in done]


def db_export(options: argparse.Namespace) -> int:
    """Write a table."""
    from tiledsched.store.exchange import export_table

    with _open(options, read_only=True) as db:
        if options.out == "-":
            export_table(db, sys.stdout, options.arch, _listed(options))
            return 0
        count = export_table(db, options.out, options.arch, _listed(options))
    _said(options, {"entries": count, "file": options.out}, f"{count} entries written to {options.out}")
    return 0


def db_import(options: argparse.Namespace) -> int:
    """Read tables."""
    from tiledsched.store.exchange import import_table
    from tiledsched.store.records import MergeResult

    result = MergeResult()
    with _open(options) as db:
        for file in options.files:
            result += import_table(db, file)
    return _merged(options, result)


def db_merge(options: argparse.Namespace) -> int:
    """Read other databases."""
    from tiledsched.store.exchange import merge_database
    from tiledsched.store.records import MergeResult

    result = MergeResult()
    with _open(options) as db:
        for other in options.others:
            result += merge_database(db, other)
    return _merged(options, result)


def _merged(options: argparse.Namespace, result: MergeResult) -> int:
    if options.json:
        _print_json(result.to_json())
    else:
        output.print_merged(result)
    return 0


def db_forget_failures(options: argparse.Namespace) -> int:
    """Delete stored failures."""
    with _open(options) as db:
        count = db.forget_failures(options.arch, _listed(options), options.kind)
    _said(options, {"forgotten": count}, f"{count} failures forgotten; they are tried again when their turn comes")
    return 0


def db_query(options: argparse.Namespace) -> int:
    """Answer a question in SQL."""
    from tiledsched.store.sql import ask, tables

    with _open(options, read_only=True) as db:
        if options.sql is None:
            names = tables(db)
            _said(options, {"tables": names}, "\n".join(names))
            return 0
        sql = sys.stdin.read() if options.sql == "-" else options.sql
        with ask(db, sql, options.timeout) as (columns, rows):
            if options.csv:
                writer = csv.writer(sys.stdout, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(rows)
                return 0
            found = list(itertools.islice(rows, options.limit + 1))
    more, found = len(found) > options.limit, found[: options.limit]
    if options.json:
        _print_json({"columns": columns, "rows": [[_plain(value) for value in row] for row in found], "more": more})
    else:
        output.print_rows(columns, found)
    if more:
        output.note(f"there are more rows than {options.limit}; --limit N prints more of them, --csv all")
    return 0


def _plain(value: Any) -> Any:
    """As JSON has it; a time as text."""
    return value if value is None or isinstance(value, (bool, int, float, str, list, dict)) else str(value)


def db_backup(options: argparse.Namespace) -> int:
    """Write a copy."""
    from tiledsched.store.backup import back_up

    with _open(options, read_only=True) as db:
        size = back_up(db, options.file, replace=options.force)
    _said(options, {"file": options.file, "bytes": size}, f"{size:,} bytes written to {options.file}")
    return 0


def db_check(options: argparse.Namespace) -> int:
    """Look for damage; exit code 1 where there is some."""
    with _open(options, read_only=True) as db:
        problems = db.check()
        revision = db.schema_revision
    _said(
        options,
        {"problems": problems, "schema": revision},
        "\n".join(problems) if problems else f"no damage found (schema {revision})",
    )
    return 1 if problems else 0


def db_upgrade(options: argparse.Namespace) -> int:
    """Upgrade the schema."""
    with _open(options) as db:
        revision = db.upgrade()
    _said(options, {"schema": revision}, f"schema {revision}")
    return 0
