"""Where the database is. SQLAlchemy is not imported: a process that only reads what ships learns here that there is none."""

from __future__ import annotations

import os

from tiledsched.core.files import kind_of_file, user_folder
from tiledsched.core.trust import sqlite_path

TABLES = (".json", ".json.xz")
"""Endings of the names of table files."""
HEAD = "0001"
"""Newest schema revision, the last file in `tuning_db/migrations/versions`. A constant, so that opening a database
that is up to date reads no migration."""
VERSION_TABLE = "tiledsched_schema"


def location(url: str | os.PathLike[str] | None) -> str:
    """`url`, or TILEDSCHED_DB, or `tuning.db` in the user data directory, as text."""
    text = os.fspath(url) if url is not None else os.environ.get("TILEDSCHED_DB", "")
    if text:
        return text
    return str(user_folder("data") / "tuning.db")


def site_location(site: str | None) -> str | None:
    """`site`, or `tuning.db` in the first of the machine's shared data directories that has one; None where none has."""
    if site:
        return site
    import platformdirs

    folders = platformdirs.site_data_dir("tiledsched", multipath=True).split(os.pathsep)
    return next((text for folder in folders if os.path.isfile(text := os.path.join(folder, "tuning.db"))), None)


def database_file(url: str | os.PathLike[str] | None) -> str:
    """The path of the SQLite file at `url` (as for `TuningDB.open`); empty for a database on a server or in memory."""
    scheme, found, path = location(url).rpartition("://")
    if found:
        path = sqlite_path(path) if scheme.startswith("sqlite") else ""
    return "" if path == ":memory:" else os.path.expanduser(path)


def database_exists(url: str | os.PathLike[str] | None) -> bool:
    """Whether there may be a database at `url` (as for `TuningDB.open`): of an SQLite file whether it is there, else true."""
    scheme, found, _ = location(url).rpartition("://")
    if found and not scheme.startswith("sqlite"):
        return True
    path = database_file(url)
    if not path:
        return False
    try:
        return bool(kind_of_file(path))
    except OSError:  # `open` says why, as it does of what is no file
        return True
