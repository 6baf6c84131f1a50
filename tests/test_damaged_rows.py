"""A damaged row costs itself: whatever stands in a column, all else is served, reported and exported, and the check names it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from typing import get_args

import pytest
import sqlalchemy as sa
from store_samples import DEVICE, PROBLEM, START, TOOLCHAIN, entry, fill, fill_fleet, measurement, new_url, schedule

from tiledsched.cli import main
from tiledsched.core import data_files
from tiledsched.core.config import Settings
from tiledsched.kernels.attention import Attention
from tiledsched.serve import stored
from tiledsched.serve.entries import layers, load_table
from tiledsched.store import manifest, rows as rows_module
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_table, merge_database
from tiledsched.store.models import Base
from tiledsched.store.rows import TABLES, row_type

TABLE = "tables/attention/sm_90.json"
DAMAGE = {
    "text": "abc",
    "an empty text": "",
    "a number below zero": -5,
    "infinity": float("inf"),
    "nothing": None,
    "bytes": b"\xff",
    "bad UTF-8": b"\xff",
    "deep JSON": "[" * 5000,
    "a list": "[3]",
    "an object": "{}",
    "a text of a number": "3",
    "a huge integer": str(2**70),
    "not a number": "NaN",
}
TIMES = {100.0, 110.0, 120.0, 60.0, 3.0}
"""The medians that are stored, and the number that SQLite makes of the text of one."""
OTHER = PROBLEM.replace(batch=7)
SOUND = PROBLEM.replace(seq_q=2048, seq_k=2048)
"""A problem whose rows are never damaged, nor is anything that they refer to."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A database with rows in every table. Those of SOUND refer to rows of their own."""
    path = tmp_path_factory.mktemp("damage") / "whole.db"
    with TuningDB.open(path) as db:
        fill(db)
        fill_fleet(db)
        own = schedule(128, 128)
        tools, device = (replace(TOOLCHAIN, nvvm="13.4.99"), replace(DEVICE, driver="590.9"))
        sound = measurement(60.0, problem=SOUND, schedule=own, fingerprint="d" * 24, device=device)
        number = db.record_measurement(None, "attention", "abc", tools, sound)
        db.put_entry(
            entry(
                "measured",
                problem=SOUND,
                schedule=own,
                fingerprint="d" * 24,
                toolchain=tools,
                device_name=DEVICE.name,
                regime="burst",
                measurement_id=number,
                updated_at=START,
            )
        )
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        yield (
            path,
            [(table, row) for table in TABLES for (row,) in connection.execute(f"SELECT min(rowid) FROM {table}")],
        )


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    """Shipped data of one small table, since hundreds of commands and calls here read all that ships."""
    folder, whole = tmp_path_factory.mktemp("little"), data_files.tuning_db()
    for name in ("migrations", *(each.relative_to(whole) for each in whole.glob("model/*/*.json"))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(whole / name)
    (folder / TABLE).parent.mkdir(parents=True)
    with TuningDB.open(folder / "ships.db") as db:
        fill(db)
        export_table(db, folder / TABLE, "sm_90", "attention")
    listed = {"schema_version": 1, "files": {TABLE: {"sha256": manifest.sha256((folder / TABLE).read_bytes())}}}
    (folder / "manifest.json").write_text(json.dumps(listed))
    return folder


@pytest.fixture
def plain(monkeypatch, tmp_path, little):
    """No warning was given yet, no database of the user is read, and little ships, none of which is damaged."""
    monkeypatch.setattr(rows_module, "_warned", set())
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data_files, "tuning_db", lambda: little)


def damaged(whole, path, table, row, columns, what) -> bool:
    """Make a copy in which values of a row are others. False where no column takes such a value."""
    shutil.copy(whole, path)
    taken = []
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        connection.execute("PRAGMA synchronous=OFF")
        for column in columns:
            value = "CAST(? AS TEXT)" if what == "bad UTF-8" and column in row_type(table).kind._fields else "?"
            with contextlib.suppress(sqlite3.Error):
                connection.execute(f"UPDATE {table} SET {column} = {value} WHERE rowid = ?", (DAMAGE[what], row))
                taken.append(column)
    return bool(taken)


OTHERS = {table for table in TABLES if table.startswith("fleet_")} | {"runs", "kernel_views"}
"""Tables that nothing reads of what is measured and served: all columns of a row may be damaged at once."""


def cases(table):
    """Each column of a table with each kind of damage; all columns together of a table that is not read."""
    columns = [tuple(TABLES[table])] if table in OTHERS else [(each,) for each in TABLES[table]]
    return itertools.product(columns, DAMAGE)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_what_is_not_damaged_is_served(table, whole, tmp_path, plain, caplog):
    path, first = whole
    row, copy = dict(first)[table], tmp_path / "copy.db"
    for columns, what in cases(table):
        if not damaged(path, copy, table, row, columns, what):
            continue
        rows_module._warned.clear()
        caplog.clear()
        with TuningDB.open(copy, read_only=True) as db:
            found, taken = db.entries(), db.measurements(disturbed=True, latest=False)
            problems = [each for each, _ in db.measurements_by_problem("sm_90", Attention)]
            db.failures(), db.landscapes(), db.artifacts()
            db.find_builds("attention", "abc", TOOLCHAIN, "sm_90")
        where = (table, columns, what)
        assert SOUND in {each.problem for each in found}, where
        assert SOUND in problems, where
        assert {each.median_us for each in found if each.measurement} <= TIMES, where
        assert {each.measurement.median_us for each in taken} <= TIMES, where
        served = load_table(Settings(db=str(copy)), kernel=Attention, archs={"sm_90"})
        assert served.resolve(SOUND, "sm_90", DEVICE.name).entry.median_us == 60.0, where
        messages = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
        assert len(messages) <= (table not in OTHERS), (where, messages)
        assert all(
            re.fullmatch(rf"\d+ damaged rows? of {re.escape(str(copy))} left out; .*db check.*", each)
            for each in messages
        )
        if messages:
            with TuningDB.open(copy, read_only=True) as db:
                assert any(line.startswith(f"{table} ") or f" {table} " in line for line in db.check()), where


COMMANDS = (
    ["show", "attention", "--arch", "sm_90"],
    ["show", "--layers"],
    ["show", "--landscapes"],
    ["explain", "-p", "B=4,H=32,S=1024,D=64", "--arch", "sm_90"],
    ["db", "check"],
    ["db", "export"],
    ["report", "attention", "--arch", "sm_90", "-o", "report"],
    ["compare", "{db}", "{whole}"],
)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_no_command_fails_at_a_damaged_row(command, whole, tmp_path, plain, capsys, monkeypatch):
    path, first = whole
    copy = tmp_path / "copy.db"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEDSCHED_DB", str(copy))
    words = [each.format(db=copy, whole=path) for each in command]
    columns = [
        (table, row, column) for table, row in first if not table.startswith("fleet_") for column in TABLES[table]
    ]
    if command[0] in ("report", "compare"):  # which take seconds
        columns = [each for each in columns if each[0] in ("measurements", "entries")][::7]
    for (table, row, column), what in zip(columns, itertools.cycle(DAMAGE)):
        if damaged(path, copy, table, row, [column], what):
            assert main(words) in (0, 1), (table, column, what)
            said = capsys.readouterr()
            assert "Traceback" not in said.err, (table, column, what)
            assert not re.search(r"\b(inf|nan)\b us", said.out), (table, column, what)


def test_the_check_names_the_row_its_column_and_why(whole, tmp_path):
    path, _ = whole
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    wrong = {
        ("measurements", "1", "median_us"): "'abc'",
        ("measurements", "2", "conditions"): "'{'",
        ("entries", "1", "model_us"): "-1",
        ("entries", "2", "toolchain_id"): "'000000000000'",
        ("builds", "1", "created_at"): "'never'",
        ("fleet_leases", "1", "attempts"): "-1",
        ("schedules", schedule().id, "knobs"): "CAST(x'ff' AS TEXT)",
        ("runs", "1", "command"): "'[1]'",
        ("artifacts", f"sm_90 {'f' * 24}", "facts"): "'{}'",
    }
    with TuningDB.open(copy) as db:
        assert db.check() == []
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        for (table, row, column), value in wrong.items():
            where = f"fingerprint = '{row.split()[1]}'" if table == "artifacts" else f"id = '{row}'"
            connection.execute(f"UPDATE {table} SET {column} = {value} WHERE {where}")
    with TuningDB.open(copy, read_only=True) as db:
        found = db.check()
    for table, row, column in wrong:
        assert any(line.startswith(f"{table} {row}: its {column}") for line in found), (table, column, found)


def test_another_measurement_counts_where_the_newest_is_damaged(tmp_path, plain):
    with TuningDB.open(tmp_path / "x.db") as db:
        for us in (100.0, 110.0):
            db.record_measurement(None, "attention", "abc", TOOLCHAIN, measurement(us))
        with db.writing() as session:
            session.execute(sa.text("UPDATE measurements SET ci_low_us = -1 WHERE median_us = 110.0"))
        (found,) = db.landscape(PROBLEM, DEVICE.name, "burst")
        assert found.measurement.median_us == 100.0


def test_what_is_sound_is_merged(whole, tmp_path, plain):
    path, _ = whole
    copy = tmp_path / "copy.db"
    damaged(path, copy, "measurements", 1, ["median_us"], "text")
    with TuningDB.open(tmp_path / "new.db") as db:
        done = merge_database(db, copy)
        assert done.measurements_added == 2
        assert {each.problem for each in db.entries()} == {SOUND, PROBLEM.replace(causal=True)}


def test_the_columns_are_those_of_the_models():
    """Also which of them may be empty, and which hold JSON."""
    assert TABLES.keys() == Base.metadata.tables.keys()
    for name, table in Base.metadata.tables.items():
        assert set(TABLES[name]) == set(table.columns.keys()), name
        assert row_type(name).json.keys() == {
            each.name
            for each in table.columns
            if isinstance(each.type, sa.JSON) or isinstance(getattr(each.type, "impl", None), sa.JSON)
        }, name
        for column in table.columns:
            assert (type(None) in get_args(TABLES[name][column.name])) == column.nullable, (name, column.name)


@pytest.mark.slow
def test_a_server_holds_rows_to_the_same(tmp_path, plain, caplog):
    with new_url("postgresql", tmp_path) as url, TuningDB.open(url) as db:
        fill(db)
        for change in ("median_us = 'NaN' WHERE id = 1", "ci_high_us = 'Infinity' WHERE id = 2"):
            with db.writing() as session:
                session.execute(sa.text(f"UPDATE measurements SET {change}"))
        with db.writing() as session:
            session.execute(sa.text("UPDATE entries SET rivals = '[3]' WHERE provenance = 'modelled'"))
        assert db.entries() == db.measurements() == []
        assert len(caplog.records) == 1
        assert {line.partition(":")[0] for line in db.check()} >= {"measurements 1", "measurements 2", "entries 2"}


@pytest.mark.parametrize("near", [False, True])
def test_a_view_without_end_costs_its_layer(whole, tmp_path, plain, near):
    shutil.copy(whole[0], tmp_path / "copy.db")
    names = ", ".join(f"i AS {name}" for name in TABLES["entries"])
    endless = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {names} FROM n"
    with closing(sqlite3.connect(tmp_path / "copy.db", isolation_level=None)) as connection:
        connection.execute("ALTER TABLE entries RENAME TO others")
        connection.execute(f"CREATE VIEW entries AS {endless}")
    began = time.monotonic()
    settings = Settings(db=str(tmp_path / "copy.db"))
    shipped, mine = layers(settings, {"sm_90"}, Attention, near=near, limit_s=0.3)
    assert time.monotonic() - began < 30
    assert shipped.entries
    assert "did not end in time" in mine.error
    assert str(tmp_path / "copy.db") in mine.error


# Many entries


def near(path, monkeypatch, problem):
    """What is served with every entry read, and with those near the problem alone."""
    found = []
    for many in (10_000, 0):
        monkeypatch.setattr(stored, "MANY", many)
        table = load_table(Settings(db=str(path)), kernel=Attention, archs={"sm_90"})
        found.append(table.resolve(problem, "sm_90", DEVICE.name))
    return found


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "many.db"
    with TuningDB.open(path) as db:
        for place in range(60):
            problem = PROBLEM.replace(seq_q=256 * (1 + place), seq_k=256 * (1 + place), causal=place % 2 == 1)
            best = schedule((64, 128)[place % 2], (32, 64, 128)[place % 3], occupancy=1 + place % 2)
            taken = measurement(50.0 + place, problem=problem, schedule=best, fingerprint=f"{place:024x}")
            number = db.record_measurement(None, "attention", "abc", TOOLCHAIN, taken)
            made = entry("measured", problem=problem, schedule=best, fingerprint=f"{place:024x}", measurement_id=number)
            db.put_entry(made.replace(device_name=DEVICE.name, regime="burst", updated_at=START))
            db.put_entry(entry(problem=problem.replace(batch=3), schedule=schedule(), fingerprint="", updated_at=START))
    return path


@pytest.mark.parametrize("length", [256, 300, 1024, 2000, 2001, 5000, 15360, 15361, 40000])
@pytest.mark.parametrize("causal", [False, True])
def test_the_entries_near_a_problem_serve_it_as_all_do(many, monkeypatch, length, causal):
    problem = PROBLEM.replace(seq_q=length, seq_k=length, causal=causal, batch=3 if length % 2 else 4)
    every, some = near(many, monkeypatch, problem)
    assert (some.schedule, some.provenance, some.reason) == (every.schedule, every.provenance, every.reason)
    assert some.entry == every.entry


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("which", ["id < (SELECT max(id) FROM problems)", "1 = 1"], ids=["all but one", "all"])
def test_near_entries_with_damaged_problems_are_left_out(many, tmp_path, plain, monkeypatch, what, which):
    shutil.copy(many, tmp_path / "copy.db")
    of_them = f"problem_id IN (SELECT id FROM problems WHERE {which})"
    with closing(sqlite3.connect(tmp_path / "copy.db", isolation_level=None)) as connection:
        for change in (f"problems SET dims = ? WHERE {which}", f"measurements SET conditions = ? WHERE {of_them}"):
            with contextlib.suppress(sqlite3.IntegrityError):
                connection.execute(f"UPDATE {change}", (DAMAGE[what],))
    every, some = near(tmp_path / "copy.db", monkeypatch, PROBLEM)
    assert (some.schedule, some.provenance, some.reason) == (every.schedule, every.provenance, every.reason)


def test_a_call_reads_a_database_without_sqlalchemy(many):
    code = """if True:
        import sys
        from tiledsched.core.config import Settings
        from tiledsched.kernels.attention import Attention
        from tiledsched.serve.entries import layers, load_table
        table = load_table(Settings(db=sys.argv[1]), kernel=Attention, archs={"sm_90"})
        print("sqlalchemy" in sys.modules, "NVIDIA Sample" in table.device_names("sm_90"))
    """
    done = subprocess.run([sys.executable, "-c", code, str(many)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
