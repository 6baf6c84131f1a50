"""The commands of the database: export, import, query, check and backup."""

from __future__ import annotations

import csv as csv_files
import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiledsched.cli.app import (
    FILE,
    FOLDER,
    CommandGroup,
    Integer,
    Invocation,
    Seconds,
    arch_option,
    argument,
    command,
    kernel_filter,
    made_folder,
    option,
)
from tiledsched.cli.output import note, print_lines, print_table
from tiledsched.core import data_files
from tiledsched.core.errors import ConfigError, FailureKind, did_you_mean
from tiledsched.core.files import csv_cell
from tiledsched.core.registry import SHIPPED
from tiledsched.core.text import plural

if TYPE_CHECKING:
    from tiledsched.store.db import TuningDB

OURS = "tiledsched"
"""The format of a landscape that holds every measurement."""
FORMATS = (OURS, "t4", "kernel-tuner-cache")
SAMPLE = "sample"
"""The word for the remembered search that ships in `tuning_db/samples`. Nothing is served from there."""
SQLITE = b"SQLite format 3\0"
"""How every SQLite file begins."""


@command("export")
@kernel_filter
@arch_option("only this arch, e.g. sm_90")
@option("-o", "--out", type=FILE, default="-", metavar="FILE", help="file to write the table to (default: stdout)")
@option(
    "--landscapes",
    type=FOLDER,
    metavar="DIR",
    help="write all measurements instead, a file for each problem and regime",
)
@option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default=OURS,
    help="with --landscapes: this package's JSON, T4 results, or what Kernel Tuner's simulation mode reads "
    "(default: tiledsched)",
)
@option("--full", is_flag=True, help="with --landscapes: every measurement, not only the newest of each program")
def export(
    run: Invocation, kernel: str | None, arch: str | None, out: str, landscapes: str | None, form: str, full: bool
) -> None:
    """Write what is tuned to a file that people can review.

    \b
    tiledsched db export attention --arch sm_90 -o sm_90.json
    tiledsched db export --landscapes landscapes --format t4
    """
    from tiledsched.store.exchange import export_table

    if landscapes is None and (full or form != OURS):
        raise ConfigError("--format and --full say how landscapes are written; pass --landscapes DIR, too")
    if full and form != OURS:
        raise ConfigError(f"--full is for {OURS}; {form} holds one result for each schedule")
    with run.open_db(read_only=True) as db:
        if landscapes is not None:
            files = _export_landscapes(db, made_folder(landscapes), arch, kernel, form, full)
            run.print({"files": files}, "\n".join(map(str, files)))
        else:
            count = export_table(db, sys.stdout if out == "-" else out, arch, kernel)
            if out != "-":
                run.print({"entries": count, "file": out}, f"{plural(count, 'entry', 'entries')} written to {out}")
            if kernel and not count:
                note(f"nothing of {kernel} is tuned in this database{did_you_mean(kernel, SHIPPED)}; -o names a file")


def _export_landscapes(
    db: TuningDB, folder: Path, arch: str | None, kernel: str | None, form: str, full: bool
) -> list[Path]:
    from tiledsched.store.exchange import export_landscape, landscape_file_name
    from tiledsched.store.t4 import export_foreign, recorded

    lines = db.landscapes(arch, kernel)
    if not lines:
        raise ConfigError("nothing is measured in this database; tune on a GPU first, or db import a landscape")
    files: list[Path] = []
    for line in lines:
        where = (line.problem, line.device_name, line.regime)
        if form == OURS:
            files.append(folder / landscape_file_name(*where))
            export_landscape(db, files[-1], *where, full=full)
        else:
            files += export_foreign(recorded(db, *where), folder, form)
    return files


@command("import")
@argument(
    "sources",
    nargs=-1,
    required=True,
    metavar="SOURCE...",
    help=f"tables, landscapes (JSON or T4), or databases, by file or URL; or `{SAMPLE}`: a remembered search that ships",
)
def bring_in(run: Invocation, sources: tuple[str, ...]) -> None:
    """Take in tables, landscapes and other databases.

    For each problem the entry with the stronger evidence stays. Where measurements contradict what is served, the command
    that decides is printed.

    \b
    tiledsched db import from_a_friend.json landscapes/*.json.xz
    tiledsched db import other.db postgresql://host/tiledsched
    """
    from tiledsched.cli.tuned_output import print_merged
    from tiledsched.store.exchange import import_table, merge_database
    from tiledsched.store.records import MergeResult

    result = MergeResult()
    with run.open_db() as db:
        for source in itertools.chain.from_iterable(map(_named_files, sources)):
            result += merge_database(db, source) if _is_database(source) else import_table(db, source)
    run.print(result.to_json(), lambda: print_merged(result))


def _named_files(source: str) -> list[str]:
    """The files that a word names: those of the sample, or the word itself."""
    samples = sorted(map(str, (data_files.tuning_db() / "samples").glob("*.json*")))
    return samples if source == SAMPLE and samples and not os.path.exists(source) else [source]


def _is_database(source: str) -> bool:
    """Whether something to import is a database, rather than a file of a table or landscape."""
    if "://" in source or not os.path.isfile(source):
        return "://" in source or source.endswith(".db")
    with open(source, "rb") as file:
        return file.read(len(SQLITE)) == SQLITE


@command("query")
@argument(
    "sql", required=False, help="one SELECT, or - to read it from standard input; none lists the tables and views"
)
@option("--csv", is_flag=True, help="print CSV")
@option(
    "--limit", type=Integer(1), default=1000, metavar="N", help="rows to print at most, except as CSV (default: 1000)"
)
@option("--timeout", type=Seconds(), default=60.0, metavar="SECONDS", help="give up after this long (default: 60)")
def query(run: Invocation, sql: str | None, csv: bool, limit: int, timeout: float) -> None:
    """Ask a question in SQL.

    It can change nothing, and it ends in time. An SQLite file is opened to be read. PostgreSQL runs the question in a
    read-only transaction, and users who can reach files of the server (superusers, ...) are refused.

    \b
    tiledsched db query
    tiledsched db query "select * from attention where D = 128" --csv
    """
    from tiledsched.store.sql import run_query, tables

    with run.open_db(read_only=True) as db:
        if sql is None:
            names = tables(db)
            run.print({"tables": names}, "\n".join(names))
            return
        with run_query(db, sys.stdin.read() if sql == "-" else sql, timeout) as (columns, rows):
            if csv:
                writer = csv_files.writer(sys.stdout, lineterminator="\n")
                writer.writerow(map(csv_cell, columns))
                writer.writerows(map(csv_cell, row) for row in rows)
                return
            found = list(itertools.islice(rows, limit + 1))
    more, found = len(found) > limit, found[:limit]
    run.print({"columns": columns, "rows": found, "more": more}, lambda: print_table(columns, found))
    if more:
        note(f"there are more rows than {limit}; --limit N prints more of them, --csv all")


@command("check")
@kernel_filter
@option("--upgrade", is_flag=True, help="bring the schema up to date first")
@option(
    "--forget-failures",
    is_flag=True,
    help="delete stored failures first, so that they are tried again: all, or those of KERNEL, --arch and --kind",
)
@arch_option("with --forget-failures: only this arch")
@option(
    "--kind",
    type=click.Choice([str(kind) for kind in FailureKind]),
    metavar="KIND",
    help="with --forget-failures: only this kind, e.g. compile_error",
)
def check(
    run: Invocation, kernel: str | None, upgrade: bool, forget_failures: bool, arch: str | None, kind: str | None
) -> int:
    """Look for damage, upgrade the schema, or forget failures.

    Exit code 1 if there is damage.

    \b
    tiledsched db check
    tiledsched db check --upgrade
    tiledsched db check --forget-failures --kind hang
    """
    if not forget_failures and (kernel or arch or kind):
        raise ConfigError("KERNEL, --arch and --kind choose failures; pass --forget-failures, too")
    found: dict[str, Any] = {}
    with run.open_db(read_only=not (upgrade or forget_failures)) as db:
        if upgrade:
            db.upgrade()
        if forget_failures:
            found["forgotten"] = db.forget_failures(arch, kernel, kind)
            note(f"{plural(found['forgotten'], 'failure')} forgotten; they are tried again when their turn comes")
        damage, revision = db.check(), db.schema_revision
        versions = {} if damage else db.versions()
    edited = {name: counts for name, counts in versions.items() if len(counts) > 1}
    lines = [
        f"{name} has {len(counts)} versions: "
        + ", ".join(f"{each} ({plural(count, 'entry', 'entries')})" for each, count in counts.items())
        + "; each serves its own code only"
        for name, counts in edited.items()
    ]
    if run.json:
        run.print({**found, "problems": damage, "schema": revision, "versions": edited})
    else:
        print(*(damage or [f"no damage found (schema {revision})"]), sep="\n")
        print_lines(*lines)
    return 1 if damage else 0


@command("backup")
@argument("file", type=FILE, help="where to; to go back, put it in the place of the database")
@option("--force", is_flag=True, help="replace a file that is there")
def backup(run: Invocation, file: str, force: bool) -> None:
    """Write a complete copy, even while others write.

    \b
    tiledsched db backup tuning-backup.db
    """
    with run.open_db(read_only=True) as db:
        size = db.back_up(file, replace=force)
    run.print({"file": file, "bytes": size}, f"{size:,} bytes written to {file}")


db = CommandGroup(
    "db",
    help="The database of what is measured and tuned.",
    sections={"Commands": [export, bring_in, query, check, backup]},
)
