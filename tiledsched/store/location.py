"""Where the database is, told without SQLAlchemy: a process that only reads what ships needs to know that there is none."""

from __future__ import annotations

import os
from pathlib import Path


def location(url: str | os.PathLike[str] | None) -> str:
    """`url`, or TILEDSCHED_DB, or `tuning.db` in the user data directory, as text."""
    text = os.fspath(url) if url is not None else os.environ.get("TILEDSCHED_DB", "")
    if text:
        return text
    from tiledsched.core.files import user_folder

    return str(user_folder("data") / "tuning.db")


def site_location(site: str | None) -> str | None:
    """`site`, or `tuning.db` in the first of the machine's shared data directories that has one."""
    if site:
        return site
    import platformdirs

    folders = platformdirs.site_data_dir("tiledsched", multipath=True).split(os.pathsep)
    return next((text for folder in folders if os.path.isfile(text := os.path.join(folder, "tuning.db"))), None)


def database_exists(url: str | os.PathLike[str] | None) -> bool:
    """Whether there may be a database at `url` (as for `TuningDB.open`): a missing SQLite file is a plain no."""
    text = location(url)
    if text != ":memory:" and "://" not in text:
        return Path(text).expanduser().exists()  # a folder, say, is for `open` to explain
    from tiledsched.store.engine import resolve_url

    where = resolve_url(url)
    if where.get_backend_name() != "sqlite" or not where.database:
        return where.get_backend_name() != "sqlite"
    return Path(where.database).exists()
