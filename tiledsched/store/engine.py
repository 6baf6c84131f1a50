"""Connects to the database and brings its schema up to date.

SQLite runs in WAL mode: readers see the last commit and never wait; a write takes the write lock at once (BEGIN
IMMEDIATE) and waits for another writer, so a transaction never fails half way. A committed transaction survives the
kill of the process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.pool import StaticPool

from tiledsched.core import data_files
from tiledsched.core.errors import DatabaseError, TiledschedError
from tiledsched.core.files import check_plain, kind_of_file
from tiledsched.store.limit import READ_TIMEOUT_S, Limit
from tiledsched.store.location import HEAD as HEAD, VERSION_TABLE as VERSION_TABLE, database_file, location
from tiledsched.store.rows import text_or_bytes

UNRELEASED_TABLE = "tiledsched_alembic_version"
"""The version table of databases from before the first release."""
BUSY_TIMEOUT_S, TURN_MS = 60, 400
"""How long a writer waits for another one that does nothing, in seconds, and after how many milliseconds it waits anew, as if it
had just come.
"""
SCHEMA_LOCK, IMPORT_LOCK = 716253, 716254
"""PostgreSQL's numbers of two locks: of who makes tables and views, and of who imports."""
MOST_NAMED = 4
"""Tables of another program that an error names."""
ELSEWHERE = "name another database with --db or TILEDSCHED_DB"


def resolve_url(url: str | os.PathLike[str] | None) -> URL:
    """`url`, or TILEDSCHED_DB, or `tuning.db` in the user data directory. A path means an SQLite file.

    Raises:
        DatabaseError: it is not a URL, or a URL of a database other than SQLite and PostgreSQL.
    """
    text = location(url)
    if "://" not in text:
        return _sqlite_url(text)
    try:
        parsed = make_url(text)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise DatabaseError(
            f"not a database URL: {error}; give a path, sqlite:///PATH or postgresql://HOST/NAME"
        ) from None
    backend = parsed.drivername.partition("+")[0]
    if backend in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg") if "+" not in parsed.drivername else parsed
    if backend != "sqlite":
        raise DatabaseError(
            f"{backend} databases are not supported; give a path, sqlite:///PATH or postgresql://HOST/NAME"
        )
    return _sqlite_url(database_file(text) or ":memory:")


def _sqlite_url(path: str) -> URL:
    return URL.create("sqlite", database=None if path == ":memory:" else os.path.abspath(os.path.expanduser(path)))


def create_engine(url: URL, *, read_only: bool, limit: Limit) -> Engine:
    """An engine for `url`. The folder of an SQLite file is made unless `read_only`. Transactions of SQLite end at `limit`.

    Raises:
        DatabaseError: there is no file to read, the folder cannot be made, or PostgreSQL's driver is missing.
    """
    if url.get_backend_name() != "sqlite":
        try:
            options = {"postgresql_readonly": True} if read_only else {}
            waits = {} if "connect_timeout" in url.query else {"connect_timeout": READ_TIMEOUT_S}
            engine = sa.create_engine(url, pool_pre_ping=True, execution_options=options, connect_args=waits)
        except ModuleNotFoundError as error:
            raise DatabaseError(f"{error}; install tiledsched[postgresql]") from error
        if limit.seconds is not None:
            end = f"SET LOCAL statement_timeout = {round(limit.seconds * 1000)}"
            event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(end))
        return engine
    if url.database is not None:
        engine = _file_engine(Path(url.database), read_only)
    elif read_only:
        raise DatabaseError("an in-memory database is empty when opened; name a file to read")
    else:
        engine = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the begin event below writes BEGIN instead of the sqlite3 module
        connection.execute(f"PRAGMA busy_timeout={round((READ_TIMEOUT_S if read_only else BUSY_TIMEOUT_S) * 1000)}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.text_factory = text_or_bytes
        limit.watch(connection)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        limit.begin()
        if connection.get_execution_options().get("immediate", False):
            _begin_writing(connection.connection.driver_connection)
        else:
            connection.exec_driver_sql("BEGIN")

    return engine


def _begin_writing(driver: Any) -> None:
    """Begin a write transaction of SQLite's driver, after those of others.

    SQLite keeps no queue: who waits looks ever more seldom whether it is his turn, so that of many writers those who came last go
    first. Here all begin to wait anew again and again, and whoever waits gives up only where nobody else writes meanwhile.
    """
    seen, since = None, time.monotonic()
    driver.execute(f"PRAGMA busy_timeout={TURN_MS}")
    while True:
        try:
            driver.execute("BEGIN IMMEDIATE")
            break
        except driver.OperationalError as error:
            with suppress(driver.OperationalError):  # locked even for readers, as while the database is being made
                if (version := driver.execute("PRAGMA data_version").fetchone()) != seen:
                    seen, since = version, time.monotonic()
            if "locked" not in str(error) or time.monotonic() - since > BUSY_TIMEOUT_S:
                raise sa.exc.OperationalError("BEGIN IMMEDIATE", None, error) from error
    driver.execute(f"PRAGMA busy_timeout={round(BUSY_TIMEOUT_S * 1000)}")


def _file_engine(path: Path, read_only: bool) -> Engine:
    try:
        kind = kind_of_file(path)
        if read_only and not kind:
            raise DatabaseError(f"there is no database at {path}; run `tiledsched tune` first, or {ELSEWHERE}")
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file" and not _may_be_sqlite(path):  # SQLite would take a file PATH-wal for its own, and remove it
            raise DatabaseError(_explain(URL.create("sqlite", database=str(path)), "file is not a database"))
    except OSError as error:
        raise DatabaseError(f"cannot use {path}: {error.strerror}; {ELSEWHERE}") from error
    if kind not in ("", "file"):  # SQLite waits for ever for whoever writes to a pipe, and heeds no signal
        raise DatabaseError(f"{path} is {'a folder' if kind == 'folder' else 'no regular file'}; {ELSEWHERE}")
    query = {"mode": "rwc"}
    if read_only:
        # A WAL database needs its -shm file, which cannot be made in a folder that is read-only (an installed one).
        sealed = not os.access(path.parent, os.W_OK) and not os.path.exists(f"{path}-wal")
        query = {"immutable": "1"} if sealed else {"mode": "ro"}
    url = URL.create("sqlite", database=path.as_uri(), query={**query, "uri": "true"})
    return sa.create_engine(url, connect_args={"check_same_thread": False})


def _may_be_sqlite(path: Path) -> bool:
    """Whether a file begins as those of SQLite do, or is empty, as a new one is."""
    with path.open("rb") as file:
        return file.read(16) in (b"", b"SQLite format 3\0")


@contextmanager
def explained(url: URL, *damage: type[Exception]) -> Iterator[None]:
    """Turn the driver's errors into DatabaseError that says what to do next.

    Args:
        url: the database's.
        damage: further exceptions that mean that what is stored is damaged.
    """
    try:
        yield
    except sa.exc.DBAPIError as error:
        raise DatabaseError(_explain(url, str(error.orig).strip())) from error
    except json.JSONDecodeError as error:
        raise DatabaseError(_explain(url, f"malformed JSON ({error})")) from error
    except UnicodeDecodeError as error:  # SQLite quotes what it cannot read, and Python cannot read the quotation
        raise DatabaseError(_explain(url, "malformed text")) from error
    except TiledschedError:  # it explains itself
        raise
    except sa.exc.SQLAlchemyError as error:  # such as of one row, where there is none
        raise DatabaseError(_explain(url, f"malformed contents ({error})")) from error
    except damage as error:
        raise DatabaseError(_explain(url, f"malformed contents ({type(error).__name__}: {error})")) from error


def _explain(url: URL, message: str) -> str:
    name = url.database if url.get_backend_name() == "sqlite" else url.render_as_string()
    advice = {
        "file is not a database": f"it is not an SQLite file; {ELSEWHERE}",
        "interrupted": f"a query did not end in time; {ELSEWHERE}",
        "statement timeout": f"a query did not end in time; {ELSEWHERE}",
        "unable to open": f"check that its folder exists and that you may read it, or {ELSEWHERE}",
        "readonly database": f"it may only be read; make it writable, or {ELSEWHERE}",
        "locked": "another process is writing, or stopped while it was; wait for it or end it",
        "malformed": "it is damaged; `tiledsched db check` tells how far, then restore a copy",
        "disk is full": "free some space and run again",
        "disk i/o error": "see whether its disk is full or failing, and run again",
        "constraint": "this is a defect in tiledsched or a damaged database; run `tiledsched db check`",
    }
    for phrase, what in advice.items():
        if phrase in message.lower():
            if phrase == "file is not a database":
                with open(str(name), "rb") as file:
                    check_plain(str(name), file.read(8))
            return f"database {name}: {message}; {what}"
    return f"database {name}: {message}; check the server and the URL, or {ELSEWHERE}"


def current_revision(engine: Engine, url: URL) -> str | None:
    """The schema revision of the database at `url`; None where the database is empty.

    Raises:
        DatabaseError: the database was made before the first release, belongs to another program, or lost its version.
    """
    with engine.connect() as connection:
        tables = set(sa.inspect(connection).get_table_names())  # by one query: another process may make them just now
        if UNRELEASED_TABLE in tables:
            raise DatabaseError(
                f"database {url.render_as_string()} was made by a tiledsched from before its first release, and its schema "
                "is not read any more; export what is served with the version that made it (`tiledsched db export -o FILE`), and "
                "every measurement (`tiledsched landscapes --export DIR --full`), and import both into a new database, where "
                f"programs are built again; or {ELSEWHERE}"
            )
        if tables and VERSION_TABLE not in tables:
            raise DatabaseError(
                f"database {url.render_as_string()} belongs to another program: it holds no tuning database, but "
                f"{', '.join(sorted(tables)[:MOST_NAMED])}{', ...' if len(tables) > MOST_NAMED else ''}; {ELSEWHERE}"
            )
        revision = _revision(connection) if tables else None
        if revision is None and tables - {VERSION_TABLE}:
            raise DatabaseError(
                f"database {url.render_as_string()} is damaged: it has tables and not the version of their schema; restore a "
                f"copy, or {ELSEWHERE}"
            )
        return revision


def _revision(connection: Connection) -> str | None:
    """The schema revision; None where the database has no schema."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.scalar(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))


def use_wal(engine: Engine) -> None:
    """Put an SQLite file into WAL mode, in which it stays. Waits for another process that does the same at this moment."""
    if engine.dialect.name != "sqlite" or isinstance(engine.pool, StaticPool):
        return
    with engine.connect() as connection:
        driver = connection.connection.driver_connection  # outside any transaction: the mode cannot change in one
        assert driver is not None
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while driver.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:
                driver.execute("PRAGMA journal_mode=WAL").fetchone()
            except driver.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise sa.exc.OperationalError("PRAGMA journal_mode=WAL", None, error) from error
                time.sleep(0.05)


def alembic_config(connection: Connection) -> Any:
    """Alembic's configuration for migrations over `connection`. There is no ini file."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(data_files.tuning_db() / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def upgrade(engine: Engine) -> bool:
    """Bring the schema to the newest revision in one transaction; of two processes, one does it and the other waits.

    Returns:
        Whether there was anything to do.
    """
    with engine.connect().execution_options(immediate=True) as connection, connection.begin():
        one_at_a_time(connection, SCHEMA_LOCK)
        if _revision(connection) == HEAD:
            return False
        from alembic import command

        command.upgrade(alembic_config(connection), "head")
        return True


def one_at_a_time(connection: Connection, lock: int) -> None:
    """Wait until no other transaction has a lock, and hold it to the end of this one. In SQLite only one writes at a time anyway.

    Args:
        connection: in a transaction.
        lock: :data:`SCHEMA_LOCK` or :data:`IMPORT_LOCK`.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({lock})")


def nothing() -> Engine:
    """An engine over an empty tuning database in memory."""
    engine = create_engine(make_url("sqlite://"), read_only=False, limit=Limit())
    upgrade(engine)
    return engine
