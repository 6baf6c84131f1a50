"""A view for each kernel: what it holds, what its columns are called, when it is made."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa
from store_samples import BACKENDS, DEVICE, PROBLEM, START, TOOLCHAIN, entry, fill, measurement, new_url, schedule

import tiledsched.core.fields as ts
from tiledsched.core.canonical import stable_id
from tiledsched.core.kernel import Kernel
from tiledsched.core.registry import SHIPPED, kernel_named
from tiledsched.store.db import TuningDB
from tiledsched.store.sql import tables
from tiledsched.store.views import FIXED, create_view, view_name

ISSUE = "select schedule from attention where arch='sm_90' and S=4096 and D=128 and dtype='float16' and causal"


class Grouped(Kernel):
    """Fields of every kind, one with the name of a column that every view has."""

    name = "it's.samples:GroupedGemm"
    experts = ts.sizes()
    M = ts.dim(constant=True)
    rows = ts.dim(7, omit_default=True)
    regime = ts.choice("dense", "sparse")
    layout = ts.choice("row", "column", omit_default=True)
    dtype = ts.dtype("float16", "bfloat16")
    biased = ts.flag()
    derived = {"twice": lambda p: 2 * p.M}
    label = {"m": "M", "both": ("M", "rows"), "T": "twice"}
    Out = ts.out("rows M")

    def entry(p, s):
        raise AssertionError("views ask no kernel for its function")


GROUPED = Grouped.problem(experts=(128, 7), M=1 << 40, biased=True)


def grouped(**changes):
    return entry(kernel=Grouped.name, problem=GROUPED, fingerprint="", toolchain=None, **changes)


@pytest.fixture(params=BACKENDS)
def db(request, tmp_path):
    with new_url(request.param, tmp_path) as url, TuningDB.open(url) as opened:
        yield opened


def ask(db, query):
    with db.reading() as session:
        return session.execute(sa.text(query)).fetchall()


def columns(db, view):
    with db.reading() as session:
        return session.execute(sa.text(f"SELECT * FROM {view}")).mappings().one()


def test_the_question_of_the_issue(db) -> None:
    assert ask(db, ISSUE) == []  # the view is there before anything is
    wanted = PROBLEM.replace(seq_q=4096, seq_k=4096, head_dim=128, causal=True)
    others = ({"causal": False}, {"seq_q": 1}, {"seq_q": 1024, "seq_k": 1024}, {"head_dim": 64}, {"dtype": "bfloat16"})
    db.put_entry(entry(problem=wanted, schedule=schedule(64, 32, occupancy=2)))
    for changes in others:
        db.put_entry(entry(problem=wanted.replace(**changes)))
    db.put_entry(entry(problem=wanted, arch="sm_80"))
    ((found,),) = ask(db, ISSUE)
    assert (json.loads(found) if isinstance(found, str) else found) == schedule(64, 32, occupancy=2).to_json()
    assert len(ask(db, "SELECT * FROM attention")) == 7
    assert ask(db, "SELECT seq_q, s FROM attention WHERE seq_q <> seq_k") == [(1, None)]


def test_a_row_says_what_is_served_and_why(db) -> None:
    number = db.record_measurement(None, "attention", "abc", TOOLCHAIN, measurement(100.0))
    db.put_entry(entry("measured", device_name=DEVICE.name, regime="burst", measurement_id=number, updated_at=START))
    row = columns(db, "attention")
    assert list(row)[: len(FIXED)] == [*FIXED]
    assert [row[name] for name in list(row)[:6]] == ["sm_90", DEVICE.name, "burst", "fp32", "13.4.12", "measured"]
    assert (row["median_us"], row["model_us"], row["fingerprint"]) == (100.0, 90.0, "f" * 24)
    assert str(row["updated_at"]).startswith("2026-01-02 03:04:05")
    assert (row["alignment"], row["value_dim"], bool(row["lse"])) == ("top_left", 0, False)  # left out of the JSON
    assert (row["b"], row["h"], row["s"], row["d"]) == (PROBLEM.batch, PROBLEM.heads, 1024, 64)


def test_fields_of_every_kind_are_columns(db) -> None:
    db.put_entry(grouped())
    row = columns(db, "grouped_gemm")
    assert row["regime"] == ""  # the entry's; the field stands beside it
    assert row["regime_"] == "dense"
    assert (row["m"], row["rows"], row["layout"], row["dtype"]) == (1 << 40, 7, "row", "float16")
    assert json.loads(row["experts"]) == [128, 7]
    assert row["both"] is None
    assert list(row)[11:] == ["experts", "m", "rows", "regime_", "layout", "dtype", "biased", "both"]
    assert len(ask(db, "SELECT 1 FROM grouped_gemm WHERE biased AND M > 5")) == 1
    assert ask(db, "SELECT 1 FROM grouped_gemm WHERE NOT biased") == []
    assert ask(db, "SELECT 1 FROM attention") == []


def test_a_kernel_that_is_not_known_gets_none_and_stops_nothing(db) -> None:
    theirs = grouped(updated_at=START).replace(kernel="elsewhere:Norm")
    assert db.put_entry(theirs)
    assert len(db.entries(kernel="elsewhere:Norm")) == 1
    assert ask(db, "SELECT name FROM kernel_views ORDER BY name") == [(name,) for name in sorted(SHIPPED)]


def test_a_name_that_is_taken_gets_a_suffix(db) -> None:
    def declared(module, **fields):
        return type(
            "Runs",
            (Kernel,),
            {"name": f"{module}:Runs", "Out": ts.out("n", dtype="int32"), "n": ts.dim(), "entry": print, **fields},
        )

    one, other = declared("one"), declared("other")
    with db.writing() as session:
        names = [create_view(session.connection(), kernel) for kernel in (one, other, Grouped, one)]
    assert names[2] == "grouped_gemm"
    assert names[0] == names[3]
    assert len(set(names)) == 3
    assert all(name.startswith("runs_") for name in names[:2])  # there is a table of that name
    assert all(ask(db, f"SELECT n FROM {name}") == [] for name in names[:2])
    wider = declared("one", width=ts.dim(3, omit_default=True))
    with db.writing() as session:
        assert create_view(session.connection(), wider) == names[0]
    assert ask(db, f"SELECT width FROM {names[0]}") == []


@pytest.mark.parametrize(
    "name", ['x"; DROP TABLE failures; --', "failures", 'attention"', "rms_norm", "", "a'b%s\\"], ids=range(6)
)
def test_the_name_of_a_view_comes_from_its_kernel_and_never_from_a_row(db, name) -> None:
    """Whoever can write to the table `kernel_views` drops nothing by it: neither tables, nor the views of other kernels."""
    with db.writing() as session:
        session.execute(sa.text("DELETE FROM kernel_views WHERE name = :name"), {"name": name})
        changed = {"name": name, "definition": "other"}
        session.execute(
            sa.text("UPDATE kernel_views SET name = :name, definition = :definition WHERE kernel = 'softmax'"), changed
        )
    before = {*tables(db)}
    with db.writing() as session:
        assert create_view(session.connection(), kernel_named("softmax")).startswith("softmax")
    assert {*tables(db)} - {"softmax"} == {*before, f"softmax_{stable_id('softmax', 6)}"} - {"softmax"}
    assert ask(db, "SELECT rows FROM softmax") == ask(db, "SELECT 1 FROM failures") == []


def test_a_view_is_made_once(tmp_path) -> None:
    def schema_version(db):
        return ask(db, "PRAGMA schema_version")[0][0]

    with TuningDB.open(tmp_path / "x.db") as db:
        before = schema_version(db)
        db.put_entry(grouped())
        assert schema_version(db) > before
    with TuningDB.open(tmp_path / "x.db") as db:
        before = schema_version(db)
        db.put_entry(grouped())
        fill(db)
        assert schema_version(db) == before
        with db.writing() as session:
            session.execute(sa.text("DROP VIEW attention"))
        db.put_entry(grouped())
    with TuningDB.open(tmp_path / "x.db") as db:
        fill(db)
        assert len(ask(db, "SELECT * FROM attention")) == 2


def test_who_may_not_make_views_still_records(tmp_path, monkeypatch) -> None:
    from tiledsched.store import database

    def refuse(connection, kernel):
        connection.exec_driver_sql("CREATE VIEW nowhere.x AS SELECT 1")

    monkeypatch.setattr(database, "create_view", refuse)
    with TuningDB.open(tmp_path / "x.db") as db:
        fill(db)
        assert len(db.entries()) == 2
        assert db.check() == []


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("attention", "attention"),
        ("mylib.norms:RmsNorm", "rms_norm"),
        ("rms:RMSNorm", "rms_norm"),
        ("a.b.GEMM2D", "gemm2d"),
        ("file:Ünïcode", "_n_code"),
        ("x:" + "A" * 80, "a" * 63),
        ("odd:", "kernel"),
    ],
)
def test_a_view_is_called_like_its_kernel(kernel, name) -> None:
    assert view_name(kernel) == name
