"""Reads a database for the calls of a kernel: of an SQLite file in a millisecond, because SQLAlchemy is not imported."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tiledsched.core.files import kind_of_file
from tiledsched.store.limit import READ_TIMEOUT_S, Limit
from tiledsched.store.location import HEAD, VERSION_TABLE, database_file
from tiledsched.store.rows import RowReader, text_or_bytes

UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises, which quotes what it cannot read where Python cannot read the quotation."""


@contextmanager
def reading(url: str | os.PathLike[str] | None, limit_s: float | None = READ_TIMEOUT_S) -> Iterator[RowReader]:
    """A reader of the rows of the database at `url` (as for `TuningDB.open`). Its queries are of one state of the database, and
    each of them takes at most `limit_s` seconds. A warning says at the end how many rows were damaged.

    Raises:
        DatabaseError: it cannot be read.
    """
    path, limit = database_file(url), Limit(limit_s)
    connection = _connected(Path(path).absolute(), limit) if path else None
    if connection is None:
        from tiledsched.store.db import TuningDB  # imports SQLAlchemy, which takes half a second

        with TuningDB.open(url, read_only=True, limit_s=limit_s) as db, db.rows() as (_, rows):
            yield rows
        return

    def run(query: str, words: Mapping[str, Any]) -> Any:
        limit.begin()
        return connection.execute(query, words)

    try:
        with closing(connection), limit.explaining():
            rows = RowReader(run, path)
            yield rows
            rows.warn()
    except UNREADABLE as error:
        import sqlalchemy as sa

        from tiledsched.store.engine import explained, resolve_url

        with explained(resolve_url(url)):
            if isinstance(error, sqlite3.Error):
                raise sa.exc.DatabaseError("", None, error) from error
            raise


def _connected(file: Path, limit: Limit) -> sqlite3.Connection | None:
    """A connection that began to read a file; None where that holds no database of this program's schema."""
    sealed = not os.access(file.parent, os.W_OK) and not os.path.exists(f"{file}-wal")
    options = "immutable=1" if sealed else "mode=ro"
    try:
        if kind_of_file(file) != "file":  # SQLite waits for ever for whoever writes to a pipe
            return None
        connection = sqlite3.connect(
            f"{file.as_uri()}?{options}", uri=True, timeout=READ_TIMEOUT_S, isolation_level=None
        )
    except (*UNREADABLE, OSError):
        return None
    try:
        connection.text_factory = text_or_bytes
        limit.watch(connection)
        limit.begin()
        connection.execute("BEGIN")
        if connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [(HEAD,)]:
            return connection
    except UNREADABLE:
        pass
    connection.close()
    return None
