"""Reports, comparisons, imports and checks of a large database: how much they keep of it, that they say the same as all
measurements do, and that they take little.
"""

from __future__ import annotations

import gc
import itertools
import json
import signal
import sqlite3
import threading
import time
import tracemalloc
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from report_samples import DEVICE, PROBLEM, SOURCE, TOOLCHAIN, report_of, taken

from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.report import WithShipped, build_report, comparison_sources, landscapes, sources
from tiledsched.report.comparison_sources import Wanted, compare_sources
from tiledsched.report.text import document
from tiledsched.store import health, writing
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import SCHEMA_VERSION, import_table, merge_database, written
from tiledsched.store.queries import Comparable, TimedRow
from tiledsched.store.records import Entry, StoredMeasurement

WHEN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def stored(number, measurement):
    return StoredMeasurement(
        uid=f"{number:024x}",
        kernel="attention",
        source_hash=SOURCE,
        toolchain=TOOLCHAIN,
        measurement=measurement,
        created_at=WHEN + timedelta(seconds=number),
    )


@pytest.fixture(scope="module")
def large():
    """Twenty problems of 50 schedules each, all measured six times: only the last time is one apart."""
    schedules = [
        one
        for one in itertools.islice(space_for("sm_90", Attention).schedules(PROBLEM), 400)
        if one["accum_mode"] == "fp32"
    ][:50]
    problems = [PROBLEM.replace(seq_q=64 * n, seq_k=64 * n) for n in range(1, 21)]
    made = [
        taken(schedule, 100.0 + place - (turn == 5), problem=problem)
        for turn in range(6)
        for problem in problems
        for place, schedule in enumerate(schedules)
    ]
    with TuningDB.open(":memory:") as db:
        db.merge([stored(number, one) for number, one in enumerate(made)], [])
        yield db, schedules


def test_what_is_read_is_what_is_stored(large):
    db, _ = large
    all_of = {one.uid: one for one in db.measurements(arch="sm_90", kernel=Attention)}
    read = [one for _, found in db.measurements_by_problem("sm_90", Attention) for one in found]
    assert sum(db.measured_problems("sm_90", Attention).values()) == len(read) == len(all_of)
    for one in read[::100]:
        whole = all_of[one.uid]
        assert len(one.measurement.samples_us) == len(whole.measurement.samples_us)
        with pytest.raises(ValueError, match="were not read"):
            list(one.measurement.samples_us)
        samples = whole.measurement.samples_us
        assert replace(one, measurement=replace(one.measurement, samples_us=samples)) == whole


def test_the_newest_measurement_of_each_schedule_counts(large):
    db, _ = large
    tracemalloc.start()
    for _, found in db.measurements_by_problem("sm_90", Attention):
        assert len(found) == 300
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    started = time.process_time()
    report = report_of(db)
    took = time.process_time() - started
    assert len(report.measured.problems) == 20
    for one in report.measured.problems:
        assert [each.us for each in one.timed] == [99.0 + place for place in range(50)]
        assert one.programs == 50
    (conditions,) = report.conditions
    assert (conditions.measurements, conditions.samples, conditions.device.name) == (6000, 30_000, DEVICE.name)
    # Both bounds are several times what it takes here.
    assert took < 6000 * 0.005
    assert most < 6000 * 2_000


def test_of_too_many_programs_those_that_decide_are_listed(large, monkeypatch):
    db, _ = large
    monkeypatch.setattr(landscapes, "MOST_LISTED", 20 * 20)
    whole, report = report_of(db), None
    monkeypatch.undo()
    report, whole = whole, report_of(db)
    for some, every in zip(report.measured.problems, whole.measured.problems, strict=True):
        assert 20 <= len(some.timed) < len(every.timed) == 50
        assert some.timed[:10] == every.timed[:10]
        assert some.timed[-1] == every.timed[-1]
        assert [each.tile for each in some.tiles] == [each.tile for each in every.tiles]
        assert [each.us for each in some.tiles] == [each.us for each in every.tiles]
        assert (some.programs, some.median_us) == (50, every.median_us)


@pytest.mark.parametrize("device", [None, DEVICE.name])
def test_what_is_counted_is_what_whole_measurements_say(large, device, monkeypatch):
    """Two compilers, GPUs and runs, clocks held down, and programs in both accumulator modes."""
    _, schedules = large
    other = replace(TOOLCHAIN, tileiras="13.3.1")
    with TuningDB.open(":memory:") as db:
        runs = [db.start_run({}, "sm_90") for _ in range(2)]
        number, made = itertools.count(), []
        for turn, (count, compiler, name) in enumerate(
            [
                (40, TOOLCHAIN, DEVICE.name),
                (50, other, DEVICE.name),
                (45, TOOLCHAIN, "GPU 2"),
                (45, TOOLCHAIN, DEVICE.name),
            ]
        ):
            for place, one in enumerate(schedules[:count]):
                mode = one if place % 3 else one.replace(accum_mode="fp16")
                us, clock = 100.0 + place * 7 % 50 + turn, 1980 - 700 * (place == 9)
                own = taken(mode, us, device=name, clock=clock, reasons=("sw_power_cap",) * (place == 9))
                found = replace(stored(next(number), own), toolchain=compiler, run_id=runs[turn % 2])
                made.append(found)
        db.merge(made, [])
        monkeypatch.setattr(landscapes, "MOST_LISTED", 16)
        report = report_of(db, device_name=device)
        read = db.measurements_by_problem
        monkeypatch.setattr(db, "measurements_by_problem", lambda arch, kernel, choose, above: read(arch, kernel))
        whole = report_of(db, device_name=device)
    assert len(report.measured.problems) == (2 if device else 4)
    for some, every in zip(report.measured.problems, whole.measured.problems, strict=True):
        assert vars(some) == vars(every)
        assert len(some.timed) < some.programs
    assert replace(report, measured=whole.measured) == whole
    assert any("This report lists" in getattr(block, "text", "") for block in document(report))


@pytest.mark.parametrize(
    ("sizes", "most"), [([], 40_000), ([300] * 100, 40_000), ([2000] * 500, 80), ([10, 10**6, 10**6], 19_995)]
)
def test_small_landscapes_stay_whole(sizes, most):
    assert landscapes._most_each(sizes, 40_000) == most


def living(kind):
    """The number of objects of a class."""
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.fixture
def fewest(monkeypatch):
    """The most measurements that are in memory when rows are inserted, fifty at a time."""
    found, insert = [0], writing.insert_missing

    def watched(session, model, rows):
        found[0] = max(found[0], living(StoredMeasurement))
        insert(session, model, rows)

    monkeypatch.setattr(writing, "AT_ONCE", 50)
    monkeypatch.setattr(writing, "insert_missing", watched)
    gc.collect()
    gc.freeze()  # else each look goes through the millions of objects that other tests left
    return found


def programs(large, problem, us=100.0, first=0, device=DEVICE.name):
    """One measurement of each of the schedules, of which the first is the fastest."""
    _, schedules = large
    return [
        stored(first + place, taken(each, us + place, problem=problem, device=device))
        for place, each in enumerate(schedules)
    ]


def entry(best):
    """The entry that serves a measurement."""
    own = best.measurement
    return Entry(
        kernel="attention",
        arch="sm_90",
        problem=own.problem,
        device_name=own.device.name,
        regime="burst",
        provenance="measured",
        schedule=own.schedule,
        fingerprint=own.fingerprint,
        measurement=best.summary,
        toolchain=TOOLCHAIN,
        source_hash=SOURCE,
        updated_at=WHEN,
    )


@pytest.mark.slow
def test_an_import_holds_a_few_rows_at_a_time(large, fewest, tmp_path):
    """A thousand rows of a table, and of a database; the entries find their measurements among them."""
    problems = [PROBLEM.replace(seq_q=64 * n) for n in range(1, 21)]
    made = [programs(large, each, first=1000 * (n + 1)) for n, each in enumerate(problems)]
    table = {
        "artifacts": [],
        "entries": [written(entry(each[0])) for each in made],
        "measurements": [written(one) for each in made for one in each],
        "schema_version": SCHEMA_VERSION,
    }
    (tmp_path / "table.json").write_text(json.dumps(table))
    del made, table
    gc.collect()
    before = living(StoredMeasurement)
    with TuningDB.open(tmp_path / "one.db") as one, TuningDB.open(tmp_path / "two.db") as two:
        done = import_table(one, tmp_path / "table.json")
        assert (done.measurements_added, done.entries_added) == (1000, 20)
        assert 0 < fewest[0] - before < 200
        assert merge_database(two, tmp_path / "one.db") == done
        assert fewest[0] - before < 700  # what the reader of a database holds is 500 rows
        assert [each.key for each in two.entries()] == [each.key for each in one.entries()]
        assert one.check() == two.check() == []


def test_an_import_that_is_wrong_at_its_end_stores_nothing(large, fewest, tmp_path):
    rows = [written(one) for one in programs(large, PROBLEM)]
    rows[-1]["measurement"]["median_us"] = 1.0
    table = {"artifacts": [], "entries": [], "measurements": rows, "schema_version": SCHEMA_VERSION}
    (tmp_path / "table.json").write_text(json.dumps(table))
    with TuningDB.open(tmp_path / "one.db") as db:
        with pytest.raises(Exception, match="is not that of its samples"):
            import_table(db, tmp_path / "table.json")
        assert db.measurements() == []


def test_of_what_is_stored_only_what_may_contradict_is_read(large):
    with TuningDB.open(":memory:") as db:
        made = programs(large, PROBLEM)
        db.merge(made, [entry(made[10])])
        with db.rows() as (session, rows):
            (served,) = db.entries()
            found = Comparable(rows, session).measurements(served)
        # Intervals of half a percent: up to 108 us a program is surely faster than the one of 110 us.
        assert {one.measurement.median_us for one in found} == {*(100.0 + place for place in range(9)), 110.0}
        (contradiction,) = db.merge(made[:1], [entry(made[10])]).contradictions
        assert contradiction.median_us == 100.0


def test_a_comparison_holds_some_problems_at_a_time(large, tmp_path, monkeypatch):
    problems = [PROBLEM.replace(seq_q=64 * n) for n in range(1, 11)]
    for name, factor in (("a.db", 1.0), ("b.db", 1.1)):
        with TuningDB.open(tmp_path / name) as db:
            made = [
                programs(large, each, 100.0 * factor, 1000 * (n + 1) + (name == "b.db") * 500)
                for n, each in enumerate(problems)
            ]
            db.merge([one for each in made for one in each], [entry(each[0]) for each in made[:5]])
    names = [str(tmp_path / name) for name in ("a.db", "b.db")]
    whole = compare_sources(*names, None, Wanted())  # all at a time
    most, parts = [0], comparison_sources.compare_parts

    def watched(*words):
        most[0] = max(most[0], living(TimedRow))
        assert living(StoredMeasurement) == before
        return parts(*words)

    gc.collect()
    before = living(StoredMeasurement)
    monkeypatch.setattr(comparison_sources, "MOST_AT_ONCE", 100)
    monkeypatch.setattr(comparison_sources, "compare_parts", watched)
    found = compare_sources(*names, None, Wanted())
    assert found.rows == whole.rows
    assert sorted(found.drift) == sorted(whole.drift)
    assert len(found.rows) == 10
    assert 0 < most[0] <= 2 * 2 * 100 + 50


def test_two_gpus_of_one_database_are_found_out_while_it_is_read(large, tmp_path, monkeypatch):
    """The first problems have both GPUs, and so have all."""
    monkeypatch.setattr(comparison_sources, "MOST_AT_ONCE", 1)
    with TuningDB.open(tmp_path / "a.db") as db:
        for n in range(1, 4):
            for place, device in enumerate(("GPU one", "GPU two")):
                made = programs(large, PROBLEM.replace(seq_q=64 * n), 100.0 + place, 1000 * n + 500 * place, device)
                db.merge(made, [entry(made[0])])
    found = compare_sources(f"{tmp_path / 'a.db'}@one", f"{tmp_path / 'a.db'}@two", None, Wanted())
    assert [(row.a.device, row.b.device, row.ratio) for row in found.rows] == [("GPU one", "GPU two", 1.01)] * 3
    assert found.unpaired == ()


@pytest.mark.parametrize("limits", [{"MOST_PROBLEMS": 6}, {"MOST_MEASUREMENTS": 6 * 300 + 1}])
def test_a_report_on_many_problems_reads_and_names_those_tuned_last(large, monkeypatch, limits):
    db, schedules = large
    for name, limit in limits.items():
        monkeypatch.setattr(sources, name, limit)
    read, whole = [], db.measurements_by_problem

    def watched(*words, **more):
        for problem, found in whole(*words, **more):
            read.append(problem)
            yield problem, found

    monkeypatch.setattr(db, "measurements_by_problem", watched)
    monkeypatch.setattr(sources.data_files, "tuning_db", lambda: sources.Path("/nonexistent"))
    last = PROBLEM.replace(seq_q=64 * 20, seq_k=64 * 20)
    tuned = entry(stored(1, taken(schedules[0], 100.0, problem=last)))
    report = build_report(WithShipped(db, Attention, "sm_90", [tuned]), "sm_90", Attention)
    assert len(read) == len(report.measured.problems) == 6
    assert last in read
    assert report.left_out == 14
    text = "\n".join(getattr(block, "text", "") for block in document(report))
    assert "20 problems of this kernel are known. This report is on 6 of them" in text


def test_the_times_of_problems_are_read_through_an_index(large):
    db, _ = large
    seen = []
    with db.timed_rows(arch="sm_90") as rows:
        driver = rows._session.connection().connection.driver_connection
        driver.set_trace_callback(seen.append)
        rows.read(list(rows.problems)[:3])
        driver.set_trace_callback(None)
        queries = [each for each in seen if "FROM measurements" in each]
        assert queries
        for each in queries:
            plan = " ".join(row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {each}"))
            assert "ix_measurements_problem_id_device_id_regime" in plan
            assert "SCAN measurements" not in plan


def test_a_signal_ends_the_check_of_a_file(monkeypatch):
    """SQLite calls nobody while it checks a table, so another thread waits for it."""

    class Driver:
        def __init__(self):
            self.stopped = threading.Event()

        def execute(self, query):
            assert self.stopped.wait(20)
            raise sqlite3.OperationalError("interrupted")

        def interrupt(self):
            self.stopped.set()

    driver = Driver()
    session = SimpleNamespace(
        get_bind=lambda: SimpleNamespace(dialect=SimpleNamespace(name="sqlite")),
        connection=lambda: SimpleNamespace(connection=SimpleNamespace(driver_connection=driver)),
    )

    def end(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            health._file(session)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert driver.stopped.is_set()
    assert time.monotonic() - started < 10
