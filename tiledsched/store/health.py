"""Checks whether a database is sound. Everything is read once, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DatabaseError
from tiledsched.store.codec import decode, untrue_estimates
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
    except (sa.exc.DatabaseError, *UNREADABLE) as error:
        session.rollback()
        words = error.orig if isinstance(error, sa.exc.DatabaseError) else f"{type(error).__name__}: {error}"
        return [f"cannot be read to its end: {words}; restore a copy"]


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
    """The values that are no JSON, or not the JSON of the record that their column holds."""
    found = []
    for table in Base.metadata.sorted_tables:
        key = next(iter(table.primary_key.columns))
        for column in table.columns:
            if isinstance(column.type, (sa.JSON, Record)):
                texts = select(key, sa.cast(column, sa.Text)).where(column.isnot(sa.null()))
                for row, text in session.execute(texts):
                    wrong = _unreadable(column.type, text)
                    found += [f"{table.name} {row}: its {column.name} {wrong}"] if wrong else []
    return found


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


def _contents(session: Session) -> list[str]:
    """The rows whose id is not the hash of their contents: somebody else changed them."""
    problem = sa.type_coerce(ProblemRow.dims, sa.JSON)
    contents = {
        "schedule": select(ScheduleRow.id, sa.type_coerce(ScheduleRow.knobs, sa.JSON)),
        "device": select(DeviceRow.id, sa.type_coerce(DeviceRow.device, sa.JSON)),
        "problem": select(ProblemRow.id, problem, ProblemRow.kernel),
    }
    found = []
    for what, rows in contents.items():
        for identity, values, *kernel in session.execute(rows):
            if stable_id({"kernel": kernel[0], **values} if kernel else values) != identity:
                found.append(f"{what} {identity} does not hold the values its id stands for")
    return found


def _measurements(session: Session) -> list[str]:
    """The measurements whose median or interval is not that of their samples."""
    samples_us = sa.type_coerce(MeasurementRow.samples_us, sa.JSON)
    found = []
    for number, timing, samples, count in session.execute(
        select(MeasurementRow.id, MeasurementRow.timing, samples_us, MeasurementRow.sample_count)
    ):
        for wrong in untrue_estimates(timing, samples, count):
            found.append(f"measurement {number}: {wrong}")
    return found


def _entries(session: Session) -> list[str]:
    """The entries that are not what their measurement and their toolchain say. References are checked by the database."""
    columns = MeasurementRow.arch, MeasurementRow.problem_id, MeasurementRow.schedule_id, MeasurementRow.fingerprint
    wanted = (
        select(EntryRow, ToolchainRow.tileiras, MeasurementRow.id, *columns)
        .outerjoin(MeasurementRow, MeasurementRow.id == EntryRow.measurement_id)
        .outerjoin(ToolchainRow, ToolchainRow.id == EntryRow.toolchain_id)
        .options(defer(EntryRow.rivals), defer(EntryRow.ties))
    )
    found = []
    for entry, compiler, measurement_id, *measured in session.execute(wanted):
        wrong = []
        if entry.compiler != (compiler or ""):
            wrong.append(f"it is kept for compiler {entry.compiler!r}, and its toolchain is of {compiler!r}")
        if entry.provenance not in PROVENANCES:
            wrong.append(f"unknown provenance {entry.provenance!r}")
        if entry.provenance == "measured" and measurement_id is None:
            wrong.append("measured, but without a measurement")
        elif entry.provenance == "measured":
            for column, value in zip(columns, measured, strict=True):
                if getattr(entry, column.key) != value:
                    wrong.append(f"its measurement {measurement_id} is of another {column.key.removesuffix('_id')}")
        name = f"entry {entry.id} ({entry.kernel}, {entry.arch}, problem {entry.problem_id})"
        found += [f"{name}: {line}" for line in wrong]
    return found
