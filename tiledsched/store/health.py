"""Checks whether a database is sound. Everything is read once, a few rows at a time, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.orm import Session

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DatabaseError
from tiledsched.measure.estimate import Timing
from tiledsched.store.codec import REMEMBERED, decode, untrue_estimates
from tiledsched.store.models import (
    Base,
    DeviceRow,
    EntryRow,
    MeasurementRow,
    ProblemRow,
    Record,
    ScheduleRow,
    ToolchainRow,
)
from tiledsched.store.records import PROVENANCES

UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError)
"""What reading a column raises that holds no JSON or no time."""
AT_ONCE = 500
"""Rows that are read at once."""
ESTIMATE = ("median_us", "ci_low_us", "ci_high_us", "sample_count")
"""Columns that samples decide."""


def problems_found(session: Session) -> list[str]:
    """One line for each thing that is wrong with the database; empty where it is sound."""
    found = _read(session, _tables)
    if found:
        return found
    for part in (_file, _columns, _contents, _entries):
        found += [line for line in _read(session, part) if line not in found]
    return found


def _read(session: Session, part: Callable[[Session], Iterable[str]]) -> list[str]:
    """What one check finds, and one line more where the check cannot read to the end."""
    found = []
    try:
        found += part(session)
    except (sa.exc.DatabaseError, *UNREADABLE) as error:
        session.rollback()
        words = error.orig if isinstance(error, sa.exc.DatabaseError) else f"{type(error).__name__}: {error}"
        found.append(f"cannot be read to its end: {words}; restore a copy")
    return found


def _rows(session: Session, statement: sa.Select) -> Iterator[Any]:
    """The rows of a statement, of which few are in memory at a time."""
    yield from session.connection().execute(statement, execution_options={"yield_per": AT_ONCE})


def _tables(session: Session) -> list[str]:
    there = set(sa.inspect(session.connection()).get_table_names())
    return [f"table {name} is missing; restore a copy" for name in Base.metadata.tables if name not in there]


def _file(session: Session) -> Iterator[str]:
    if session.get_bind().dialect.name != "sqlite":
        return  # PostgreSQL checks its own files, and enforces references
    driver: Any = session.connection().connection.driver_connection
    # SQLite checks a whole table between two looks of the progress handler. This thread waits, and heeds signals meanwhile.
    with ThreadPoolExecutor(1) as other:
        lines = other.submit(lambda: driver.execute("PRAGMA integrity_check").fetchall())
        try:
            yield from (str(line) for (line,) in lines.result() if line != "ok")
        finally:
            driver.interrupt()
    for table, row, parent, _ in session.execute(sa.text("PRAGMA foreign_key_check")):
        yield f"{table} row {row} points at a row of {parent} that is not there"


def _columns(session: Session) -> Iterator[str]:
    """The values that are no JSON, or not the JSON of the record that their column holds; and the measurements whose median or
    interval is not that of their samples.
    """
    for table in Base.metadata.sorted_tables:
        columns = [each for each in table.columns if isinstance(each.type, (sa.JSON, Record))]
        if not columns:
            continue
        measured = table is MeasurementRow.__table__
        timing = [table.c[name] for name in ESTIMATE] if measured else []
        key = next(iter(table.primary_key.columns))
        texts = (sa.cast(each, sa.Text) for each in columns)
        for row, *values in _rows(session, select(key, *timing, *texts)):
            for column, text in zip(columns, values[len(timing) :], strict=True):
                if measured and column.name == "samples_us" and (samples := _samples(text)) is not None:
                    estimate = dict(zip(ESTIMATE, values, strict=False))
                    count = estimate.pop("sample_count")
                    lines = untrue_estimates(Timing(**estimate), samples, count)
                    yield from (f"measurement {row}: {wrong}" for wrong in lines)
                elif text is not None and (wrong := _unreadable(column.type, text)):
                    yield f"{table.name} {row}: its {column.name} {wrong}"


_READ_SAMPLES = msgspec.json.Decoder(tuple[float, ...])


def _samples(text: str) -> tuple[float, ...] | None:
    """The samples that are written in a column; None where it holds anything else."""
    try:
        return _READ_SAMPLES.decode(text)
    except (msgspec.MsgspecError, TypeError):
        return None


@lru_cache(maxsize=REMEMBERED)  # measurements share their conditions
def _unreadable(kind: sa.types.TypeEngine[Any], text: str) -> str:
    """Why a text is not what a column of this type holds; empty where it is."""
    try:
        data = json.loads(text)
        if isinstance(kind, Record):
            decode(kind.kind, data, kind.column)
    except ValueError:
        return "is no JSON"
    except DatabaseError as error:
        return f"cannot be read: {error}"
    return ""


def _contents(session: Session) -> Iterator[str]:
    """The rows whose id is not the hash of their contents: somebody else changed them."""
    problem = sa.type_coerce(ProblemRow.dims, sa.JSON)
    contents = {
        "schedule": select(ScheduleRow.id, sa.type_coerce(ScheduleRow.knobs, sa.JSON)),
        "device": select(DeviceRow.id, sa.type_coerce(DeviceRow.device, sa.JSON)),
        "problem": select(ProblemRow.id, problem, ProblemRow.kernel),
    }
    for what, rows in contents.items():
        for identity, values, *kernel in _rows(session, rows):
            if stable_id({"kernel": kernel[0], **values} if kernel else values) != identity:
                yield f"{what} {identity} does not hold the values its id stands for"


def _entries(session: Session) -> Iterator[str]:
    """The entries that are not what their measurement and their toolchain say. References are checked by the database."""
    shared = [EntryRow.arch, EntryRow.problem_id, EntryRow.schedule_id, EntryRow.fingerprint]
    measured_by = [getattr(MeasurementRow, each.key) for each in shared]
    wanted = (
        select(EntryRow.id, EntryRow.kernel, EntryRow.compiler, EntryRow.provenance, ToolchainRow.tileiras)
        .add_columns(MeasurementRow.id, *shared, *measured_by)
        .outerjoin(MeasurementRow, MeasurementRow.id == EntryRow.measurement_id)
        .outerjoin(ToolchainRow, ToolchainRow.id == EntryRow.toolchain_id)
    )
    for number, kernel, compiler, provenance, toolchain, measurement_id, *values in _rows(session, wanted):
        wrong = []
        if compiler != (toolchain or ""):
            wrong.append(f"it is kept for compiler {compiler!r}, and its toolchain is of {toolchain!r}")
        if provenance not in PROVENANCES:
            wrong.append(f"unknown provenance {provenance!r}")
        own, measured = values[: len(shared)], values[len(shared) :]
        if provenance == "measured" and measurement_id is None:
            wrong.append("measured, but without a measurement")
        elif provenance == "measured":
            for column, mine, its in zip(shared, own, measured, strict=True):
                if mine != its:
                    wrong.append(f"its measurement {measurement_id} is of another {column.key.removesuffix('_id')}")
        yield from (f"entry {number} ({kernel}, {own[0]}, problem {own[1]}): {line}" for line in wrong)
