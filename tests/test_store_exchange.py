"""Tables as JSON and merging databases."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from store_samples import (
    DEVICE,
    PROBLEM,
    START,
    TOOLCHAIN,
    artifact,
    build,
    entry,
    fill,
    measurement,
    new_url,
    schedule,
    stored,
)

from tiledsched.checking.accuracy import Accuracy
from tiledsched.cli import main
from tiledsched.core.config import Settings
from tiledsched.core.errors import DatabaseError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Conditions
from tiledsched.serve.entries import layers
from tiledsched.store.codec import decode, encode
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_table, import_table, landscape_file_name, merge_database, parse_table
from tiledsched.store.location import database_exists
from tiledsched.store.records import Entry, MergeResult, StoredMeasurement


@pytest.fixture
def db(tmp_path):
    with TuningDB.open(tmp_path / "tuning.db") as opened:
        fill(opened)
        yield opened


@pytest.fixture
def table(db, tmp_path):
    assert export_table(db, tmp_path / "sm_90.json") == 2
    return tmp_path / "sm_90.json"


def portable(entries):
    """What of entries has the same value in every database."""
    return [
        one.replace(measurement_id=None, run_id=None, measurement=one.measurement and one.measurement.uid)
        for one in entries
    ]


def test_a_table_goes_out_and_in_unchanged(db, table, tmp_path):
    with TuningDB.open(tmp_path / "other.db") as other:
        assert import_table(other, table) == MergeResult(entries_added=2, measurements_added=1)
        assert import_table(other, table) == MergeResult(entries_kept=2, measurements_kept=1)
        assert portable(other.entries()) == portable(db.entries())
        (got,), wanted = other.measurements(), {one.uid: one for one in db.measurements()}
        assert (got.measurement, got.created_at) == (wanted[got.uid].measurement, wanted[got.uid].created_at)
        assert other.artifacts() == {("sm_90", "f" * 24): db.artifacts()["sm_90", "f" * 24]}
        assert other.check() == []
        export_table(other, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == table.read_bytes()


def test_the_text_is_for_review(db, table):
    text = table.read_text()
    data = json.loads(text)
    assert data["schema_version"] == 2
    assert list(data) == sorted(data)
    assert max(len(line) for line in text.splitlines() if "samples_us" not in line) <= 120
    assert len([line for line in text.splitlines() if '"samples_us"' in line]) == 1
    assert text.endswith("}\n")
    db.put_entry(entry(arch="sm_80"))
    out = io.StringIO()
    assert export_table(db, out, "sm_80") == 1
    assert [row["arch"] for row in json.loads(out.getvalue())["entries"]] == ["sm_80"]


def test_a_kernel_that_is_not_known_here_goes_out_and_in(tmp_path):
    problem = problem_from_json({"kernel": "elsewhere:Norm", "rows": 7, "experts": [3, 4], "biased": True})
    with TuningDB.open(tmp_path / "a.db") as db, TuningDB.open(tmp_path / "b.db") as other:
        number = db.record_measurement(None, problem.kernel, "abc", TOOLCHAIN, measurement(50.0, problem=problem))
        db.put_entry(entry("measured", kernel=problem.kernel, problem=problem, measurement_id=number, updated_at=START))
        assert db.entries(problem=problem)[0].problem == problem
        assert db.entries()[0].tflops == 0.0
        export_table(db, tmp_path / "t.json")
        assert import_table(other, tmp_path / "t.json") == MergeResult(entries_added=1, measurements_added=1)
        assert portable(other.entries()) == portable(db.entries())
        assert other.check() == []


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (
            Attention.problem(seq_q=4096, seq_k=4096, head_dim=128, causal=True, batch=4, heads=16, kv_heads=16),
            "h200_burst_s4096_d128_float16_causal_b4_h16",
        ),
        (
            Attention.problem(
                seq_q=1, seq_k=512, head_dim=64, value_dim=32, heads=8, kv_heads=2, lse=True, dtype="bfloat16"
            ),
            "h200_burst_sq1_sk512_d64-32_bfloat16_full_b1_h8-2_lse",
        ),
        (
            Attention.problem(seq_q=7, seq_k=9, head_dim=64, causal=True, alignment="bottom_right"),
            "h200_burst_sq7_sk9_d64_float16_bottom-right_b1_h1",
        ),
        (
            Problem("my lib.norms:RmsNorm", {"rows": 7, "experts": (3, 4), "dtype": "float16", "biased": False}),
            "h200_burst_my-lib.norms-RmsNorm_rows7_experts3-4_float16_no-biased",
        ),
    ],
)
def test_a_landscapes_file_is_called(problem, name):
    assert landscape_file_name(problem, "NVIDIA H200", "burst") == f"{name}.json.xz"


def test_a_long_name_ends_in_the_problems_id():
    problem = Problem("k", {"experts": tuple(range(100, 200))})
    name = landscape_file_name(problem, "NVIDIA H200", "burst").removesuffix(".json.xz")
    assert len(name) == 200
    assert name.endswith(f"_{problem.id}")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda data: data.pop("schema_version"), "schema_version"),
        (lambda data: data.update(schema_version=99), "schema_version"),
        (lambda data: data.update(extra=1), "extra"),
        (lambda data: data.pop("entries"), "entries"),
        (lambda data: data["entries"].append(7), "entries[2]"),
        (lambda data: data["entries"].append(data["entries"][0]), "entries[2]"),
        (lambda data: data["entries"][0].pop("kernel"), "entries[0].kernel"),
        (lambda data: data["entries"][0].update(colour="red"), "entries[0].colour"),
        (lambda data: data["entries"][0].update(candidates="many"), "entries[0].candidates"),
        (lambda data: data["entries"][0].update(candidates=True), "entries[0].candidates"),
        (lambda data: data["entries"][0].update(provenance="guessed"), "entries[0].provenance"),
        (lambda data: data["entries"][0].update(measurement=None), "entries[0].measurement"),
        (lambda data: data["entries"][0].update(measurement="0"), "entries[0].measurement"),
        (lambda data: data["entries"][0].update(updated_at="2026-01-01"), "entries[0].updated_at"),
        (lambda data: data["entries"][0].update(updated_at=None), "entries[0].updated_at"),
        (lambda data: data["entries"][0].update(run_id=1), "entries[0].run_id"),
        (lambda data: data["entries"][0].update(fingerprint="0"), "entries[0].fingerprint"),
        (lambda data: data["entries"][0]["problem"].update(head_dim=0), "entries[0].problem"),
        (lambda data: data["entries"][0]["schedule"].update(tile_m=1.5), "entries[0].schedule"),
        (lambda data: data["measurements"][0]["measurement"]["problem"].pop("kernel"), "measurement.problem"),
        (lambda data: data["measurements"].append(data["measurements"][0]), "measurements[1].uid"),
        (lambda data: data["measurements"][0]["measurement"].update(median_us="x"), "measurement.median_us"),
        (
            lambda data: data["measurements"][0]["measurement"]["accuracy"].update(worst_tile=["x"]),
            "accuracy.worst_tile",
        ),
        (lambda data: data["artifacts"][0]["facts"].pop("threads"), "artifacts[0].facts.threads"),
        # What a reader of the database calls damaged is not stored either.
        (lambda data: data["artifacts"][0].update(cubin_bytes=-1), "artifacts[0].cubin_bytes"),
        (lambda data: data["entries"][0].update(candidates=-1), "entries[0].candidates"),
        (lambda data: data["entries"][0].update(model_us=1e13), "entries[0].model_us"),
        (lambda data: data["entries"][0].update(margin=1e301), "entries[0].margin"),
        (lambda data: data["entries"][0].update(updated_at="0001-01-01T00:00:00+14:00"), "entries[0].updated_at"),
        (lambda data: data["entries"][0].update(source="\ud800"), "surrogates"),
    ],
)
def test_a_wrong_table_is_refused_by_key(table, change, key):
    data = json.loads(table.read_text())
    change(data)
    table.write_text(json.dumps(data))
    with TuningDB.open(":memory:") as other:
        with pytest.raises(DatabaseError) as error:
            import_table(other, table)
        assert other.entries() == other.measurements() == []
    assert key in str(error.value)
    assert "sm_90.json" in str(error.value)


def test_merging_a_database_takes_all_its_evidence(db, tmp_path):
    with pytest.raises(DatabaseError, match="no database"):
        merge_database(db, tmp_path / "missing.db")
    assert not (tmp_path / "missing.db").exists()
    with TuningDB.open(tmp_path / "other.db") as other:
        other.put_entry(entry("modelled", regime="burst", device_name=DEVICE.name))
        other.record_builds([build(artifact("f" * 24))])
        result = merge_database(other, tmp_path / "tuning.db")
        assert result == MergeResult(entries_added=1, entries_replaced=1, measurements_added=2)
        assert portable(other.entries()) == portable(db.entries())
        assert {one.run_id for one in other.measurements()} == {None}
        assert merge_database(other, tmp_path / "tuning.db") == MergeResult(entries_kept=2, measurements_kept=2)
        assert other.check() == []


@settings(max_examples=20, deadline=None)
@given(
    samples=st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=20),
    reasons=st.lists(st.text(max_size=20), max_size=3),
    tile=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)
def test_records_survive_json(samples, reasons, tile):
    accuracy = tile and Accuracy(max_abs_error=0.5, worst_tile_error=1e-9, worst_tile=tile, repeatable=False)
    taken = stored(
        median_us=samples[0],
        samples_us=tuple(samples),
        accuracy=accuracy,
        conditions=Conditions(throttle_reasons=tuple(reasons)),
    )
    assert decode(StoredMeasurement, json.loads(json.dumps(encode(taken))), "x") == taken
    one = entry("measured", measurement=taken.summary, ties=(schedule(), schedule(7)), updated_at=START)
    assert decode(Entry, json.loads(json.dumps(encode(one))), "x") == one


@pytest.mark.parametrize(
    "told", [{}, {"others": (815,)}, {"others": (815,), "beside": None}, {"others": (7, 8), "beside": (7,)}]
)
def test_who_else_was_on_the_gpu_is_written_where_somebody_was(told, db, tmp_path):
    renamed = {"concurrent_pids" if key == "beside" else key: value for key, value in told.items()}
    conditions = Conditions(sm_clock_mhz=1980, **renamed)
    written = json.loads(json.dumps(encode(conditions)))
    assert set(written) & {"others", "beside", "concurrent_pids"} == set(told)
    assert decode(Conditions, written, "x") == conditions
    number = db.record_measurement(None, "attention", "abc", TOOLCHAIN, measurement(50.0, conditions=conditions))
    db.put_entry(entry("measured", device_name="other", regime="burst", measurement_id=number, updated_at=START))
    with TuningDB.open(tmp_path / "other.db") as other:
        merge_database(other, tmp_path / "tuning.db")
        everything = {one.uid: one for one in db.measurements(disturbed=True)}
        for each in other.measurements(disturbed=True):
            assert each.measurement == everything.pop(each.uid).measurement
        assert not everything
    out = io.StringIO()
    export_table(db, out)
    if not told.get(
        "beside"
    ):  # an entry on times that decide nothing is none: no tune writes it, and no file may hold it
        assert conditions in [one.measurement.conditions for one in parse_table(out.getvalue(), "x").measurements]


@pytest.mark.parametrize("word", ["entries", "measurements", "artifacts"])
def test_a_row_in_another_encoding_is_named(table, word):
    text = table.read_bytes()
    after = text.index(b'"', text.index(b': "', text.index(f'"{word}"'.encode()))) + 1
    with pytest.raises(DatabaseError, match=r"sm_90.json(: \w+\[0\])? is not in UTF-8: .*; give JSON"):
        parse_table(text[:after] + b"\xe9" + text[after:], "sm_90.json")


def test_an_entry_cannot_stand_on_times_beside_others(table):
    data = json.loads(table.read_text())
    data["measurements"][0]["measurement"]["conditions"] |= {"others": [7], "beside": [7]}
    with pytest.raises(
        DatabaseError, match=r"entries\[\d\].measurement: \w+ was timed beside process 7 on the GPU, which"
    ):
        parse_table(json.dumps(data), "sm_90.json")
    for wrong in ([7.5], ["x"], 7):
        data["measurements"][0]["measurement"]["conditions"]["beside"] = wrong
        with pytest.raises(DatabaseError, match=r"conditions\.beside"):
            parse_table(json.dumps(data), "sm_90.json")


# Merging by evidence: whatever the order, the grouping and the number of times, the same entries from the same measurements

PROBLEMS = (PROBLEM, PROBLEM.replace(causal=True))
HOLDS = {"device_name": DEVICE.name, "regime": "burst"}


@st.composite
def pieces(draw) -> tuple[list[StoredMeasurement], list[Entry]]:
    """What one database brings: measured and modelled entries with few different times, so that many are equal."""
    measurements, entries = {}, {}
    for _ in range(draw(st.integers(1, 4))):
        problem, tile, us = (
            draw(st.sampled_from(PROBLEMS)),
            draw(st.sampled_from((64, 128))),
            draw(st.sampled_from((90.0, 100.0))),
        )
        day = timedelta(days=draw(st.integers(0, 3)))
        if draw(st.booleans()):
            uid = f"{PROBLEMS.index(problem)}{tile:03}{us:03.0f}{day.days}".rjust(24, "0")
            taken, one = measured(
                uid, us, created_at=START + day, problem=problem, schedule=schedule(tile), fingerprint=f"{tile:024}"
            )
            measurements[uid] = taken[0]
            new = one[0].replace(problem=problem, updated_at=START + day, source=f"day {day.days}")
        else:
            new = entry(
                "modelled", problem=problem, schedule=schedule(tile), model_us=us, updated_at=START + day, **HOLDS
            )
        entries[new.key] = new
    return list(measurements.values()), list(entries.values())


def state(db: TuningDB) -> str:
    """All that a merge may change, without numbers that mean something here only."""
    entries = [
        {**each.to_json(), "measurement_id": None, "measurement": each.measurement and each.measurement.uid}
        for each in db.entries()
    ]
    return json.dumps([entries, sorted(each.uid for each in db.measurements())], sort_keys=True)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(pieces(), min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_the_fastest_that_came_is_served_whatever_the_order_grouping_and_repetition(brought, rng) -> None:
    with TuningDB.open(":memory:") as one, TuningDB.open(":memory:") as other, TuningDB.open(":memory:") as part:
        for piece in brought:
            one.merge(*piece)
        shuffled = [*brought, rng.choice(brought)]
        rng.shuffle(shuffled)
        for piece in shuffled[:2]:  # merged elsewhere first
            part.merge(*piece)
        for piece in shuffled[2:]:
            other.merge(*piece)
        other.merge(part.measurements(), part.entries())
        assert state(one) == state(other)
        before = state(one)
        one.merge(other.measurements(), other.entries())
        assert state(one) == before
        for got in one.entries():  # of all that came, the strongest, and of these the fastest
            offered = [each for _, entries in brought for each in entries if each.key == got.key]
            assert (got.rank, got.median_us or got.model_us) == min(
                (each.rank, each.median_us or each.model_us) for each in offered
            )


def measured(uid: str, us: float, **changes) -> tuple[list[StoredMeasurement], list[Entry]]:
    """A measurement and the entry on it, as a merge takes them."""
    taken = stored(uid.rjust(24, "0"), median_us=us, **changes)
    one, new = taken.measurement, entry("measured", updated_at=START, **HOLDS)
    return [taken], [new.replace(measurement=taken.summary, schedule=one.schedule, fingerprint=one.fingerprint)]


def test_contradictions_are_told_whichever_way_they_meet() -> None:
    """A program was measured at two times, or a faster one was measured and is not served."""
    fast, slow = measured("b", 100.0), measured("a", 110.0)  # by name the slower would come first
    beaten = stored("c".rjust(24, "0"), median_us=80.0, schedule=schedule(64), fingerprint="e" * 24)
    for first, second in ((fast, slow), (slow, fast)):
        with TuningDB.open(":memory:") as db:
            assert db.merge(*first).contradictions == ()
            (found,) = db.merge(*second).contradictions
            assert (found.entry.median_us, found.median_us, found.schedule) == (100.0, 110.0, found.entry.schedule)
            (found,) = db.merge([beaten], second[1]).contradictions
            assert (found.median_us, found.schedule) == (80.0, schedule(64))
            assert "lost to 64x64" in str(found)


@pytest.mark.parametrize(("us", "accuracy"), [(98.0, True), (80.0, False)], ids=["within the spread", "never checked"])
def test_what_decides_nothing_contradicts_nothing(us, accuracy) -> None:
    served = measured("a", 100.0)
    changes = {} if accuracy else {"accuracy": None}
    other = stored("c".rjust(24, "0"), median_us=us, schedule=schedule(64), fingerprint="e" * 24, **changes)
    with TuningDB.open(":memory:") as db:
        db.merge(*served)
        assert db.merge([other], served[1]).contradictions == ()


def test_the_command_takes_several_and_says_what_to_race(tmp_path, capsys) -> None:
    for name, us in (("a", 100.0), ("b", 130.0)):
        with TuningDB.open(tmp_path / f"{name}.db") as db:
            db.merge(*measured(name, us))
    target = str(tmp_path / "all.db")
    assert main(["db", "import", "--db", target, str(tmp_path / "b.db"), str(tmp_path / "a.db")]) == 0
    said = capsys.readouterr().out
    assert "entries: 1 added, 1 replaced, 0 kept; measurements: 2 added, 0 known" in said
    assert "served with 100.00 us, was also measured at 130.00 us" in said
    assert "let a race decide: tiledsched tune attention --arch sm_90 --regime burst -p S=1024,D=64" in said
    assert main(["db", "import", "--db", target, str(tmp_path / "b.db"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["entries_kept"], told["contradictions"][0]["median_us"]) == (1, 130.0)


WRITER = """
import sys
sys.path[:0] = {path!r}
from store_samples import DEVICE, PROBLEM, START, entry, schedule, stored
from tiledsched.store.db import TuningDB
mine = int(sys.argv[1])
with TuningDB.open({url!r}) as db:
    for turn in range(4):
        problems = [PROBLEM.replace(batch=1 + (turn + step) % 8) for step in range(5)]
        if mine % 2:
            problems.reverse()
        taken = [stored(f"{{mine:02}}{{turn:02}}{{each.values['batch']:020}}", problem=each, median_us=100.0 + mine) for each in problems]
        db.merge(taken, [entry("measured", problem=each, device_name=DEVICE.name, regime="burst", updated_at=START).replace(
            measurement=one.summary) for each, one in zip(problems, taken)])
        db.put_entry(entry("modelled", problem=PROBLEM.replace(batch=20 + turn), model_us=50.0 + mine))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["file", "postgresql"])
def test_writers_of_a_new_database_lose_nothing_and_stop_no_reader(backend, tmp_path) -> None:
    with new_url(backend, tmp_path) as url:
        program, seen = WRITER.format(path=sys.path, url=url), 0
        running = [
            subprocess.Popen([sys.executable, "-c", program, str(each)], stderr=subprocess.PIPE, text=True)
            for each in range(4)
        ]
        while any(each.poll() is None for each in running):
            if backend == "file" and database_exists(url):
                (*_, mine) = layers(Settings(db=url), (), "attention")
                assert seen <= len(mine.entries)
                seen = len(mine.entries)
            time.sleep(0.05)
        assert [(each.communicate(timeout=100)[1], each.returncode) for each in running] == [("", 0)] * 4
        with TuningDB.open(url) as db:
            assert len(db.measurements()) == 4 * 4 * 5
            entries = db.entries(provenance="measured")
            assert [each.median_us for each in entries] == [100.0] * 8
            assert len(db.entries(provenance="modelled")) == 4
            assert db.check() == []
