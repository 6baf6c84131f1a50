"""A database that is damaged, full, locked by the dead or shared by many: serving goes on, and the message says what to do."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from store_samples import build, entry, fill, schedule

from tiledsched.cli import main
from tiledsched.core.config import Settings
from tiledsched.core.errors import DatabaseError
from tiledsched.serve.entries import Layer, layers
from tiledsched.store import engine as engines
from tiledsched.store.db import TuningDB

SAMPLE = max((Path(__file__).parent / "data").glob("store_*.db"))
PAGE = 1024
"""Bytes of a page of the sample."""
PAGES = SAMPLE.stat().st_size // PAGE


def users(path: Path) -> Layer:
    """What serving finds in a user's database, beside what ships."""
    shipped, mine = layers(Settings(db=str(path)), {"sm_90"}, "attention")
    assert shipped.entries
    assert not shipped.error
    return mine


def said_by(command: list[str], path: Path, capsys, monkeypatch) -> str:
    """What a command says of a damaged database; it has no traceback, and no word of a defect."""
    monkeypatch.setenv("TILEDSCHED_DB", str(path))
    assert main(command) in (0, 1, 2)
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    assert "defect" not in said
    return said


@pytest.mark.parametrize("page", [pytest.param(n, marks=[pytest.mark.slow] * bool(n % 3)) for n in range(PAGES)])
def test_a_torn_page_is_an_error_that_says_what_to_do(page, tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "x.db"
    raw = bytearray(SAMPLE.read_bytes())
    start = page * PAGE + (100 if page == 0 else 0)  # the header is another test's
    raw[start : (page + 1) * PAGE] = random.Random(1).randbytes((page + 1) * PAGE - start)
    path.write_bytes(raw)
    mine = users(path)
    assert len(mine.entries) == 2 or (str(path) in mine.error and "db check" in mine.error)
    commands = (
        ["show", "attention", "--arch", "sm_90"],
        ["db", "check"],
        ["db", "export"],
        ["db", "import", str(SAMPLE)],
    )
    for command in commands[page % 2 :: 2]:
        said_by(command, path, capsys, monkeypatch)


@pytest.mark.parametrize("value", ["'x'", "x'ff00'", "NULL", "'[1]'", "'\"x\"'"])
@pytest.mark.parametrize("table", ["schedules", "problems", "devices", "toolchains", engines.VERSION_TABLE])
def test_what_no_column_may_hold_stops_no_call(table, value, tmp_path) -> None:
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(SAMPLE)) as connection:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    for column in columns:
        shutil.copy(SAMPLE, path)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            try:
                connection.execute(f"UPDATE OR REPLACE {table} SET {column} = {value}")
            except sqlite3.IntegrityError:
                continue
        mine = users(path)
        assert not mine.error or str(path) in mine.error


def filled(path: Path) -> Path:
    """The path of a new database with a few rows."""
    with TuningDB.open(path) as db:
        fill(db)
    return path


def test_a_full_disk_loses_nothing_that_was_committed(tmp_path) -> None:
    path = filled(tmp_path / "x.db")
    with TuningDB.open(path) as db:

        @sa.event.listens_for(db._engine, "begin")
        def fill_up(connection: sa.Connection) -> None:
            connection.exec_driver_sql("PRAGMA max_page_count = 1")  # means: no more than there are

        with pytest.raises(DatabaseError, match=rf"^database {path}: database or disk is full; free some space"):
            db.record_builds([build(sched=schedule(tile_m=i)) for i in range(5000)])
    with TuningDB.open(path) as db:
        assert db.check() == []
    assert len(users(path).entries) == 2


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("disk I/O error", "see whether its disk is full or failing"),
        ("unable to open database file", "check that its folder exists"),
        ("attempt to write a readonly database", "make it writable"),
        ("database disk image is malformed", "`tiledsched db check` tells how far"),
        ("FOREIGN KEY constraint failed", "this is a defect in tiledsched or a damaged database"),
        ("no such thing", "check the server and the URL"),
    ],
)
def test_what_the_driver_says_comes_with_what_to_do(message, advice) -> None:
    with (
        pytest.raises(DatabaseError, match=rf"x\.db: {message}; .*{advice}"),
        engines.explained(sa.make_url("sqlite:///x.db")),
    ):
        raise sa.exc.OperationalError("SELECT 1", None, sqlite3.OperationalError(message))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o000, 0o555])
def test_what_may_not_be_read_or_written_is_said(what, mode, tmp_path, capsys, monkeypatch) -> None:
    path = filled(tmp_path / "deep" / "x.db")
    closed = path if what == "file" else path.parent
    closed.chmod(mode)
    try:
        mine = users(path)
        assert len(mine.entries) == 2 if mode else str(path) in mine.error
        assert str(path) in said_by(["db", "import", str(SAMPLE)], path, capsys, monkeypatch)
    finally:
        closed.chmod(0o755)


def test_a_stopped_writer_keeps_writers_waiting_once_and_readers_never(tmp_path, capsys, monkeypatch) -> None:
    path = filled(tmp_path / "x.db")
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_S", 1)
    with closing(sqlite3.connect(path, isolation_level=None)) as stopped:
        stopped.execute("BEGIN IMMEDIATE")
        stopped.execute("DELETE FROM entries")
        for command in (
            ["show", "attention", "--arch", "sm_90"],
            ["db", "check"],
            ["db", "export"],
            ["db", "backup", str(tmp_path / "copy.db")],
        ):
            assert "locked" not in said_by(command, path, capsys, monkeypatch)
        assert len(users(path).entries) == 2, "the last commit"
        with TuningDB.open(path) as db:
            waits, begin = [], engines._begin_writing
            monkeypatch.setattr(engines, "_begin_writing", lambda driver: (waits.append(driver), begin(driver)))
            with pytest.raises(DatabaseError, match=r"x\.db: database is locked; .*wait for it or end it"):
                db.put_entry(entry())
        assert len(waits) == 1, "and not again for the views"
    with TuningDB.open(path) as db:
        assert len(db.entries()) == 2
        assert db.put_entry(entry())
