"""A report of a large database: how much it keeps, that it says the same as all measurements do, and that it takes little."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from report_samples import DEVICE, PROBLEM, SOURCE, TOOLCHAIN, report_of, taken

from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.report import landscapes
from tiledsched.report.text import document
from tiledsched.store.db import TuningDB
from tiledsched.store.records import StoredMeasurement

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
