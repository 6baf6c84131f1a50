"""Opening, upgrading, refusing, and being killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from store_samples import BACKENDS, DEVICE, PROBLEM, RIVALS, TOOLCHAIN, build, entry, fill, new_url, runs, schedule

from tiledsched.cli import main
from tiledsched.core.errors import DatabaseError
from tiledsched.store import engine as engines
from tiledsched.store.db import TuningDB
from tiledsched.store.engine import HEAD, VERSION_TABLE
from tiledsched.store.models import Base

FIRST_RELEASE = Path(__file__).parent / "data" / "store_0001.db"
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}


def python(code, *arguments):
    """A process that runs some code."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=HERE, stdout=subprocess.PIPE, text=True)


# Where it is


def test_the_default_is_the_user_data_directory_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("TILEDSCHED_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert engines.resolve_url(None).database.endswith("tuning.db")
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "deep" / "er" / "x.db"))
    with TuningDB.open() as db:
        assert db.url == f"sqlite:///{tmp_path}/deep/er/x.db"
    assert (tmp_path / "deep" / "er" / "x.db").exists()
    assert engines.resolve_url("y.db").database == str(Path.cwd() / "y.db")


@pytest.mark.parametrize("name", ["plain.db", "with space.db", "100%.db", "a?b#c.db"])
def test_a_path_and_a_url_are_the_same_database(tmp_path, name):
    with TuningDB.open(tmp_path / name) as db:
        db.put_entry(entry())
    for url in (tmp_path / name, *([f"sqlite:///{tmp_path / name}"] if "?" not in name else [])):
        with TuningDB.open(url, read_only=True) as db:
            assert len(db.entries()) == 1


def test_a_password_is_never_shown():
    db = TuningDB(
        sa.create_engine("sqlite://"), engines.resolve_url("postgresql://me:secret@host/name"), read_only=True
    )
    assert "secret" not in db.url + repr(db)
    assert db.url.startswith("postgresql+psycopg://me:")


@pytest.mark.parametrize("url", ["mysql://host/name", "nonsense://x", "postgresql://host:port/name"])
def test_other_urls_are_refused(url):
    with pytest.raises(DatabaseError, match="give a path"):
        TuningDB.open(url)


# Refusing


def refused(path, match, **options):
    with pytest.raises(DatabaseError, match=match) as error:
        TuningDB.open(path, **options)
    return str(error.value)


def test_what_is_no_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, and not a database at all\n" * 100)
    assert str(path) in refused(path, "not an SQLite file")
    assert "these are notes" in path.read_text()
    refused(tmp_path, "is a folder")
    refused(path / "x.db", "cannot use")
    refused(tmp_path / "missing.db", "there is no database", read_only=True)
    refused(":memory:", "in-memory", read_only=True)


@pytest.mark.parametrize(
    ("sql", "match", "to_read"),
    [
        ("CREATE TABLE devices (serial TEXT)", "another program", "holds no tuning database"),
        ("CREATE TABLE notes (text TEXT)", "another program.*notes", "holds no tuning database"),
        (f"DELETE FROM {VERSION_TABLE}", "damaged.*restore a copy", "damaged.*restore a copy"),
        (f"UPDATE {VERSION_TABLE} SET version_num = '9999'", "newer.*upgrade tiledsched", "newer.*upgrade tiledsched"),
        (
            f"ALTER TABLE {VERSION_TABLE} RENAME TO {engines.UNRELEASED_TABLE}",
            "before its first release.*db export -o FILE.*landscapes --export DIR --full.*programs are built again.*--db",
            "before its first release",
        ),
    ],
    ids=[
        "another program's",
        "another's with other names",
        "without a version",
        "newer",
        "from before the first release",
    ],
)
def test_a_database_of_others_is_refused_and_left_alone(tmp_path, sql, match, to_read):
    path = tmp_path / "x.db"
    if VERSION_TABLE in sql:
        TuningDB.open(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(sql)
    before = path.read_bytes()
    refused(path, match)
    refused(path, to_read, read_only=True)
    assert path.read_bytes() == before


def test_what_the_last_version_before_the_first_release_exported_is_imported_whole(tmp_path, capsys):
    """Its database held 2 entries, 2 measurements, 2 artifacts and 3 builds, which no file holds. One measurement is not served."""
    exported = [str(FIRST_RELEASE.parent / f"unreleased_0007{name}") for name in (".json", "_landscape.json.xz")]
    assert main(["db", "import", *exported, "--db", str(tmp_path / "x.db")]) == 0
    with TuningDB.open(tmp_path / "x.db") as db:
        assert [len(found) for found in (db.entries(), db.measurements(), db.artifacts())] == [2, 2, 2]
        assert sorted(stored.measurement.median_us for stored in db.measurements()) == [100.0, 120.0]
        assert db.check() == []


def test_a_damaged_file_is_found_by_check(tmp_path):
    with TuningDB.open(tmp_path / "x.db") as db:
        db.record_builds([build(sched=schedule(tile_m=i)) for i in range(300)])
    raw = bytearray((tmp_path / "x.db").read_bytes())
    raw[-20000:] = os.urandom(20000)  # rows: without its schema the file cannot even be opened
    (tmp_path / "x.db").write_bytes(raw)
    with TuningDB.open(tmp_path / "x.db", read_only=True) as db:
        assert db.check()


@pytest.mark.parametrize("may_write", [True, False])
def test_read_only_reads_and_does_not_write(tmp_path, monkeypatch, may_write):
    """Also what is installed in a folder that nobody may write."""
    with TuningDB.open(tmp_path / "x.db") as db:
        fill(db)
    monkeypatch.setattr(engines.os, "access", lambda path, mode: may_write)
    with TuningDB.open(tmp_path / "x.db", read_only=True) as db:
        assert len(db.entries()) == 2
        assert db.check() == []
        with pytest.raises(DatabaseError, match="read-only"):
            db.put_entry(entry())
    if not may_write:
        assert sorted(os.listdir(tmp_path)) == ["x.db"]


# Schema


@pytest.mark.slow
def test_opening_what_is_up_to_date_is_quick_and_needs_no_alembic(tmp_path):
    TuningDB.open(tmp_path / "x.db").close()
    child = python(
        """
        import sys, time
        from tiledsched.store.db import TuningDB
        times = []
        for _ in range(5):
            start = time.process_time()
            TuningDB.open(sys.argv[1]).close()
            times.append(time.process_time() - start)
        print(min(times), "alembic" in sys.modules)
        """,
        tmp_path / "x.db",
    )
    seconds, alembic = child.communicate()[0].split()
    assert float(seconds) < 0.05
    assert alembic == "False"


def same_type(context, column, declared, found_type, declared_type):
    """SQLite has no lengths, so migrations leave them there; None is for Alembic to compare."""
    both_text = isinstance(found_type, sa.String) and isinstance(declared_type, sa.String)
    return False if context.dialect.name == "sqlite" and both_text else None


@pytest.mark.parametrize("backend", BACKENDS)
def test_migrations_end_at_what_the_models_say(backend, tmp_path):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    with new_url(backend, tmp_path) as url, TuningDB.open(url) as db, db.reading() as session:
        connection = session.connection()
        assert ScriptDirectory.from_config(engines.alembic_config(connection)).get_heads() == [HEAD]
        options = {"version_table": VERSION_TABLE, "compare_type": same_type, "target_metadata": Base.metadata}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        checks = [check["name"] for check in sa.inspect(connection).get_check_constraints("builds")]
        assert checks == ["ck_builds_outcome"]  # alembic does not compare these


def test_a_database_of_the_first_release_is_read_and_written(tmp_path):
    path = tmp_path / "x.db"
    shutil.copy(FIRST_RELEASE, path)
    with TuningDB.open(path) as db:
        assert db.schema_revision == HEAD
        assert db.check() == []
        with db.reading() as session:
            counts = {name: session.scalar(sa.text(f"SELECT count(*) FROM {name}")) for name in Base.metadata.tables}
        assert {name for name, count in counts.items() if not count} == set()
        assert (counts["entries"], counts["measurements"], counts["failures"], counts["builds"]) == (2, 2, 2, 3)
        with TuningDB.open(":memory:") as new:
            fill(new)
            kept = [each.replace(measurement=None) for each in new.entries()]
        measured, modelled = db.entries()
        assert [each.replace(measurement=None) for each in (measured, modelled)] == kept
        assert (measured.median_us, measured.rivals) == (100.0, RIVALS)
        assert len(db.landscape(PROBLEM, DEVICE.name, "burst")) == 2
        assert [run.status for run in runs(db)] == ["done"]
        fill(db)
        assert db.check() == []


# Several processes


KILLED = """
    import sys
    from store_samples import build, schedule
    from tiledsched.store.db import TuningDB
    with TuningDB.open(sys.argv[1]) as db:
        run = db.start_run({}, "sm_90")
        for i in range(100000):
            made = build(sched=schedule(tile_m=i, tile_n=int(sys.argv[2])))
            db.record_builds([made])
            print(*made.key, flush=True)
"""


@pytest.mark.slow
def test_what_was_committed_survives_a_kill(tmp_path):
    path = tmp_path / "x.db"
    pause = random.Random(7)
    promised = set()
    for round_ in range(3):
        child = python(KILLED, path, round_)
        promised |= {tuple(child.stdout.readline().split()) for _ in range(3)}
        time.sleep(pause.uniform(0, 0.15))
        child.send_signal(signal.SIGKILL)
        lines = child.communicate()[0].splitlines(keepends=True)
        promised |= {tuple(line.split()) for line in lines if line.endswith("\n")}
        with TuningDB.open(path) as db:
            assert db.check() == []
            assert promised <= set(db.find_builds("attention", "abc", TOOLCHAIN, "sm_90"))
            assert [run.status for run in runs(db)] == ["running"] + ["interrupted"] * round_
    assert len(promised) > 6


# Empty


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_database_without_tables_is_read_as_empty_and_tuned_into(tmp_path, backend, capsys):
    with new_url(backend, tmp_path) as url:
        if backend == "file":
            Path(url).touch()
        with TuningDB.open(url, read_only=True) as db:
            assert (db.entries(), db.measurements(), db.check()) == ([], [], [])
            with pytest.raises(DatabaseError, match="read-only"):
                db.put_entry(entry())
        if backend == "file":
            assert Path(url).stat().st_size == 0
        for command in (
            ["show", "softmax"],
            ["explain", "softmax", "-p", "rows=9,columns=9", "--arch", "sm_90"],
            ["db", "check"],
        ):
            assert main([*command, "--db", str(url)]) == 0, capsys.readouterr().err
        with TuningDB.open(url) as db:
            db.put_entry(entry())
        with TuningDB.open(url, read_only=True) as db:
            assert len(db.entries()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_processes_that_make_and_read_one_database_at_once_all_succeed(tmp_path, backend):
    code = """
    import os, sys
    from tiledsched.store.db import TuningDB
    from tiledsched.store.location import database_exists
    url, children = sys.argv[1], []
    for place in range(12):
        child = os.fork()
        if child:
            children.append(child)
            continue
        reads = place % 3 > 0
        for _ in range(10 if reads else 1):
            if not reads or database_exists(url):
                with TuningDB.open(url, read_only=reads) as db:
                    db.measurements() if reads else db.finish_run(db.start_run({}, "sm_90"))
        os._exit(0)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))
    """
    with new_url(backend, tmp_path) as url:
        assert python(code, url).wait(100) == 0
        with TuningDB.open(url, read_only=True) as db:
            assert (len(runs(db)), db.check()) == (4, [])


# Without end

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_ends_at_its_limit(tmp_path, backend):
    with new_url(backend, tmp_path) as url:
        TuningDB.open(url).close()
        with TuningDB.open(url, read_only=True, limit_s=0.3) as db:
            began = time.monotonic()
            with pytest.raises(DatabaseError, match="did not end in time"), db.reading() as session:
                session.execute(sa.text(ENDLESS)).all()
            assert time.monotonic() - began < 5
            assert db.entries() == []


def test_what_a_signal_raises_ends_a_query_and_is_raised(tmp_path):
    with TuningDB.open(tmp_path / "x.db") as db:
        before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt), db.reading() as session:
                session.execute(sa.text(ENDLESS)).all()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert db.entries() == []
