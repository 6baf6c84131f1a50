"""Compiles what the shipped modelled tables serve, and says which programs fail or spill registers, without a GPU:
`python -m docs.studies.shipped_programs --arch sm_120,sm_121`.

Run it under each compiler that the package takes. What was built stays in the database (`TILEDSCHED_DB` and
`TILEDSCHED_CACHE`): a run that was stopped goes on, and the next one compiles only what has changed in the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docs.studies.flags import flag, parser_with
from tiledsched.core import data_files
from tiledsched.core.device import spilled
from tiledsched.core.errors import TiledschedError
from tiledsched.core.registry import load_kernel
from tiledsched.core.space_files import space_for
from tiledsched.report.document import Table, to_markdown
from tiledsched.store.evidence import for_compiler
from tiledsched.store.records import BuildRecord, Entry
from tiledsched.store.shipped import read_shipped_entries
from tiledsched.tuning.builder import Builder
from tiledsched.tuning.session import Session

BLACKWELL = "sm_100,sm_103,sm_110,sm_120,sm_121"
HEAD = (
    "arch",
    "kernel",
    "entries",
    "programs",
    "fail",
    "spill more than the limit",
    "most bytes spilled",
    "entries of those",
)


def shipped(table: Path, compiler: str) -> list[Entry]:
    """The entries of a shipped table that a compiler serves and no device measured, with the schedules that are served."""
    known = for_compiler(read_shipped_entries(table), compiler)
    entries = [each for each in known if each.provenance == "modelled"]
    space = space_for(table.stem, load_kernel(table.parent.name))
    return [each.replace(schedule=space.complete(each.schedule)) for each in entries]


def outcome(record: BuildRecord) -> str:
    """What came of a build, in words."""
    if record.failure is not None:
        return f"{record.failure.kind}: {record.failure.message}"
    return f"spills {record.facts.spill_bytes if record.facts else 0} bytes"


def told(count: int, record: BuildRecord) -> None:
    """Print what came of a build."""
    print(
        f"{record.arch} {record.kernel} {record.schedule.short()} {outcome(record)}, {record.seconds:.1f} s", flush=True
    )


def row(builder: Builder, entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """The cells of a kernel on an arch, and a line for each program that fails or spills."""
    records: dict[tuple[str, str], BuildRecord] = {}
    bad: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        record = builder.record(entry.schedule, entry.problem)
        assert record is not None, "all are built"
        records[record.key] = record
        if record.facts is None or spilled(record.facts.spill_bytes):
            bad.setdefault(record.key, []).append(entry)
    most = max((record.facts.spill_bytes for record in records.values() if record.facts), default=0)
    failed = sum(record.facts is None for record in records.values())
    counts = (len(entries), len(records), failed, len(bad) - failed, most, sum(map(len, bad.values())))
    lines = [
        f"{builder.arch} {of[0].problem} ({len(of)} entries): {of[0].schedule.short()} {outcome(records[key])}"
        for key, of in bad.items()
    ]
    return [builder.arch, builder.kernel.name, *map(str, counts)], lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, and print the table."""
    parser = parser_with(
        flag("--arch", default=BLACKWELL, help=f"archs, between commas ({BLACKWELL})"),
        flag("--jobs", type=int, default=1, help="compile processes (1)"),
        prog="python -m docs.studies.shipped_programs",
        description="what shipped modelled tables serve, compiled",
    )
    options = parser.parse_args(arguments)
    table, lines = [], []
    try:
        for arch in options.arch.split(","):
            with Session(arch, jobs=options.jobs) as session:
                for path in sorted((data_files.tuning_db() / "tables").glob(f"*/{arch}.json")):
                    entries = shipped(path, session.toolchain.tileiras)
                    builder = session.builder(load_kernel(path.parent.name))
                    builder.build_for_each(((each.schedule, each.problem) for each in entries), progress=told)
                    cells, bad = row(builder, entries)
                    table.append(cells)
                    lines += bad
                compiler = session.toolchain.compiler
    except TiledschedError as error:
        parser.exit(error.exit_code, f"{error}\n")
    print("\n".join([compiler, *lines, to_markdown([Table(head=HEAD, rows=table)])]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
