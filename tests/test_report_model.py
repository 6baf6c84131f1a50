"""The report's numbers, from databases whose times are made up by a formula or by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_samples import DEVICE, PROBLEM, SOURCE, TOOLCHAIN, add_raced, add_times, plain, report_of, taken

from tiledsched.store.db import TuningDB
from tiledsched.store.records import Entry


def only(report):
    assert len(report.measured.problems) == 1
    return report.measured.problems[0]


@pytest.mark.parametrize("at_hand", ["13.4.12", "13.5.37"])
def test_a_refresh_under_another_compiler_does_not_hide_the_landscape(db, monkeypatch, at_hand):
    """Four schedules under 13.4.12, two under 13.5.37 since: the four are shown; where 13.5.37 alone was timed, its two."""
    monkeypatch.setattr("tiledsched.report.model.compiler_at_hand", lambda: at_hand)
    refreshed = PROBLEM.replace(seq_q=512, seq_k=512)
    newer = replace(TOOLCHAIN, tileiras="13.5.37")
    add_times(db, {plain(128, 64): 100.0, plain(128, 128): 110.0, plain(64, 64): 150.0, plain(64, 32): 400.0})
    for problem in (PROBLEM, refreshed):
        for schedule, us in ((plain(128, 64), 99.0), (plain(64, 64), 90.0)):
            number = db.record_measurement(None, "attention", SOURCE, newer, taken(schedule, us, problem=problem))
        db.put_entry(
            Entry(
                kernel="attention",
                arch="sm_90",
                problem=problem,
                provenance="measured",
                schedule=schedule,
                device_name=DEVICE.name,
                regime="burst",
                source_hash=SOURCE,
                toolchain=newer,
                measurement_id=number,
            )
        )
    report = report_of(db, "sm_90")
    whole, new = sorted(report.measured.problems, key=lambda one: -one.programs)
    assert [one.us for one in whole.timed] == [100.0, 110.0, 150.0, 400.0]
    assert [one.us for one in new.timed] == [90.0, 99.0]
    assert new.served.compiler == "13.5.37"
    assert report.elsewhere == 2


def test_overlapping_intervals_are_ties(db):
    add_times(db, {plain(128, 64): 100.0, plain(64, 64): 100.5, plain(128, 128): 120.0})
    one = only(report_of(db, "sm_90"))
    assert (one.serves.schedule, one.leader.schedule) == (
        plain(64, 64),
        plain(64, 64),
    )  # the default ties with the fastest
    assert one.ties == {plain(128, 64)}
    assert one.runner_up.schedule == plain(128, 128)
    assert one.runner_up_drop == pytest.approx(120 / 100.5 - 1)


def test_the_race_decides_ties_where_it_ran(db):
    """Medians 3% apart, intervals apart, but the race, which pairs samples, called it a tie."""
    ids = add_times(db, {plain(128, 64): 100.0, plain(64, 64): 103.0, plain(128, 128): 110.0})
    db.put_entry(
        Entry(
            kernel="attention",
            arch="sm_90",
            problem=PROBLEM,
            device_name=DEVICE.name,
            regime="burst",
            provenance="measured",
            schedule=plain(64, 64),
            ties=(plain(128, 64),),
            toolchain=TOOLCHAIN,
            measurement_id=ids[plain(64, 64)],
            source_hash=SOURCE,
        )
    )
    one = only(report_of(db, "sm_90"))
    assert one.best.schedule == plain(128, 64)
    assert one.served.schedule == one.serves.schedule == one.leader.schedule == plain(64, 64)
    assert (one.ties, one.faster) == ({plain(128, 64)}, None)
    assert one.runner_up_drop == pytest.approx(110 / 103 - 1)


def test_one_machine_code_on_two_grids_is_two_programs(db):
    a, b = (plain(128, 64, persistent=True, occupancy=n) for n in (1, 2))
    add_times(db, {a: 100.0, b: 120.0}, fingerprints={a: "f" * 24, b: "f" * 24})
    one = only(report_of(db, "sm_90"))
    assert one.programs == 2
    assert one.runner_up_drop == pytest.approx(0.2)


def test_newest_measurement_counts(db):
    add_times(db, {plain(128, 64): 100.0, plain(64, 64): 110.0})
    add_times(db, {plain(128, 64): 121.0})
    one = only(report_of(db, "sm_90"))
    assert one.best.schedule == plain(64, 64)
    assert one.runner_up_drop == pytest.approx(0.10)


def timed_apart(served_us, fastest_us=100.0, **raced):
    """The report on a problem whose entry serves another schedule than the fastest that was timed."""
    with TuningDB.open(":memory:") as db:
        times = {plain(128, 64): fastest_us, plain(64, 64): served_us, plain(128, 128): 150.0}
        add_raced(db, times, plain(64, 64), **raced)
        return only(report_of(db))


@pytest.mark.parametrize(
    ("served_us", "raced", "leader", "faster"),
    [
        (100.9, {}, (64, 64), False),  # within 1%: a tie, and what is served leads
        (104.0, {}, (128, 64), True),  # surely slower than another, which is said
        (104.0, {"ties": (plain(128, 64),)}, (64, 64), False),  # the race, which timed both in turn, decides
        (100.4, {"runner_up": plain(128, 64), "margin": 0.004}, (64, 64), False),  # which the fastest lost
    ],
)
def test_what_is_served_leads_unless_another_is_surely_faster(served_us, raced, leader, faster):
    one = timed_apart(served_us, **raced)
    assert one.explained.schedule == one.serves.schedule == plain(64, 64)
    assert one.serves.relative == pytest.approx(served_us / 100.0)
    assert (one.leader.schedule, bool(one.faster)) == (plain(*leader), faster)
    assert one.tiles[0].tile == leader


def test_what_would_be_served_without_tuning_leaves_out_the_problem_and_its_equals(db):
    """The entry of a problem that is the same work, of twice the batch and half the heads, is left out, too."""
    add_raced(db, {plain(128, 64): 100.0, plain(64, 64): 110.0, plain(128, 128): 150.0}, plain(128, 64))
    for problem, winner in (
        (PROBLEM.replace(batch=2 * PROBLEM.batch, heads=PROBLEM.heads // 2, kv_heads=PROBLEM.heads // 2), (128, 64)),
        (PROBLEM.replace(seq_q=2 * PROBLEM.seq_q, seq_k=2 * PROBLEM.seq_k), (128, 128)),
    ):
        add_raced(db, {plain(*winner): 50.0}, plain(*winner), problem=problem)
    one = next(each for each in report_of(db).measured.problems if each.problem == PROBLEM)
    assert (one.untuned.schedule, one.untuned.provenance) == (plain(128, 128), "transferred")
    assert one.untuned.relative == pytest.approx(1.5)
