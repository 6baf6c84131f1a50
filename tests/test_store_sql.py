"""SQL of one's own, which can change nothing; copies; and what docs/database.md says of the tables."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import sqlite3
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from store_samples import BACKENDS, TOOLCHAIN, fill, measurement, new_url, schedule
from test_store_faults import filled

from tiledsched.cli import main
from tiledsched.core.errors import DatabaseError
from tiledsched.store import sql as sql_module
from tiledsched.store.db import TuningDB
from tiledsched.store.engine import resolve_url
from tiledsched.store.models import Base
from tiledsched.store.sql import run_query, tables

DOCUMENTED = (Path(__file__).parent.parent / "docs" / "database.md").read_text()
QUESTIONS = re.findall(r"^--.*\n([^;]*);", re.search(r"```sql\n(.*?)```", DOCUMENTED, re.DOTALL).group(1), re.MULTILINE)


@pytest.fixture(params=BACKENDS, scope="module")
def asked(request, tmp_path_factory):
    """A filled database, opened to be read: no question changes it."""
    with new_url(request.param, tmp_path_factory.mktemp("asked")) as url:
        with TuningDB.open(url) as db:
            fill(db)
        reading = contextlib.nullcontext(url) if request.param == "file" else reader(url)
        with reading as theirs, TuningDB.open(theirs, read_only=True) as db:
            yield db


@contextlib.contextmanager
def reader(url: str):
    """The URL for a user who may read what is there, made as docs/database.md says; the commands stand there line by line."""
    name = f"reader_{uuid.uuid4().hex}"
    schema = re.search("search_path=([a-z_0-9]+)", url.replace("%3D", "=")).group(1)
    commands = re.search(r"```\n\$ psql (.*?)```", DOCUMENTED, re.DOTALL).group(1)
    engine = sa.create_engine(resolve_url(url))
    with engine.begin() as connection:
        for command in re.findall(r'-c "([^"]*)"', commands):
            changed = re.sub(r"\breader\b", name, command).replace("SCHEMA public", f"SCHEMA {schema}")
            connection.exec_driver_sql(changed.replace(" PASSWORD '...'", ""))
    yield resolve_url(url).set(username=name).render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {name}; DROP ROLE {name}")
    engine.dispose()


def answer(db, sql: str, **more):
    with run_query(db, sql, **more) as (columns, rows):
        return columns, [tuple(row) for row in rows]


def test_a_question_is_answered(asked) -> None:
    columns, rows = answer(asked, "select provenance, count(*) as entries from entries group by 1 order by 1")
    assert columns == ["provenance", "entries"]
    assert rows == [("measured", 1), ("modelled", 1)]
    assert {"entries", "attention"} <= set(tables(asked))


@pytest.mark.parametrize("question", QUESTIONS, ids=range(len(QUESTIONS)))
def test_the_documents_questions_have_answers(asked, question) -> None:
    columns, rows = answer(asked, question)
    assert columns
    assert rows


@pytest.mark.parametrize(
    "sql",
    [
        "delete from entries",
        "update entries set candidates = 0",
        "drop table entries",
        "create table x (y int)",
        "insert into runs select * from runs",
        "select 1; delete from entries",
        "commit; delete from entries",
        "with gone as (delete from entries returning 1) select * from gone",
        "attach 'stolen.db' as other",
        "vacuum",
        "pragma journal_mode = delete",
        "select load_extension('x')",
        "begin",
        "",
        ";",
        "-- nothing",
        "selec",
        "select * from none",
        "select nothing from entries",
        "select 1 from",
        "copy entries to '/tmp/stolen'",
        "copy (select 1) to program 'id'",
        "select pg_read_file('/etc/passwd')",
        "select lo_export(1, '/tmp/stolen')",
        "select lo_import('/etc/passwd')",
        "do $$ begin perform pg_sleep(0); end $$",
        "select set_config('transaction_read_only', 'off', false)",
        "set transaction read write",
        "\x00",
    ],
)
def test_what_is_no_question_is_refused_and_changes_nothing(asked, tmp_path, monkeypatch, sql) -> None:
    monkeypatch.chdir(tmp_path)
    before, files = asked.entries(), set(tmp_path.iterdir())
    with pytest.raises(DatabaseError):
        answer(asked, sql)
    assert asked.entries() == before
    assert {path.name for path in set(tmp_path.iterdir()) - files} <= {"x.db-wal", "x.db-shm"}
    assert answer(asked, "select count(*) from entries")[1] == [(2,)]


def test_a_question_without_end_is_given_up(asked) -> None:
    started = time.monotonic()
    endless = (
        "with recursive a(x) as (select 1 union all select x + 1 from a where x < 1000000000) select count(*) from a"
    )
    with pytest.raises(DatabaseError, match=r"no answer after 0.2 s; ask for less, or give it longer with --timeout"):
        answer(asked, endless, timeout_s=0.2)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "sql",
    [
        "select length(printf('%.*c', 200000000, 'x'))",
        "with recursive a(x, n) as (select zeroblob(1000000), 1 union all select x || x, n + 1 from a where n < 99) "
        "select length(x) from a",
        "select instr(printf('%.*c', 300000, 'a'), printf('%.*c', 150000, 'a') || 'b')",
        "select 1 union all select instr(printf('%.*c', 300000, 'a'), printf('%.*c', 150000, 'a') || 'b')",
    ],
    ids=["printf", "doubled", "instr", "second row"],
)
def test_a_query_of_one_slow_function_heeds_its_time_limit(tmp_path, monkeypatch, sql) -> None:
    """SQLite looks at the clock only between its steps."""
    monkeypatch.setattr(sql_module, "GRACE_S", 0.1)
    with TuningDB.open(tmp_path / "x.db") as db:
        started = time.monotonic()
        with pytest.raises(DatabaseError, match=r"no answer after 0.1 s|too big; a value of a query may have 64 MiB"):
            answer(db, sql, timeout_s=0.1)
        assert time.monotonic() - started < 15  # without the limit, minutes


@pytest.mark.slow
@pytest.mark.parametrize(
    "grant",
    [
        "ALTER ROLE {} SUPERUSER",
        "GRANT pg_read_server_files TO {}",
        "GRANT pg_execute_server_program TO {}",
        "GRANT {owner} TO {}",
        "GRANT EXECUTE ON FUNCTION pg_read_file(text) TO {}",
        "GRANT EXECUTE ON FUNCTION lo_export(oid, text) TO {}",
    ],
)
def test_who_may_reach_files_of_the_server_asks_nothing(tmp_path, grant) -> None:
    """COPY wrote a file, although nothing was changed in the database."""
    with new_url("postgresql", tmp_path) as url:
        with TuningDB.open(url):
            pass
        owner = resolve_url(url)
        engine = sa.create_engine(owner)
        with reader(url) as theirs, TuningDB.open(theirs, read_only=True) as db:
            with engine.begin() as connection:
                connection.exec_driver_sql(grant.format(resolve_url(theirs).username, owner=owner.username))
            for sql in (
                "select 1",
                f"copy (select 1) to '{tmp_path / 'stolen'}'",
                "select pg_read_file('/etc/passwd')",
            ):
                with pytest.raises(DatabaseError, match=r"by which a query could reach files.*name a user in the URL"):
                    answer(db, sql)
        engine.dispose()


def test_what_is_not_there_is_answered_with_what_is(asked) -> None:
    with TuningDB.open(":memory:") as db:
        assert answer(db, "select count(*) from entries")[1] == [(0,)], "a database in memory is read, too"
    with pytest.raises(DatabaseError, match="there are artifacts, attention, attention_backward, builds"):
        answer(asked, "select * from entires")


def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "x.db"))
    filled(tmp_path / "x.db")
    query = ["db", "query", "select provenance, model_us from entries order by 1"]
    assert main(query) == 0
    assert capsys.readouterr().out.splitlines() == ["provenance  model_us", "measured    90.0", "modelled    90.0"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["db", "query", "select * from entries"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("provenance      measured") for line in lines), "a block for each row"
    assert main([*query, "--csv", "--limit", "1"]) == 0
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [
        ["provenance", "model_us"],
        ["measured", "90.0"],
        ["modelled", "90.0"],
    ]
    assert main([*query, "--json", "--limit", "1"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "schema_version": 1,
        "columns": ["provenance", "model_us"],
        "rows": [["measured", 90.0]],
        "more": True,
    }
    assert "there are more rows than 1" in said.err
    assert main(["db", "query"]) == 0
    assert "kernel_views" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("select 1 as one"))
    assert main(["db", "query", "-"]) == 0
    assert capsys.readouterr().out == "one\n1\n"
    assert main(["db", "query", "drop table entries"]) == 2
    assert "a query reads and changes nothing" in capsys.readouterr().err


# Copies


def test_a_copy_is_whole_while_somebody_writes(tmp_path) -> None:
    done = threading.Event()

    def write(db) -> None:
        while not done.is_set():
            db.record_measurement(None, "attention", "abc", TOOLCHAIN, measurement(100.0, schedule=schedule(64, 32)))

    with (
        TuningDB.open(tmp_path / "x.db") as db,
        TuningDB.open(tmp_path / "x.db", read_only=True) as reading,
        ThreadPoolExecutor() as threads,
    ):
        fill(db)
        writer = threads.submit(write, db)
        try:
            for number in range(3):
                assert reading.back_up(tmp_path / "copy.db", replace=number > 0) > 10_000
                with TuningDB.open(tmp_path / "copy.db") as copy:
                    assert copy.check() == []
                    assert copy.entries() == db.entries()
                    assert len(copy.measurements()) >= 2
        finally:
            done.set()
        writer.result()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_a_copy_takes_nobodys_place_unasked(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "x.db"))
    filled(tmp_path / "x.db")
    (tmp_path / "mine").write_text("precious")
    assert main(["db", "backup", str(tmp_path / "mine")]) == 2
    assert "is there already; give another path, or pass --force" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"
    assert main(["db", "backup", str(tmp_path / "mine"), "--force"]) == 0
    with sqlite3.connect(tmp_path / "mine") as connection:
        assert connection.execute("select count(*) from entries").fetchone() == (2,)
    connection.close()
    assert main(["db", "backup", str(tmp_path / "none" / "x.db")]) == 2
    assert "give another path" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_has_tools_of_its_own(tmp_path) -> None:
    with new_url("postgresql", tmp_path) as url, TuningDB.open(url) as db:
        with pytest.raises(DatabaseError, match="pg_dump"):
            db.back_up(tmp_path / "copy.db")
        assert list(tmp_path.iterdir()) == []


# What the documents say


def test_every_column_is_documented() -> None:
    rows = re.findall(r"^\|`(\w+)`\|(.*)\|$", DOCUMENTED.split("<!-- columns -->")[1].split("\n\n")[0], re.MULTILINE)
    said = {table: re.findall(r"`(\w+)`", columns) for table, columns in rows}
    with TuningDB.open(":memory:") as db, db.reading() as session:
        there = sa.inspect(session.connection())
        assert said == {
            name: [column["name"] for column in there.get_columns(name)] for name in sorted(Base.metadata.tables)
        }
