"""Checks whether a database is sound. Everything is read once, and nothing is changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.orm import Session

from tiledsched.core.canonical import stable_id
from tiledsched.store.codec import untrue_estimates
from tiledsched.store.models import Base, EntryRow, MeasurementRow, ToolchainRow
from tiledsched.store.reading import rows_of
from tiledsched.store.rows import TABLES, read_json, read_new_json, row_type

OF_MEASUREMENT = ("arch", "problem_id", "schedule_id", "fingerprint")
"""What an entry shares with its measurement."""
UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError)
"""What reading a column raises that holds no JSON or no time."""


def problems_found(session: Session) -> list[str]:
    """One line for each thing that is wrong with the database; empty where it is sound."""
    found = _read(session, _tables)
    if found:
        return found
    for part in (_file, _rows, _entries):
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
    driver: Any = session.connection().connection.driver_connection
    # SQLite checks a whole table between two looks of the progress handler. This thread waits, and heeds signals meanwhile.
    with ThreadPoolExecutor(1) as other:
        lines = other.submit(lambda: driver.execute("PRAGMA integrity_check").fetchall())
        try:
            found = [str(line) for (line,) in lines.result() if line != "ok"]
        except sqlite3.Error as error:
            raise sa.exc.DatabaseError("", None, error) from error
        except BaseException:
            driver.interrupt()
            raise
    for table, row, parent, number in session.execute(sa.text("PRAGMA foreign_key_check")):
        keys = session.execute(sa.text(f"PRAGMA foreign_key_list({table})")).all()
        names = " and ".join(key[3] for key in keys if key[0] == number)
        found.append(f"{table} {row}: its {names} names a row of {parent} that is not there")
    return found


def _rows(session: Session) -> list[str]:
    """The rows that are read nowhere, because a value is not what its column holds, and those that are not what they say."""
    rows = rows_of(session, "", at_once=False)
    found: list[str] = []
    for table in TABLES:
        for lines in rows.make(table, rows.read(table, {}, ""), partial(_wrong, table)):
            found += lines
    return [*(f"{table} {row}: its {why}" for (table, row), why in rows.skipped.items()), *found]


def _wrong(table: str, row: Any) -> list[str]:
    """What is wrong with a row whose values have their types. Raises DatabaseError for JSON of something else."""
    values = {
        name: (read_new_json if name in ("samples_us", "accuracy") else read_json)(kind, getattr(row, name), name)
        for name, kind in row_type(table).json.items()
    }
    look = _LOOKS.get(table)
    return [f"{table} {row[0]}: {line}" for line in look(row, values)] if look else []


def _contents(row: Any, values: Mapping[str, Any]) -> list[str]:
    """Whether a row's id is the hash of its contents: else somebody else changed them."""
    contents = msgspec.json.decode(row[-1])
    if hasattr(row, "kernel"):
        contents |= {"kernel": row.kernel}
    ids = stable_id(contents), stable_id(dict(each for each in contents.items() if each != ("pdl", 0)))  # of schedules
    return [] if row.id in ids else ["it does not hold the values its id stands for"]


def _estimates(row: Any, values: Mapping[str, Any]) -> list[str]:
    """Whether a measurement's median and interval are those of its samples."""
    return untrue_estimates(row, values["samples_us"], row.sample_count)


_LOOKS: Mapping[str, Callable[[Any, Mapping[str, Any]], list[str]]] = {
    "schedules": _contents,
    "devices": _contents,
    "problems": _contents,
    "measurements": _estimates,
}
"""What is looked at in the rows of a table whose values are sound."""


def _entries(session: Session) -> list[str]:
    """The entries that are not what their measurement and their toolchain say. References are checked by the database."""
    measured = [getattr(MeasurementRow, name).label(f"its_{name}") for name in OF_MEASUREMENT]
    wanted = (
        select(EntryRow.id, EntryRow.kernel, EntryRow.compiler, EntryRow.provenance, ToolchainRow.tileiras)
        .add_columns(
            *(getattr(EntryRow, name) for name in OF_MEASUREMENT), MeasurementRow.id.label("number"), *measured
        )
        .outerjoin(MeasurementRow, MeasurementRow.id == EntryRow.measurement_id)
        .outerjoin(ToolchainRow, ToolchainRow.id == EntryRow.toolchain_id)
    )
    found = []
    for row in session.execute(wanted):
        wrong = []
        if row.compiler != (row.tileiras or ""):
            wrong.append(f"it is kept for compiler {row.compiler!r}, and its toolchain is of {row.tileiras!r}")
        if row.provenance == "measured" and row.number is None:
            wrong.append("measured, but without a measurement")
        elif row.provenance == "measured":
            for name in OF_MEASUREMENT:
                if getattr(row, name) != getattr(row, f"its_{name}"):
                    wrong.append(f"its measurement {row.number} is of another {name.removesuffix('_id')}")
        found += [f"entries {row.id} ({row.kernel}, {row.arch}, problem {row.problem_id}): {line}" for line in wrong]
    return found
