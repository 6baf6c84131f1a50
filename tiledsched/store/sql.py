"""SQL queries of the user's own. A query cannot change anything, run for ever, or reach another file.

In SQLite, a file is opened to be read, statements other than SELECT are refused as they are compiled, and a query that does not
heed its time limit is left behind. On PostgreSQL, a query runs in a transaction that is rolled back and may only read, and only
for a role that can neither reach files or programs of the server nor become one that can.
"""

from __future__ import annotations

import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import sqlalchemy as sa

from tiledsched.core.errors import DatabaseError
from tiledsched.store.db import TuningDB

MAY = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
"""What a statement may do in SQLite. Anything else, such as ATTACH and PRAGMA, is refused before it runs."""
STEPS = 1_000
"""Steps of SQLite's virtual machine between two looks at the clock."""
LONGEST = 64 * 2**20
"""Bytes of one value that a query of SQLite may make, where Python can say so (3.11 and later)."""
GRACE_S = 1.0
"""How long after its time limit a query of SQLite may end by itself. A single function may compute for hours between two looks
at the clock."""
BATCH = 256
"""Rows that are read at a time."""
REACHING = """
SELECT rolname FROM pg_roles WHERE pg_has_role(session_user, oid, 'MEMBER') AND (
    rolsuper OR rolname IN ('pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program'))
UNION ALL
SELECT proname FROM pg_proc WHERE has_function_privilege(session_user, oid, 'EXECUTE') AND proname ~
    '^(pg_read_file|pg_read_binary_file|pg_ls_dir|pg_stat_file|pg_file_.*|lo_import|lo_export|dblink.*)$'
LIMIT 1
"""
"""Selects a role or a function by which the user of a PostgreSQL server reaches its files or programs, or other servers."""
Answer = tuple[Any, Iterator[tuple[Any, ...]]]
"""The driver's description of the columns, None where there are none; and the rows."""


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
    run = _run_in_postgresql if db.url.startswith("postgresql") else _run_in_sqlite
    try:
        with run(db, sql, timeout_s) as (description, rows):
            if description is None:
                raise DatabaseError("the statement returns no rows; write one SELECT")
            yield [str(column[0]) for column in description], rows
    except (sqlite3.Error, sqlite3.Warning, TimeoutError) as error:
        raise DatabaseError(_explained(db, str(error), timeout_s)) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] != "psycopg":
            raise
        raise DatabaseError(_explained(db, str(error).partition("\n")[0], timeout_s)) from error


@contextmanager
def _run_in_sqlite(db: TuningDB, sql: str, timeout_s: float) -> Iterator[Answer]:
    """Run the statement in a thread with a connection of its own, which is left behind where it does not end in time.

    SQLite looks at the clock between two steps. Nothing ends a single function that computes for long.
    """
    ends = time.monotonic() + timeout_s
    wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            with closing(db.connect()) as driver:
                if sys.version_info >= (3, 11):
                    driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
                driver.set_authorizer(lambda action, *more: sqlite3.SQLITE_OK if action in MAY else sqlite3.SQLITE_DENY)
                driver.set_progress_handler(lambda: time.monotonic() > ends, STEPS)
                cursor = driver.execute(sql)
                found.put(cursor.description)
                while wanted.get():
                    found.put(cursor.fetchmany(BATCH))
        except Exception as error:
            found.put(error)

    def take() -> Any:
        try:
            value = found.get(timeout=max(0.0, ends - time.monotonic()) + GRACE_S)
        except queue.Empty:
            raise TimeoutError("interrupted") from None
        if isinstance(value, Exception):
            raise value
        return value

    def rows() -> Iterator[tuple[Any, ...]]:
        wanted.put(True)
        while batch := take():
            wanted.put(True)
            yield from batch

    threading.Thread(target=work, daemon=True).start()
    try:
        yield take(), rows()
    finally:
        wanted.put(False)


@contextmanager
def _run_in_postgresql(db: TuningDB, sql: str, timeout_s: float) -> Iterator[Answer]:
    with db.reading() as session:
        driver: Any = session.connection().connection.driver_connection
        reaching = driver.execute(REACHING).fetchone()
        if reaching is not None:
            raise DatabaseError(
                f"the user of {db.url} may use {reaching[0]}, by which a query could reach files, programs or other servers; "
                "name a user in the URL who may only read these tables (docs/database.md shows how to make one)"
            )
        driver.execute("SET TRANSACTION READ ONLY")
        driver.execute(f"SET LOCAL statement_timeout = {max(1, round(timeout_s * 1000))}")
        with driver.cursor() as cursor:
            # A prepared statement is a single one, so that none ends the transaction and goes on.
            cursor.execute(sql, prepare=True)
            yield cursor.description, iter(cursor)


def _explained(db: TuningDB, text: str, timeout_s: float) -> str:
    lower = text.lower()
    if "interrupted" in lower or "statement timeout" in lower:
        return f"no answer after {timeout_s:g} s; ask for less, or give it longer with --timeout"
    if "not authorized" in lower or "prohibited" in lower or "read-only transaction" in lower:
        return f"{text}; a query reads and changes nothing: write one SELECT"
    if "too big" in lower:
        return f"{text}; a value of a query may have {LONGEST // 2**20} MiB: ask for less"
    if "no such table" in lower or "does not exist" in lower or "no such column" in lower:
        return f"{text}; there are {', '.join(tables(db))} (docs/database.md says what is in them)"
    return f"{text}; write one SELECT that the database understands"


def tables(db: TuningDB) -> list[str]:
    """The names of the tables and views."""
    with db.reading() as session:
        found = sa.inspect(session.connection())
        return sorted([*found.get_table_names(), *found.get_view_names()])
