"""Checks whether a database is sound. Everything is read once, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.orm import Session

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DatabaseError
from tiledsched.store.models import (
    ArtifactRow,
    Base,
    DeviceRow,
    EntryRow,
    MeasurementRow,
    ProblemRow,
    ScheduleRow,
    ToolchainRow,
)
from tiledsched.store.reading import read_rivals
from tiledsched.store.records import PROVENANCES
from tiledsched.store.validation import untrue_estimates


def problems_found(session: Session) -> list[str]:
    """One line for each thing that is wrong with the database; empty where it is sound."""
    found = _read(session, _tables)
    if found:
        return found
    for part in (_file, _columns, _contents, _measurements, _entries):
        found += [line for line in _read(session, part) if line not in found]
    return found


def _read(session: Session, part: Callable[[Session], list[str]]) -> list[str]:
    """What one check finds, or one line where the check cannot read to the end."""
    try:
        return part(session)
    except sa.exc.DatabaseError as error:
        session.rollback()
        return [f"cannot be read to its end: {error.orig}; restore a copy"]
    except (
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        OverflowError,
    ) as error:  # a column holds no JSON or no time
        session.rollback()
        return [f"cannot be read to its end: {type(error).__name__}: {error}; restore a copy"]


def _tables(session: Session) -> list[str]:
    there = set(sa.inspect(session.connection()).get_table_names())
    return [f"table {name} is missing; restore a copy" for name in Base.metadata.tables if name not in there]


def _file(session: Session) -> list[str]:
    if session.get_bind().dialect.name != "sqlite":
        return []  # PostgreSQL checks its own files, and enforces references
    found = [str(line) for line in session.scalars(sa.text("PRAGMA integrity_check")) if line != "ok"]
    for table, row, parent, _ in session.execute(sa.text("PRAGMA foreign_key_check")):
        found.append(f"{table} row {row} points at a row of {parent} that is not there")
    return found


def _columns(session: Session) -> list[str]:
    """The rows that hold text that is not JSON, which PostgreSQL does not accept."""
    if session.get_bind().dialect.name != "sqlite":
        return []
    found = []
    for table in Base.metadata.sorted_tables:
        key = next(iter(table.primary_key.columns))
        for column in table.columns:
            if isinstance(column.type, sa.JSON):
                broken = select(key).where(column.isnot(sa.null()), sa.func.json_valid(column) == 0)
                found += [f"{table.name} {row}: its {column.name} is no JSON" for row in session.scalars(broken)]
    return found


def _contents(session: Session) -> list[str]:
    """The rows whose id is not the hash of their contents: somebody else changed them."""
    found = []
    for schedule in session.scalars(select(ScheduleRow)):
        if stable_id(schedule.knobs) != schedule.id:
            found.append(f"schedule {schedule.id} does not hold the knobs its id stands for")
    for problem in session.scalars(select(ProblemRow)):
        if stable_id({"kernel": problem.kernel, **problem.dims}) != problem.id:
            found.append(f"problem {problem.id} does not hold the values its id stands for")
    for device in session.scalars(select(DeviceRow)):
        if stable_id(device.device) != device.id:
            found.append(f"device {device.id} ({device.name}) does not hold the facts its id stands for")
    return found


def _measurements(session: Session) -> list[str]:
    """The measurements whose median or interval is not that of their samples."""
    found = []
    columns = (
        MeasurementRow.id,
        MeasurementRow.median_us,
        MeasurementRow.ci_low_us,
        MeasurementRow.ci_high_us,
        MeasurementRow.samples_us,
        MeasurementRow.sample_count,
    )
    for number, median, low, high, samples, count in session.execute(select(*columns)):
        for wrong in untrue_estimates(median, low, high, samples, count):
            found.append(f"measurement {number}: {wrong}")
    return found


def _entries(session: Session) -> list[str]:
    wanted = (
        select(EntryRow, ProblemRow.id, ScheduleRow.id, MeasurementRow, ArtifactRow.fingerprint, ToolchainRow.tileiras)
        .outerjoin(ProblemRow, ProblemRow.id == EntryRow.problem_id)
        .outerjoin(ScheduleRow, ScheduleRow.id == EntryRow.schedule_id)
        .outerjoin(MeasurementRow, MeasurementRow.id == EntryRow.measurement_id)
        .outerjoin(ArtifactRow, (ArtifactRow.arch == EntryRow.arch) & (ArtifactRow.fingerprint == EntryRow.fingerprint))
        .outerjoin(ToolchainRow, ToolchainRow.id == EntryRow.toolchain_id)
    )
    found = []
    for row in session.execute(wanted):
        entry = row[0]
        for wrong in _entry(*row):
            found.append(f"entry {entry.id} ({entry.kernel}, {entry.arch}, problem {entry.problem_id}): {wrong}")
    return found


def _entry(
    entry: EntryRow,
    problem: Any,
    schedule: Any,
    measurement: MeasurementRow | None,
    artifact: Any,
    compiler: str | None,
) -> list[str]:
    wrong = []
    if problem is None:
        wrong.append("its problem is missing")
    if schedule is None:
        wrong.append("its schedule is missing")
    try:
        read_rivals(entry.rivals)
    except (DatabaseError, TypeError) as error:
        wrong.append(f"what its rivals took cannot be read: {error}")
    if entry.fingerprint is not None and artifact is None:
        wrong.append(f"its artifact {entry.fingerprint} is missing")
    if entry.compiler != (compiler or ""):
        wrong.append(f"it is kept for compiler {entry.compiler!r}, and its toolchain is of {compiler!r}")
    if entry.provenance not in PROVENANCES:
        wrong.append(f"unknown provenance {entry.provenance!r}")
    if entry.measurement_id is not None and measurement is None:
        wrong.append(f"its measurement {entry.measurement_id} is missing")
    elif entry.provenance == "measured" and measurement is None:
        wrong.append("measured, but without a measurement")
    elif entry.provenance == "measured" and measurement is not None:
        for name in ("arch", "problem_id", "schedule_id", "fingerprint"):
            if getattr(measurement, name) != getattr(entry, name):
                wrong.append(f"its measurement {measurement.id} is of another {name.removesuffix('_id')}")
    return wrong
