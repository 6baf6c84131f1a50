"""An open database: its schema, transactions and health. :mod:`tiledsched.store.db` adds what is stored in it."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.engine import URL, Engine
from sqlalchemy.orm import Session

from tiledsched.core.errors import ConfigError, DatabaseError
from tiledsched.core.files import partial_path
from tiledsched.core.registry import SHIPPED, kernel_named
from tiledsched.store import engine as engines
from tiledsched.store.health import problems_found
from tiledsched.store.limit import Limit
from tiledsched.store.reading import rows_of
from tiledsched.store.rows import DAMAGE, RowReader
from tiledsched.store.views import create_view, is_current

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
CONFLICTS = ("40001", "40P01", "23505")
"""PostgreSQL's codes for conflicts of transactions: not serialisable, deadlock, the same row inserted twice."""
TRIES = 6
"""How often a transaction that meets a conflict is tried."""


class Database:
    """The part of :class:`tiledsched.store.db.TuningDB` that does not depend on what is stored."""

    def __init__(self, engine: Engine, url: URL, *, read_only: bool, limit: Limit | None = None) -> None:
        self._engine, self._limit = engine, limit or Limit()
        self._writer = engine.execution_options(immediate=True)
        self._url = url
        self.read_only = read_only
        self._shown: set[str] = set()

    @classmethod
    def open(
        cls, url: str | os.PathLike[str] | None = None, *, read_only: bool = False, limit_s: float | None = None
    ) -> Self:
        """Open the database at `url`, and make it where it does not exist.

        `url` is a path, `sqlite:///PATH`, `:memory:` or `postgresql://HOST/NAME`; without one, `TILEDSCHED_DB`, else
        `tuning.db` in the user data directory. A `read_only` database is not made: what holds no tables yet, such as a file
        that another process is making, is read as an empty database.

        Args:
            url: where it is.
            read_only: whether it is only read.
            limit_s: the longest time of a transaction, in seconds; None for any.

        Raises:
            DatabaseError: it cannot be read or made, is not a tuning database, or has a schema that this program does not know.
        """
        where = engines.resolve_url(url)
        limit = Limit(limit_s)
        engine = engines.create_engine(where, read_only=read_only, limit=limit)
        db = cls(engine, where, read_only=read_only, limit=limit)
        try:
            db._prepare()
        except BaseException:
            engine.dispose()
            raise
        return db

    def _prepare(self) -> None:
        with self._explained(*DAMAGE):
            found = engines.current_revision(self._engine, self._url)
            if found not in (None, engines.HEAD):
                raise DatabaseError(
                    f"database {self.url} has schema {found}, newer than the {engines.HEAD} that this program knows; "
                    f"upgrade tiledsched, or {engines.ELSEWHERE}"
                )
            if self.read_only and found is None:  # another process makes it at this moment, or a full disk left it
                self._engine.dispose()
                self._engine = engines.nothing()
            elif found is None:
                self.upgrade()
            if not self.read_only:
                engines.use_wal(self._engine)

    @contextmanager
    def _explained(self, *damage: type[Exception]) -> Iterator[None]:
        with self._limit.explaining(), engines.explained(self._url, *damage):
            yield

    def close(self) -> None:
        """Close the file or the connection. Safe to call twice."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        """The database's URL, fit to print: a password is hidden."""
        return self._url.render_as_string(hide_password=True)

    @property
    def schema_revision(self) -> str:
        """The revision of the database's schema."""
        with self._explained():
            return engines.current_revision(self._engine, self._url) or ""

    def upgrade(self) -> str:
        """Bring the schema to this program's, and make the views of the kernels that ship where it was not so before.

        `open` does so unless `read_only`.

        Returns:
            The schema's revision.
        """
        with self._explained():
            was_older = engines.upgrade(self._engine)
        if was_older:  # else another process made it just now, and makes the views
            self.show(*SHIPPED)
        return self.schema_revision

    def show(self, *kernels: str) -> None:
        """Make or renew the views of these kernels, each once in the life of this object.

        Views are a convenience, and errors are ignored: a kernel may be unknown to this process, or a user may not have the
        right to make views.
        """
        for name in set(kernels) - self._shown:
            self._shown.add(name)
            with suppress(ConfigError, DatabaseError):
                with self.reading() as session:  # most often it is there, and nobody needs to wait
                    if is_current(session.connection(), kernel_named(name)):
                        continue
                with self.writing() as session:
                    create_view(session.connection(), kernel_named(name))

    def check(self) -> list[str]:
        """What is wrong with the database, a line for each thing; empty where it is sound."""
        with self.reading() as session:
            return problems_found(session)

    def back_up(self, path: str | os.PathLike[str], *, replace: bool = False) -> int:
        """Copy the database as it is at one moment, even while others write, to a file that appears whole or not at all.

        The copy can be opened as a database.

        Returns:
            The size of the copy in bytes.

        Raises:
            DatabaseError: the file exists and `replace` is false, it cannot be written, or the database is on a server, which has
                tools of its own for backups.
        """
        target = Path(os.path.expanduser(path))
        if target.exists() and not replace:
            raise DatabaseError(f"{target} is there already; give another path, or pass --force")
        if target.exists() and not target.is_file():  # the copy would take the place of a device, such as /dev/null
            raise DatabaseError(f"{target} is no regular file; give another path")
        partial = partial_path(target)
        with self.reading() as session:
            driver: Any = session.connection().connection.driver_connection
            if not isinstance(driver, sqlite3.Connection):
                raise DatabaseError(f"{self.url} is on a server; back it up with pg_dump")
            try:
                with closing(sqlite3.connect(partial)) as copy:
                    driver.backup(copy)
                    copy.execute(
                        "PRAGMA journal_mode=DELETE"
                    )  # a single file, without a -wal that could be left behind
                os.replace(partial, target)
            except (OSError, sqlite3.Error) as error:
                raise DatabaseError(f"cannot write {target}: {error}; give another path") from error
            finally:
                for left in (partial, Path(f"{partial}-journal"), Path(f"{partial}-wal"), Path(f"{partial}-shm")):
                    left.unlink(missing_ok=True)
        return target.stat().st_size

    def connect(self) -> Any:
        """A further connection to an SQLite file, or to a copy of a database in memory, of the driver's own: no pool keeps it."""
        words, options = self._engine.dialect.create_connect_args(self._engine.url)
        connection: Any = self._engine.dialect.connect(*words, **options)
        if self._engine.url.database is None:
            with self.reading() as session:
                session.connection().connection.driver_connection.backup(connection)  # type: ignore[union-attr]
        return connection

    @contextmanager
    def reading(self, *damage: type[Exception]) -> Iterator[Session]:
        """A session for queries.

        Args:
            damage: exceptions of the caller that mean that what is stored is damaged: DAMAGE where records are made.
        """
        with self._explained(*damage), Session(self._engine) as session:
            yield session

    @contextmanager
    def rows(self) -> Iterator[tuple[Session, RowReader]]:
        """A session for queries and a reader of what they find. Where some rows are damaged, a warning says so at the end."""
        with self.reading(*DAMAGE) as session:
            rows = rows_of(session, self._url.database or self.url if self.url.startswith("sqlite") else self.url)
            yield session, rows
            rows.warn()

    def write(self, work: Callable[[Session], T], *kernels: str) -> T:
        """Do `work` in one write transaction, and again where another writer is in conflict with it.

        PostgreSQL ends one of two transactions that wait for each other, or that insert the same row at once. The views of
        `kernels` are made afterwards: if they were made before, a locked database would be waited for twice.

        Returns:
            What `work` returns.
        """
        for left in range(TRIES, 0, -1):
            try:
                with self.writing() as session:
                    done = work(session)
                self.show(*kernels)
                return done
            except DatabaseError as error:
                state = getattr(getattr(error.__cause__, "orig", None), "sqlstate", None)
                if left == 1 or state not in CONFLICTS:
                    raise
            time.sleep(random.uniform(0, 0.02 * 2 ** (TRIES - left)))
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session in one write transaction, which is committed at the end, or rolled back by an exception."""
        if self.read_only:
            raise DatabaseError(f"{self.url} was opened read-only; open it for writing to change it")
        with self._explained(), Session(self._writer) as session, session.begin():
            yield session
