"""What was measured before there were other kernels than attention comes through the migrations, to the last entry."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections import Counter
from datetime import timezone
from pathlib import Path

import pytest
import sqlalchemy as sa
from store_samples import BACKENDS, new_url

from tiledsched.core import data_files
from tiledsched.core.canonical import stable_id
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.store import engine as engines
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import Table, export_table, read_table
from tiledsched.store.models import ProblemRow
from tiledsched.store.writing import Parents, entry_values, measurement_values

OLD_DATABASES = sorted((Path(__file__).parent / "data").glob("store_000[123].db"))
SHIPPED = data_files.tuning_db()
LANDSCAPES = sorted((SHIPPED / "landscapes" / "attention").glob("*.json.xz"))


def old_id(problem: Problem) -> str:
    """The id of a problem of attention's when it was the only kernel."""
    return stable_id({name: value for name, value in problem.to_json().items() if name != "kernel"})


def write_as_0003(engine: sa.Engine, table: Table) -> None:
    """Put what a table file holds into a database of schema 0003: fields of a problem as columns, the id without the kernel."""
    old = sa.MetaData()
    old.reflect(engine)
    parents, numbers = Parents(), {}
    measurements = [measurement_values(stored, parents) for stored in table.measurements]
    for number, row in enumerate(measurements, start=1):
        row["id"] = numbers[row["uid"]] = number
    entries = [
        entry_values(entry, numbers.get(entry.measurement and entry.measurement.uid), parents)
        for entry in table.entries
    ]
    problems = {each.measurement.problem for each in table.measurements} | {each.problem for each in table.entries}
    renamed = {problem.id: old_id(problem) for problem in problems}
    for row in entries:
        del row["compiler"]
    for row in (*measurements, *entries):
        row["problem_id"] = renamed[row["problem_id"]]
        for name in {"created_at", "updated_at"} & set(row):
            row[name] = row[name].astimezone(timezone.utc).replace(tzinfo=None)
    known = {
        model.__tablename__: list(rows.values()) for model, rows in parents.rows.items() if model is not ProblemRow
    }
    known["problems"] = [{"id": renamed[problem.id], **problem.values} for problem in problems]
    with engine.begin() as connection:
        for name, rows in {**known, "measurements": measurements, "entries": entries}.items():
            connection.execute(sa.insert(old.tables[name]), rows) if rows else None


@pytest.fixture(params=BACKENDS)
def upgraded(request, tmp_path):
    """Writes a table as schema 0003 and opens what becomes of it."""
    opened = []

    def upgrade(table: Table) -> TuningDB:
        url = engines.resolve_url(where)
        engine = engines.create_engine(url, read_only=False)
        engines.upgrade(engine, url, "0003")
        write_as_0003(engine, table)
        assert engines.current_revision(engine) == "0003"
        engine.dispose()
        opened.append(TuningDB.open(where))
        return opened[0]

    with new_url(request.param, tmp_path) as where:
        yield upgrade
        for db in opened:
            db.close()


def test_every_measured_entry_comes_through_as_measured(upgraded, tmp_path) -> None:
    path = SHIPPED / "tables" / "attention" / "sm_90.json"
    table = read_table(path)
    one = [entry for entry in table.entries if entry.compiler == "13.4.92"]  # an entry had no compiler in its key
    known = {entry.problem for entry in one}  # nor problems packed sequences
    timed = tuple(each for each in table.measurements if each.measurement.problem in known)
    table = dataclasses.replace(table, entries=tuple(one), measurements=timed)
    assert Counter(entry.provenance for entry in table.entries) == {"measured": 173}
    db = upgraded(table)
    assert db.schema_revision == engines.HEAD
    assert db.check() == []
    after = {entry.key: entry for entry in db.entries()}
    assert set(after) == {entry.key for entry in table.entries}
    for before in table.entries:
        found = after[before.key]
        assert (found.provenance, found.fingerprint, found.median_us) == (
            "measured",
            before.fingerprint,
            before.median_us,
        )
        assert found.replace(measurement=None, measurement_id=None) == before.replace(measurement=None)
        assert db.entries(problem=before.problem, device_name=before.device_name, regime=before.regime) == [found]
        held = db.measurements(before.problem, "sm_90", before.device_name, before.regime, before.fingerprint)
        assert before.measurement.uid in {stored.uid for stored in held}
    db.merge([], [], table.artifacts)  # their facts were in no row above
    export_table(db, tmp_path / "again.json")
    with TuningDB.open(tmp_path / "today.db") as today:
        today.merge(table.measurements, table.entries, table.artifacts)
        export_table(today, tmp_path / "today.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "today.json").read_bytes()


def test_every_landscape_comes_through_whole(upgraded) -> None:
    tables = [read_table(path) for path in LANDSCAPES]
    assert len(tables) == 36
    everything = Table(
        entries=(), measurements=tuple(one for each in tables for one in each.measurements), artifacts=()
    )
    db = upgraded(everything)
    assert db.check() == []
    lines = {(line.problem, line.device_name, line.regime): line for line in db.landscapes("sm_90", "attention")}
    assert len(lines) == 36
    for table in tables:
        first = table.measurements[0].measurement
        before = {
            (one.measurement.fingerprint, one.measurement.schedule, one.measurement.median_us): one.uid
            for one in table.measurements
        }
        found = db.landscape(first.problem, first.device.name, first.regime)
        assert len(found) == len(table.measurements)
        assert before == {
            (one.measurement.fingerprint, one.measurement.schedule, one.measurement.median_us): one.uid for one in found
        }
        line = lines[first.problem, first.device.name, first.regime]
        assert (line.measurements, line.distinct_programs) == (
            len(before),
            len({schedule for _, schedule, _ in before}),
        )


@pytest.mark.parametrize("old", OLD_DATABASES, ids=lambda path: path.stem)
def test_an_old_databases_problems_are_todays(old, tmp_path) -> None:
    (tmp_path / old.name).write_bytes(old.read_bytes())
    connection = sqlite3.connect(tmp_path / old.name)
    asked = (
        "SELECT provenance, fingerprint, median_us FROM entries LEFT JOIN measurements USING (fingerprint) ORDER BY 1"
    )
    before = connection.execute(asked).fetchall()
    old_ids = {identity for (identity,) in connection.execute("SELECT id FROM problems")}
    connection.close()
    assert ("measured", "f" * 24, 100.0) in before
    with TuningDB.open(tmp_path / old.name) as db, db.reading() as session:
        problems = {row.id: row for row in session.scalars(sa.select(ProblemRow))}
        for identity, row in problems.items():
            problem = problem_from_json({"kernel": row.kernel, **row.dims})
            assert problem.known
            assert problem.id == identity
            assert problem.to_json() == {"kernel": "attention", **row.dims}
        assert {old_id(entry.problem) for entry in db.entries()} == old_ids
        assert len(problems) == len(old_ids)
        assert session.execute(sa.text(asked)).fetchall() == before
        assert session.scalar(sa.text("SELECT count(*) FROM attention WHERE provenance = 'measured'")) == 1


def test_problems_of_an_unofficial_kernel_are_told_apart(tmp_path) -> None:
    """Rows of another kernel's name shared attention's problems; each takes its own along."""
    (tmp_path / "x.db").write_bytes(OLD_DATABASES[-1].read_bytes())
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("UPDATE measurements SET kernel = 'theirs' WHERE fingerprint = ?", ("e" * 24,))
    connection.close()
    with TuningDB.open(tmp_path / "x.db") as db:
        assert db.check() == []
        theirs, ours = sorted(db.measurements(), key=lambda stored: stored.kernel, reverse=True)
        assert (theirs.measurement.problem.kernel, ours.measurement.problem.kernel) == ("theirs", "attention")
        assert not theirs.measurement.problem.known
        assert theirs.measurement.problem.tflops(1.0) == 0.0
        assert dict(theirs.measurement.problem.values).items() <= dict(ours.measurement.problem.values).items()
        assert [line.problem.kernel for line in db.landscapes()] == ["attention", "theirs"]
