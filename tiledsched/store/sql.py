"""SQL queries of the user's own. A query cannot change anything, run for ever, or reach another file."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from tiledsched.core.errors import DatabaseError
from tiledsched.store.db import TuningDB

MAY = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
"""What a statement may do in SQLite. Anything else, such as ATTACH and PRAGMA, is refused before it runs."""
STEPS = 10_000
"""Steps of SQLite's virtual machine between two looks at the clock."""


@contextmanager
def run_query(db: TuningDB, sql: str, timeout_s: float = 60.0) -> Iterator[tuple[list[str], Iterator[tuple[Any, ...]]]]:
    """Run one SQL statement, and give the names of its columns and its rows. The rows can be read until the block ends.

    Args:
        db: an open database.
        sql: one statement that reads.
        timeout_s: how long the statement may run, in seconds.

    Raises:
        DatabaseError: the statement is wrong, would change something, or takes too long.
    """
    with db.reading() as session:
        driver: Any = session.connection().connection.driver_connection
        run = _run_in_sqlite if isinstance(driver, sqlite3.Connection) else _run_in_postgresql
        try:
            with run(driver, sql, timeout_s) as cursor:
                if cursor.description is None:
                    raise DatabaseError("the statement returns no rows; write one SELECT")
                yield [str(column[0]) for column in cursor.description], iter(cursor)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise DatabaseError(_explained(db, str(error), timeout_s)) from error
        except Exception as error:
            if type(error).__module__.split(".")[0] != "psycopg":
                raise
            raise DatabaseError(_explained(db, str(error).partition("\n")[0], timeout_s)) from error


@contextmanager
def _run_in_sqlite(driver: sqlite3.Connection, sql: str, timeout_s: float) -> Iterator[Any]:
    ends = time.monotonic() + timeout_s
    driver.set_authorizer(lambda action, *more: sqlite3.SQLITE_OK if action in MAY else sqlite3.SQLITE_DENY)
    driver.set_progress_handler(lambda: time.monotonic() > ends, STEPS)
    try:
        yield driver.execute(sql)
    finally:
        driver.set_authorizer(None)
        driver.set_progress_handler(None, 0)


@contextmanager
def _run_in_postgresql(driver: Any, sql: str, timeout_s: float) -> Iterator[Any]:
    driver.execute("SET TRANSACTION READ ONLY")
    driver.execute(f"SET LOCAL statement_timeout = {max(1, round(timeout_s * 1000))}")
    with driver.cursor() as cursor:
        # A prepared statement is a single one, so that none ends the transaction and goes on.
        yield cursor.execute(sql, prepare=True)


def _explained(db: TuningDB, text: str, timeout_s: float) -> str:
    lower = text.lower()
    if "interrupted" in lower or "statement timeout" in lower:
        return f"no answer after {timeout_s:g} s; ask for less, or give it longer with --timeout"
    if "not authorized" in lower or "prohibited" in lower or "read-only transaction" in lower:
        return f"{text}; a query reads and changes nothing: write one SELECT"
    if "no such table" in lower or "does not exist" in lower or "no such column" in lower:
        return f"{text}; there are {', '.join(tables(db))} (docs/database.md says what is in them)"
    return f"{text}; write one SELECT that the database understands"


def tables(db: TuningDB) -> list[str]:
    """The names of the tables and views."""
    with db.reading() as session:
        found = sa.inspect(session.connection())
        return sorted([*found.get_table_names(), *found.get_view_names()])
