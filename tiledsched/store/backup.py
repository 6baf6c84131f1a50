"""A copy of a database as it is at one moment, even while others write."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tiledsched.core.errors import DatabaseError
from tiledsched.core.files import partial_path
from tiledsched.store.db import TuningDB


def back_up(db: TuningDB, path: str | os.PathLike[str], *, replace: bool = False) -> int:
    """Copy `db` to a file that appears whole or not at all. The copy can be opened as a database.

    Returns:
        The size of the copy in bytes.

    Raises:
        DatabaseError: the file exists and `replace` is false, it cannot be written, or the database is on a server, which has
            tools of its own for backups.
    """
    target = Path(os.path.expanduser(path))
    if os.path.exists(target) and not replace:
        raise DatabaseError(f"{target} is there already; give another path, or pass --force")
    if os.path.exists(target) and not os.path.isfile(
        target
    ):  # the copy would take the place of a device, such as /dev/null
        raise DatabaseError(f"{target} is no regular file; give another path")
    partial = partial_path(target)
    with db.reading() as session:
        driver: Any = session.connection().connection.driver_connection
        if not isinstance(driver, sqlite3.Connection):
            raise DatabaseError(f"{db.url} is on a server; back it up with pg_dump")
        try:
            with closing(sqlite3.connect(partial)) as copy:
                driver.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # a single file, without a -wal that could be left behind
            os.replace(partial, target)
        except (OSError, sqlite3.Error) as error:
            raise DatabaseError(f"cannot write {target}: {error}; give another path") from error
        finally:
            for left in (partial, Path(f"{partial}-journal"), Path(f"{partial}-wal"), Path(f"{partial}-shm")):
                left.unlink(missing_ok=True)
    return target.stat().st_size
