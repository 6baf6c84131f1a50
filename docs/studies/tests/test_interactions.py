"""Interactions of knobs: planted ones are found, chance is not, and the known one on the H200 is."""

from __future__ import annotations

import itertools
import random

import pytest
from report_samples import plain

from docs.studies.interactions import interactions
from tiledsched.core import data_files
from tiledsched.store.exchange import read_table


def times(us):
    """A full grid over five knobs, timed by a function."""
    grid = itertools.product((64, 128), (32, 64, 128), (0, 2), (0, 4), ("no", "strided"))
    schedules = [plain(m, n, latency_k=k, latency_v=v, persistent=p) for m, n, k, v, p in grid]
    return [(schedule, us(schedule)) for schedule in schedules]


def test_a_planted_interaction_is_found() -> None:
    def us(schedule):
        noise = random.Random(schedule.id).uniform(0.995, 1.005)
        return 100.0 * noise * (1.2 if schedule["latency_k"] == 2 and schedule["persistent"] == "strided" else 1.0)

    first, *_ = interactions([times(us), times(us)])
    assert {first.knob, first.circumstance.split("=")[0]} <= {"latency_k", "persistent"}
    assert sorted([first.effect_with, first.effect_without]) == pytest.approx([0.0, 0.2], abs=0.01)


def test_effects_that_only_add_up_are_no_interaction() -> None:
    assert (
        interactions([times(lambda s: 100.0 * (1.2 if s["latency_k"] else 1.0) * (1.1 if s["latency_v"] else 1.0))])
        == ()
    )


def test_slow_programs_do_not_count() -> None:
    def us(schedule):  # an interaction among programs that take twice the time of the best
        slow = 2.0 if schedule["tile_m"] == 128 else 1.0
        return 100.0 * slow * (1.3 if schedule["tile_m"] == 128 and schedule["latency_k"] == 2 else 1.0)

    assert [one for one in interactions([times(us)]) if one.knob == "latency_k"] == []


def test_latency_hints_matter_for_the_persistent_kernel_of_128x128() -> None:
    paths = sorted((data_files.tuning_db() / "landscapes" / "attention").glob("h200_burst_*_d128_*.json.xz"))
    recorded = [
        [(one.measurement.schedule, one.measurement.median_us) for one in read_table(path).measurements]
        for path in paths
    ]
    found = {one.knob: one for one in interactions(recorded)}
    hint = found["latency_k"]
    assert hint.circumstance == "tile=128x128, persistent"
    assert hint.effect_with > 0.1
    assert abs(hint.effect_without) < 0.03
