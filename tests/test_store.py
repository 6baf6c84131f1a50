"""What every backend must do: SQLite in a file and in memory, PostgreSQL where there is a server."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa
from store_samples import (
    BACKENDS,
    DEVICE,
    FAILURE,
    PROBLEM,
    START,
    TOOLCHAIN,
    artifact,
    build,
    entry,
    fill,
    measurement,
    new_url,
    problem_class,
    runs,
    schedule,
    stored,
)

from tiledsched.build.toolchain import Toolchain
from tiledsched.core.errors import DatabaseError, Failure, FailureKind
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Conditions
from tiledsched.store import queries
from tiledsched.store.db import TuningDB
from tiledsched.store.engine import HEAD
from tiledsched.store.models import ProblemRow, RunRow
from tiledsched.store.records import LandscapeSummary

BUILT = ("attention", "abc", TOOLCHAIN, "sm_90")
"""What :func:`build` builds: kernel, source, compiler and arch."""
NEWER = Toolchain(cuda_tile="1.8.0", tileiras="13.5", ptxas="13.5", nvvm="13.5")


@pytest.fixture(params=[*BACKENDS, "memory"])
def db(request, tmp_path):
    with new_url(request.param, tmp_path) as url, TuningDB.open(url) as opened:
        yield opened


def record(db, taken):
    return db.record_measurement(None, "attention", "abc", TOOLCHAIN, taken)


def test_a_new_database_is_empty_sound_and_at_head(db):
    assert db.schema_revision == HEAD
    assert db.check() == []
    assert db.entries() == db.measurements() == db.failures() == runs(db) == db.landscapes() == []
    assert db.upgrade() == HEAD


def test_a_mistake_of_the_caller_is_not_called_damage(db):
    with pytest.raises(TypeError, match="of the caller"), db.reading():
        raise TypeError("of the caller")


def test_builds_come_back_by_schedule_and_class_and_replace_those_before(db):
    odd = problem_class(signature="0" * 12)
    made = [
        build(),
        build(artifact("e" * 24), problem_class=odd),
        build(FAILURE, sched=schedule(256, 256)),
        build(sched=schedule(persistent=True)),
        build(sched=schedule(persistent=1)),  # another schedule, although 1 == True
    ]
    db.record_builds(made)
    found = db.find_builds(*BUILT)
    assert found == {one.key: one for one in made}
    assert {type(found[one.key].schedule["persistent"]) for one in made[3:]} == {bool, int}
    for place, other in enumerate(("attn", "abd", NEWER, "sm_80")):
        assert db.find_builds(*BUILT[:place], other, *BUILT[place + 1 :]) == {}
    for again in (build(artifact(registers=200), seconds=2.0), build(FAILURE), build(artifact(registers=200))):
        db.record_builds([again])
        assert db.find_builds(*BUILT)[again.key] == again
    assert db.artifacts("sm_90")["sm_90", "f" * 24].facts == again.facts


def test_a_run_starts_and_ends(db):
    number = db.start_run({"arch": "sm_90"}, "sm_90", {"gpu": "none"})
    (run,) = runs(db)
    assert (run.id, run.status, run.command, run.finished_at) == (number, "running", {"arch": "sm_90"}, None)
    assert run.host["gpu"] == "none"
    assert run.host["pid"] == os.getpid()
    db.finish_run(number, "failed")
    assert runs(db)[0].status == "failed"
    assert runs(db)[0].finished_at >= run.started_at
    with pytest.raises(DatabaseError, match="running"):
        db.finish_run(number, "running")


@pytest.mark.parametrize(
    ("where", "status"),
    [
        ({}, "running"),
        ({"pid": 2**22 + 1}, "interrupted"),  # beyond Linux's largest
        ({"pid": 2**22 + 1, "hostname": "elsewhere"}, "running"),
        (
            {"host": {"pid_started": -1}},
            "interrupted" if sys.platform == "linux" else "running",
        ),  # the number was reused
    ],
)
def test_a_run_whose_process_is_gone_is_interrupted_by_the_next(db, where, status):
    number = db.start_run({}, "sm_90")
    with db.writing() as session:
        session.execute(sa.update(RunRow).where(RunRow.id == number).values(status="running", **where))
    db.start_run({}, "sm_90")
    assert [run.status for run in runs(db)] == ["running", status]


def test_measurements_come_back_whole_and_newest_first(db):
    run = db.start_run({}, "sm_90")
    first = measurement(100.0)
    second = measurement(90.0, accuracy=None, runner="replay")
    numbers = [db.record_measurement(run, "attention", "abc", TOOLCHAIN, taken) for taken in (first, second)]
    found = db.measurements()
    assert [one.measurement for one in found] == [second, first]
    assert [one.id for one in found] == numbers[::-1]
    assert {(one.run_id, one.kernel, one.source_hash, one.toolchain) for one in found} == {
        (run, "attention", "abc", TOOLCHAIN)
    }
    assert all(one.created_at.utcoffset() == timedelta(0) for one in found)


def test_measurements_are_found_by_each_of_their_properties(db):
    record(db, measurement(100.0))
    for name, mine, other in (
        ("problem", PROBLEM, PROBLEM.replace(causal=True)),
        ("arch", "sm_90", "sm_80"),
        ("device_name", DEVICE.name, "x"),
        ("regime", "burst", "sustained"),
        ("fingerprint", "f" * 24, "0"),
        ("kernel", "attention", "x"),
        ("runner", "gpu", "replay"),
        ("run_id", None, 7),
    ):
        assert len(db.measurements(**{name: mine})) == 1, name
        assert db.measurements(**{name: other}) == [], name


def test_the_latest_measurement_of_each_program_makes_the_landscape(db):
    def latest():
        return [one.measurement.median_us for one in db.landscape(PROBLEM, DEVICE.name, "burst")]

    for taken in (
        measurement(100.0),
        measurement(110.0, device=replace(DEVICE, driver="590.1")),  # the same program, measured again
        measurement(80.0, schedule=schedule(64), fingerprint="e" * 24),
        measurement(70.0, regime="sustained"),
        measurement(60.0, problem=PROBLEM.replace(causal=True)),
    ):
        record(db, taken)
    assert latest() == [80.0, 110.0]
    record(db, measurement(95.0, schedule=schedule(persistent=True)))  # the same machine code, another grid
    assert latest() == [80.0, 95.0, 110.0]
    db.record_measurement(None, "attention", "ab" * 8, NEWER, measurement(85.0))  # the same machine code
    assert latest() == [80.0, 85.0, 95.0]
    held = db.measurements(PROBLEM, "sm_90", DEVICE.name, "burst", fingerprint="f" * 24, latest=True)
    assert [one.measurement.median_us for one in held] == [85.0, 95.0]
    assert db.landscapes("sm_80") == db.landscapes(kernel="x") == []
    assert len(db.landscapes("sm_90", "attention")) == 3
    line = LandscapeSummary(
        problem=PROBLEM, device_name=DEVICE.name, arch="sm_90", regime="burst", distinct_programs=3, measurements=5
    )
    assert line in db.landscapes(), "one machine code at two grids is two programs"


def test_failures_are_rows_with_kind_and_message(db):
    fill(db)
    measured, built = db.failures()
    assert (built.stage, built.failure, built.problem, built.fingerprint, built.device_name) == (
        *("build", FAILURE, None, "", ""),
    )
    assert (measured.problem, measured.fingerprint, measured.device_name) == (PROBLEM, "e" * 24, DEVICE.name)
    assert db.failures(arch="sm_80") == []
    assert db.failures(problem=PROBLEM) == db.failures(stage="measure") == [measured]
    with pytest.raises(DatabaseError, match="stage"):
        db.record_failure(None, "attention", "sm_90", "launch", schedule(), FAILURE)
    for kind in FailureKind:
        db.record_failure(None, "attention", "sm_90", "measure", schedule(), Failure(kind=kind, message="é" * 5000))
    assert {one.failure.kind for one in db.failures()} == set(FailureKind)


def test_an_entry_comes_back_with_its_evidence(db):
    number = record(db, measurement(100.0))
    put = entry(
        "measured",
        device_name=DEVICE.name,
        regime="burst",
        measurement_id=number,
        runner_up=schedule(64),
        margin=0.25,
        ties=(schedule(occupancy=2), schedule(occupancy=4)),
        updated_at=START,
    )
    assert db.put_entry(put)
    (got,) = db.entries()
    assert got.replace(measurement=None) == put
    assert (got.median_us, got.measurement.samples, got.measurement.device) == (100.0, 5, DEVICE)
    assert got.measurement.conditions == measurement().conditions
    assert got.measurement.accuracy == measurement().accuracy
    assert got.measurement.toolchain == TOOLCHAIN
    assert got.to_json()["measurement"]["median_us"] == 100.0


def test_a_weaker_entry_never_replaces_a_stronger(db):
    for provenance, match in (("guessed", "guessed"), ("measured", "names no measurement")):
        with pytest.raises(DatabaseError, match=match):
            db.put_entry(entry(provenance))
    number = record(db, measurement(100.0))
    for new, is_stored in (
        (entry("default"), True),
        (entry("modelled"), True),
        (entry("default"), False),
        (entry("transferred", measurement_id=number), True),
        (entry("measured", measurement_id=number), True),
        (entry("transferred"), False),
        (entry("modelled"), False),
        (entry("measured", measurement_id=number, candidates=8), True),  # as strong: the last word holds
    ):
        assert db.put_entry(new) == is_stored
    (got,) = db.entries()
    assert (got.provenance, got.candidates) == ("measured", 8)


def test_entries_are_kept_apart_by_every_part_of_their_key(db):
    for changes in (
        {},
        {"kernel": "other"},
        {"arch": "sm_80"},
        {"problem": PROBLEM.replace(causal=True)},
        {"device_name": "x"},
        {"regime": "burst"},
        {"accum_mode": "fp16"},
    ):
        assert db.put_entry(entry(**changes))
        assert entry(**changes).key in {got.key for got in db.entries(**changes)}
    assert len(db.entries()) == 7
    assert [got.arch for got in db.entries(arch="sm_80")] == ["sm_80"]
    assert db.entries(provenance="measured") == []


def test_failures_are_forgotten_and_nothing_else_is(db):
    killed = replace(FAILURE, kind=FailureKind.COMPILER_KILLED)
    db.record_builds(
        [
            build(),
            build(FAILURE, sched=schedule(256)),
            build(killed, sched=schedule(512)),
            build(FAILURE, sched=schedule(256), arch="sm_80"),
        ]
    )
    db.record_failure(
        None, "attention", "sm_90", "measure", schedule(), replace(FAILURE, kind=FailureKind.HANG), problem=PROBLEM
    )
    assert db.forget_failures("sm_121") == db.forget_failures(kernel="matmul") == 0
    assert db.forget_failures("sm_90", "attention", "compiler_killed") == 1
    assert db.forget_failures("sm_90") == 2
    assert (db.forget_failures(), db.forget_failures()) == (1, 0)
    (left,) = db.find_builds(*BUILT).values()
    assert left.failure is None
    assert db.failures() == []
    assert db.check() == []


def test_writers_in_threads_lose_nothing(db):
    if ":memory:" in db.url or db.url == "sqlite://":
        pytest.skip("one connection: an in-memory database is for one thread")

    def write(start):
        for i in range(start, start + 20):
            db.record_builds([build(sched=schedule(tile_m=i))])

    with ThreadPoolExecutor() as threads:
        list(threads.map(write, (0, 100, 200)))
    assert len(db.find_builds(*BUILT)) == 60


def test_check_names_what_was_changed_behind_our_back(db):
    fill(db)
    assert db.check() == []
    with db.writing() as session:
        session.execute(sa.text("UPDATE entries SET fingerprint = NULL WHERE provenance = 'measured'"))
        session.execute(sa.text("UPDATE entries SET provenance = 'magic' WHERE provenance = 'modelled'"))
        session.execute(sa.text("UPDATE problems SET kernel = 'other' WHERE id = :id"), {"id": PROBLEM.id})
        changed = sa.text("""UPDATE schedules SET knobs = '{"tile_m": 1}' WHERE id = :id""")
        session.execute(changed, {"id": schedule().id})
    found = "\n".join(db.check())
    for expected in (
        "of another fingerprint",
        "'magic'",
        f"problems {PROBLEM.id}: it does not",
        f"schedules {schedule().id}: it does not",
    ):
        assert expected in found


def test_failed_writes_leave_nothing(db):
    with pytest.raises(DatabaseError, match="constraint"):
        db.record_measurement(12345, "attention", "abc", TOOLCHAIN, measurement())  # no such run
    with pytest.raises(DatabaseError, match="names no measurement"):
        db.merge([stored()], [entry("measured", updated_at=START)])
    assert db.measurements() == []
    assert db.artifacts() == {}


def test_knob_effects_count_pairs_that_differ_in_one_knob():
    made = [
        build(artifact("a" * 24), sched=schedule(64, occupancy=1)),
        build(artifact("a" * 24), sched=schedule(64, occupancy=2)),
        build(artifact("a" * 24), sched=schedule(64, occupancy=4)),
        build(artifact("b" * 24), sched=schedule(128, occupancy=1)),
        build(artifact("b" * 24), sched=schedule(128, occupancy=2)),
        build(FAILURE, sched=schedule(128, occupancy=4)),
        build(artifact("c" * 24), sched=schedule(64, occupancy=1), problem_class=problem_class(causal=True)),
    ]
    effects = {each.knob: (each.pairs, each.same, each.inert) for each in queries.knob_effects(made)}
    assert {knob: effects[knob] for knob in ("occupancy", "tile_m", "tile_n")} == {
        "occupancy": (4, 4, True),
        "tile_m": (2, 0, False),
        "tile_n": (0, 0, False),
    }


def test_what_a_kernel_with_other_fields_left_behind_stops_nothing(db):
    """An author renames a field: problems from before are read as values, and are of no kernel known here."""
    record(db, measurement(100.0))
    with db.writing() as session:
        row = session.scalars(sa.select(ProblemRow)).one()
        row.dims = {"length": 7, "dtype": "float16"}
    (found,) = db.measurements()
    assert not found.measurement.problem.known
    assert (found.measurement.problem.length, found.measurement.problem.flops) == (7, 0.0)
    assert [line.problem for line in db.landscapes()] == [found.measurement.problem]
    assert queries.compare_regimes(db.measurements(latest=True)) == []


def test_rows_of_a_problem_that_had_another_name_are_found_under_todays(db):
    """A single row under a mask that hides nothing was stored as causal; today it is the problem without a mask."""
    today = Attention.problem(seq_q=1, seq_k=512, head_dim=64)
    once = Problem(Attention, {**today.values, "causal": True, "alignment": "bottom_right"})
    assert once.id != today.id
    number = record(db, measurement(100.0, problem=once))
    db.put_entry(entry("measured", problem=once, measurement_id=number, device_name=DEVICE.name))
    db.record_failure(None, "attention", "sm_90", "measure", schedule(), FAILURE, problem=once)
    assert [each.problem for each in db.entries()] == [today]
    assert len(db.entries(problem=today)) == len(db.measurements(today)) == len(db.failures(problem=today)) == 1
    faster = record(db, measurement(50.0, problem=today, schedule=schedule(tile_m=64), fingerprint="a" * 24))
    mine = entry(
        "measured", problem=today, measurement_id=faster, schedule=schedule(tile_m=64), device_name=DEVICE.name
    )
    db.put_entry(mine.replace(fingerprint="a" * 24))
    assert [each.schedule for each in db.entries()] == [schedule(tile_m=64)]
    assert len(db.landscape(today, DEVICE.name, "burst")) == 2


def test_what_was_timed_beside_others_is_kept_and_not_answered(db):
    def taken(median_us, **conditions):
        return measurement(median_us, conditions=Conditions(sm_clock_mhz=1980, **conditions))

    record(db, taken(100.0, others=(815,)))
    record(db, taken(101.0, others=(815,), concurrent_pids=None))
    record(db, taken(90.0, others=(815, 4711), concurrent_pids=(4711,)))
    record(db, measurement(80.0, regime="sustained", conditions=Conditions(concurrent_pids=(4711,))))
    assert [one.measurement.median_us for one in db.measurements(PROBLEM)] == [101.0, 100.0]
    assert [one.measurement.median_us for one in db.measurements(PROBLEM, latest=True)] == [101.0]
    assert db.measurements(PROBLEM)[0].measurement.conditions == Conditions(
        sm_clock_mhz=1980, others=(815,), concurrent_pids=None
    )
    everything = db.measurements(PROBLEM, disturbed=True)
    assert [one.measurement.conditions.concurrent_pids for one in everything] == [(4711,), (4711,), None, ()]
    assert [(line.regime, line.measurements) for line in db.landscapes()] == [("burst", 2)]
    assert db.check() == []
