"""Questions of one's own in SQL, which can change nothing, take up the machine for ever, or reach another file."""

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
"""What a statement may do in SQLite; all else, ATTACH and PRAGMA among it, is refused before it runs."""
STEPS = 10_000
"""Of SQLite's machine between two looks at the clock."""


@contextmanager
def ask(db: TuningDB, sql: str, timeout_s: float = 60.0) -> Iterator[tuple[list[str], Iterator[tuple[Any, ...]]]]:
    """The answer to one SQL statement: names of the columns, and the rows as they come. They are there until the block ends.

    Args:
        db: opened to be read.
        sql: one statement that reads.
        timeout_s: after which it is given up.

    Raises:
        DatabaseError: it is no SQL, asks for what is not there, would change something, or takes too long.
    """
    with db.reading() as session:
        driver: Any = session.connection().connection.driver_connection
        tell = _asked_sqlite if isinstance(driver, sqlite3.Connection) else _asked_postgresql
        try:
            with tell(driver, sql, timeout_s) as cursor:
                if cursor.description is None:
                    raise DatabaseError("that is no question: it returns no rows; write one SELECT")
                yield [str(column[0]) for column in cursor.description], iter(cursor)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise DatabaseError(_said(db, str(error), timeout_s)) from error
        except Exception as error:
            if type(error).__module__.split(".")[0] != "psycopg":
                raise
            raise DatabaseError(_said(db, str(error).partition("\n")[0], timeout_s)) from error


@contextmanager
def _asked_sqlite(driver: sqlite3.Connection, sql: str, timeout_s: float) -> Iterator[Any]:
    ends = time.monotonic() + timeout_s
    driver.set_authorizer(lambda action, *more: sqlite3.SQLITE_OK if action in MAY else sqlite3.SQLITE_DENY)
    driver.set_progress_handler(lambda: time.monotonic() > ends, STEPS)
    try:
        yield driver.execute(sql)
    finally:
        driver.set_authorizer(None)
        driver.set_progress_handler(None, 0)


@contextmanager
def _asked_postgresql(driver: Any, sql: str, timeout_s: float) -> Iterator[Any]:
    driver.execute("SET TRANSACTION READ ONLY")
    driver.execute(f"SET LOCAL statement_timeout = {max(1, round(timeout_s * 1000))}")
    with driver.cursor() as cursor:
        yield cursor.execute(
            sql, prepare=True
        )  # what is prepared is one statement: none may end the transaction and go on


def _said(db: TuningDB, text: str, timeout_s: float) -> str:
    said = text.lower()
    if "interrupted" in said or "statement timeout" in said:
        return f"no answer after {timeout_s:g} s; ask for less, or give it longer with --timeout"
    if "not authorized" in said or "prohibited" in said or "read-only transaction" in said:
        return f"{text}; a query reads and changes nothing: write one SELECT"
    if "no such table" in said or "does not exist" in said or "no such column" in said:
        return f"{text}; there are {', '.join(tables(db))} (docs/database.md says what is in them)"
    return f"{text}; write one SELECT in the words of the database"


def tables(db: TuningDB) -> list[str]:
    """Names of tables and views."""
    with db.reading() as session:
        found = sa.inspect(session.connection())
        return sorted([*found.get_table_names(), *found.get_view_names()])
