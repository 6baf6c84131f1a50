"""What the tests of serving share. torch is imported only where a test asks for it: some run without."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

# Read when numpy and torch are loaded, here and in the processes that tests start. The products of small tiles end before
# a second thread has begun, and one that waits for work takes a core from another of pytest's processes.
for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

# Tests make and drop many small objects beside hundreds of thousands that stay: looking at these less often saves much time.
gc.set_threshold(50_000, 20, 20)

os.environ.pop("COLUMNS", None)  # tables are as wide as tests expect, whatever the terminal
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in the background of a script; processes that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Printed(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output, as JSON."""
        return json.loads(self.out)


@pytest.fixture
def cli(capsys):
    """Run the command line, given as words or as one text: check the exit code, and return what was printed."""
    from tiledsched.cli import main

    def run(words, *, code: int = 0, **fakes) -> Printed:
        assert main(words.split() if isinstance(words, str) else words, **fakes) == code
        return Printed(*capsys.readouterr())

    return run


@pytest.fixture
def python():
    """Run a program in another process, which finds what this one finds: check its exit code, and return what it printed."""

    def run(program, *words, code: int = 0, given: str = "", **environment: str) -> Printed:
        found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command, env = [sys.executable, "-c", program, *words], os.environ | found | environment
        done = subprocess.run(command, input=given, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return Printed(done.stdout, done.stderr)

    return run


def pytest_collection_finish() -> None:
    """What was imported by now stays to the end, so that the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


MIGRATING = {"test_kills", "test_store_schema"}
"""The tests whose databases go through the migrations, every one."""


@lru_cache(maxsize=1)
def new_schema() -> tuple[str, ...]:
    """What the migrations and the views of what ships make of an empty SQLite file, as statements."""
    from tiledsched.store.database import Database

    with Database.open(":memory:") as db, db._engine.connect() as connection:
        statements = tuple(connection.connection.driver_connection.iterdump())
    return tuple(each for each in statements if each not in ("BEGIN TRANSACTION;", "COMMIT;"))


@pytest.fixture(autouse=True, scope="module")
def schema_at_hand(request):
    """New SQLite files get their schema as one script, since hundreds of tests make them."""
    from tiledsched.core.registry import SHIPPED
    from tiledsched.store.database import Database
    from tiledsched.store.engine import HEAD

    migrate, script = Database.upgrade, new_schema()

    def upgrade(self: Database) -> str:
        if self._engine.dialect.name == "sqlite":
            with self._engine.connect().execution_options(immediate=True) as connection, connection.begin():
                is_new = not connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar()
                for statement in script * is_new:
                    connection.exec_driver_sql(statement)
            if is_new:
                self._shown.update(SHIPPED)
                return HEAD
        return migrate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "upgrade", migrate if request.module.__name__ in MIGRATING else upgrade)
        yield


def kept(read):
    """Reads each table that ships once, which no test changes in its place."""
    from tiledsched.core import data_files

    folder, once = data_files.tuning_db(), lru_cache(read)
    return lambda table: (once if folder in table.parents else read)(table)


@pytest.fixture(autouse=True, scope="session")
def nothing_twice():
    """Hundreds of tests read the tables that ship. Commands called here compile in one process where they do not say in how many:
    each takes a second of CPU to start. SQLite need not wait for disks: no database of a test has to outlive a loss of power.
    """
    from sqlalchemy import event, pool

    from tiledsched.report import comparison_sources
    from tiledsched.serve import entries

    event.listen(
        pool.Pool,
        "checkout",
        lambda driver, *_: isinstance(driver, sqlite3.Connection) and driver.execute("PRAGMA synchronous=OFF"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiledsched.build.pool.default_jobs", lambda: 1)
        patch.setattr(entries, "read_shipped_entries", kept(entries.read_shipped_entries))
        patch.setattr(comparison_sources, "read_table", kept(comparison_sources.read_table))
        yield


@pytest.fixture(autouse=True)
def process_as_before(request):
    """What commands configure for their process, and the levels and handlers of loggers that settings and `--verbose` change, do
    not reach the next test. On a GPU, and in processes that such tests start, our own kernel computes each call, also the first.
    """
    from tiledsched.core import config

    configured = dict(config._configured)
    root, ours = logging.getLogger(), logging.getLogger("tiledsched")
    levels, handlers = (root.level, ours.level), list(ours.handlers)
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("monkeypatch").setenv("TILEDSCHED_COMPILE", "wait")
        config.configure(compile="wait")
    yield
    if config._configured != configured:
        config._replace_configured(configured)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    ours.handlers[:] = handlers


@pytest.fixture
def fresh():
    """The module of `sdpa`, with no plan, warning or setting from another test."""
    from tiledsched.ops import sdpa as serve

    serve.reload()
    yield serve
    serve.reload()


@pytest.fixture
def serve(fresh, monkeypatch):
    """The module of `sdpa`, which refuses what it does not serve, so that a test which passes was served."""
    monkeypatch.setenv("TILEDSCHED_FALLBACK", "error")
    return fresh


@pytest.fixture
def launches(fresh, monkeypatch, tmp_path):
    """The list of launches to come, on CPU tensors; what the kernel does not serve is an error."""
    from serve_on_cpu import Launches, using

    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "none.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEDSCHED_FALLBACK", "error")
    found = Launches()
    with using(found.runtime):
        yield found


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty folder, in which the database and the cache of commands and sessions are."""
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def new_home(monkeypatch, tmp_path):
    """The current folder of a user who has neither settings nor a cache nor a database yet."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("TILEDSCHED_DB", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def forgotten(monkeypatch, tmp_path):
    """Operators as in a new process, with a database of their own; their calls wait for the programs."""
    import tiledsched
    from tiledsched.serve import process

    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "own.db"))
    tiledsched.configure(compile="wait")
    process.forget_kernels()
    yield
    process.forget_kernels()


@pytest.fixture
def db():
    """An empty database in memory."""
    from tiledsched.store.db import TuningDB

    with TuningDB.open(":memory:") as opened:
        yield opened


@pytest.fixture
def quiet():
    """No warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def left_to_torch(quiet):
    """What our kernels do not serve, torch does."""
    from tiledsched import configure

    with configure(fallback="torch"):
        yield
