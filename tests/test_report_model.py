"""The report's numbers, from databases whose times are made up by a formula or by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_samples import (
    DEVICE,
    PROBLEM,
    SOURCE,
    TOOLCHAIN,
    add_builds,
    add_modelled,
    add_times,
    build_of,
    plain,
    report_of,
    taken,
)

from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.report.analysis import neighbours, size_regime
from tiledsched.report.answer import answer, next_step
from tiledsched.report.effects import value_effects
from tiledsched.store.db import TuningDB
from tiledsched.store.records import Entry


@pytest.fixture
def db():
    with TuningDB.open(":memory:") as opened:
        yield opened


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


def test_drops_match_hand_numbers(db):
    default = space_for("sm_90", Attention).default(PROBLEM)
    add_times(db, {plain(128, 64): 100.0, plain(128, 128): 110.0, default: 150.0, plain(64, 32): 400.0})
    report = report_of(db, "sm_90")
    one = only(report)
    assert one.best.schedule == plain(128, 64)
    assert one.runner_up.schedule == plain(128, 128)
    assert one.runner_up_drop == pytest.approx(0.10)
    assert one.default.schedule == default
    assert one.default_drop == pytest.approx(0.50)
    assert one.median_us == 130.0
    assert one.median_drop == pytest.approx(0.30)
    assert one.timed[-1].relative == pytest.approx(4.0)
    assert one.best.rate == pytest.approx(PROBLEM.flops / 100e-6 / 1e12)
    assert (len(one.timed), one.programs) == (4, 4)
    assert [tile.tile for tile in one.tiles] == [(128, 64), (128, 128), (64, 64), (64, 32)]
    assert one.tile_drop == pytest.approx(0.10)


def test_one_schedule_has_no_runner_up(db):
    add_times(db, {plain(128, 64): 100.0})
    report = report_of(db, "sm_90")
    one = only(report)
    assert one.runner_up is None
    assert one.runner_up_drop is None
    assert one.default is None
    assert one.default_drop is None
    assert one.tile_drop is None
    assert value_effects(one) == ()
    assert report.measured.sensitivity == ()


def test_overlapping_intervals_are_ties(db):
    add_times(db, {plain(128, 64): 100.0, plain(64, 64): 100.5, plain(128, 128): 120.0})
    one = only(report_of(db, "sm_90"))
    assert one.runner_up.schedule == plain(128, 128)
    assert one.runner_up_drop == pytest.approx(0.20)


def test_the_race_decides_ties_where_it_ran(db):
    """Medians 3% apart, intervals apart, but the race, which pairs samples, called it a tie."""
    ids = add_times(db, {plain(128, 64): 100.0, plain(64, 64): 103.0, plain(128, 128): 104.0})
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
    assert one.served.schedule == plain(64, 64)
    assert one.runner_up_drop == pytest.approx(0.04)


def test_equivalent_schedules_share_a_time(db):
    a, b = plain(128, 64), plain(128, 64, latency_k=2)
    add_builds(db, [build_of(a, "f" * 24), build_of(b, "f" * 24), build_of(plain(64, 64), "e" * 24)])
    add_times(db, {a: 100.0, plain(64, 64): 130.0}, fingerprints={a: "f" * 24, plain(64, 64): "e" * 24})
    one = only(report_of(db, "sm_90"))
    assert (len(one.timed), one.programs) == (3, 2)
    assert one.timed[1].schedule == b
    assert one.timed[1].same_program_as == a
    assert one.runner_up.schedule == plain(64, 64)
    assert one.best.facts.registers == 128
    (latency,) = (each for each in value_effects(one) if each.knob == "latency_k")
    assert (latency.value, latency.against, latency.pairs, latency.ratio) == (2, 0, 1, None)


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


def test_true_is_not_one_in_matched_pairs():
    a, b = plain(128, 64, loop_split=True), plain(128, 64, loop_split=1)
    assert list(neighbours([(a, "a"), (b, "b")], [True, True])) == [("loop_split", "a", "b")]


@pytest.mark.parametrize(
    ("size", "regime"), [(1, "short"), (1024, "short"), (2048, "medium"), (4096, "medium"), (8192, "long")]
)
def test_regimes(size, regime):
    assert size_regime(size) == regime


def test_sensitivity_joins_a_regime_by_geometric_mean(db):
    for seq_len, times in ((2048, (100.0, 110.0)), (4096, (100.0, 121.0)), (8192, (130.0, 100.0))):
        problem = Attention.standard(seq_len=seq_len, head_dim=64)
        add_times(db, dict(zip((plain(128, 64), plain(64, 64)), times, strict=True)), problem=problem)
    medium, long = report_of(db, "sm_90").measured.sensitivity
    assert (medium.regime, medium.sizes, medium.problems) == ("medium", (2048, 4096), 2)
    assert (medium.best, medium.runner_up) == ((128, 64), (64, 64))
    assert medium.drop == pytest.approx((1.10 * 1.21) ** 0.5 - 1)
    assert (long.best, long.drop) == ((64, 64), pytest.approx(0.3))


def test_fp16_accumulators_never_win_over_fp32(db):
    add_times(db, {plain(128, 64): 100.0, plain(128, 64, accum_mode="fp16"): 60.0})
    modes = {one.accum_mode: one.best.us for one in report_of(db, "sm_90").measured.problems}
    assert modes == {"fp32": 100.0, "fp16": 60.0}


def test_other_regime_and_other_devices_are_kept_apart(db):
    add_times(db, {plain(128, 64): 100.0})
    add_times(db, {plain(128, 64): 140.0}, regime="sustained")
    add_times(db, {plain(128, 64): 120.0}, device="NVIDIA H100")
    report = report_of(db, "sm_90")
    assert [(one.device_name, one.best.us) for one in report.measured.problems] == [
        ("NVIDIA H100", 120.0),
        (DEVICE.name, 100.0),
    ]
    assert report.elsewhere == 1
    assert only(report_of(db, "sm_90", device_name="NVIDIA H100")).best.us == 120.0
    nothing = report_of(db, "sm_90", regime="sustained", device_name="NVIDIA H100")
    assert answer(nothing) == (
        "Nothing of attention was measured on sm_90 (NVIDIA H100) in the sustained regime, and nothing was modelled.",
    )


def test_modelled_problems_use_the_callable(db):
    schedules = [plain(128, 64), plain(64, 64), plain(64, 32)]
    add_builds(db, [build_of(one, f"{n:024x}") for n, one in enumerate(schedules)])
    add_modelled(db, schedules[0])
    asked = []

    def model_times(problem, builds):
        asked.append(problem)
        return {build.schedule.id: 50.0 + 10 * schedules.index(build.schedule) for build in builds}

    report = report_of(db, "sm_90", model_times=model_times)
    assert asked == [PROBLEM]
    assert report.measured.problems == ()
    (one,) = report.modelled.problems
    assert one.provenance == "modelled"
    assert [timed.us for timed in one.timed] == [50.0, 60.0, 70.0]
    assert one.runner_up_drop == pytest.approx(0.2)
    assert one.best.timing is None


def test_modelled_without_the_callable_knows_winner_and_runner_up(db):
    add_modelled(db, plain(128, 64), runner_up=plain(64, 64), margin=0.25)
    (one,) = report_of(db, "sm_90").modelled.problems
    assert [timed.us for timed in one.timed] == [90.0, 112.5]
    assert one.runner_up_drop == pytest.approx(0.25)


def test_measured_problems_are_not_modelled_too(db):
    add_times(db, {plain(128, 64): 100.0})
    add_modelled(db, plain(64, 64))
    add_modelled(db, plain(64, 64), problem=PROBLEM.replace(causal=True))
    report = report_of(db, "sm_90")
    assert only(report).problem == PROBLEM
    assert [one.problem.causal for one in report.modelled.problems] == [True]


def test_transferred_entries_are_named_not_timed(db):
    db.put_entry(
        Entry(
            kernel="attention",
            arch="sm_90",
            problem=PROBLEM,
            provenance="transferred",
            schedule=plain(128, 64),
            source="nearest problem",
        )
    )
    report = report_of(db, "sm_90")
    assert report.measured.problems == report.modelled.problems == ()
    assert [entry.source for entry in report.unmeasured] == ["nearest problem"]


def test_inert_knobs(db):
    add_times(db, {plain(128, 64): 100.0})
    add_builds(
        db,
        [
            build_of(plain(128, 64), "a" * 24),
            build_of(plain(128, 64, latency_k=2), "a" * 24),
            build_of(plain(64, 64), "b" * 24),
            build_of(plain(64, 64, latency_k=2), "c" * 24),
        ],
    )
    report = report_of(db, "sm_90")
    assert [(knob.knob, knob.pairs, knob.same) for knob in report.inert] == [("latency_k", 2, 1), ("tile_m", 2, 0)]
    assert report.builds == 4


def test_failures_are_counted_once(db):
    crash = Failure(kind=FailureKind.COMPILE_ERROR, message="tileiras: error: out of registers")
    add_times(db, {plain(128, 64): 100.0})
    add_builds(db, [build_of(plain(256, 256), crash), build_of(plain(256, 128), crash)])
    db.record_failure(None, "attention", "sm_90", "build", plain(256, 256), crash)
    hang = Failure(kind=FailureKind.HANG, message="no answer for 5 s")
    for _ in range(2):
        db.record_failure(None, "attention", "sm_90", "measure", plain(64, 64), hang, problem=PROBLEM, device=DEVICE)
    counts = report_of(db, "sm_90").failures
    assert [(line.stage, line.kind, line.candidates) for line in counts] == [
        ("build", "compile_error", 2),
        ("measure", "hang", 1),
    ]
    assert counts[1].example == "no answer for 5 s"


def test_conditions(db):
    db.record_measurement(None, "attention", SOURCE, TOOLCHAIN, taken(plain(128, 64), 100.0, clock=1980))
    db.record_measurement(
        None, "attention", SOURCE, TOOLCHAIN, taken(plain(64, 64), 120.0, clock=1410, reasons=("power cap",))
    )
    (line,) = report_of(db, "sm_90").conditions
    assert line.device.name == DEVICE.name
    assert line.sm_clock_mhz == (1410, 1980)
    assert line.memory_clock_mhz is None
    assert line.throttle_reasons == (("power cap", 1),)
    assert (line.measurements, line.samples) == (2, 10)
    assert line.compilers == (TOOLCHAIN.compiler,)
    assert line.first <= line.last


def test_schedules_of_an_older_space_are_reported(db):
    """A measurement from before a knob existed has no grid to compare; it must not break the report."""
    old = plain(128, 64)
    old = type(old)({name: value for name, value in old.items() if name not in ("persistent", "num_ctas")})
    add_times(db, {old: 100.0, plain(64, 64): 110.0})
    assert only(report_of(db, "sm_90")).best.schedule == old


def test_empty_database(db):
    report = report_of(db, "sm_121")
    assert answer(report) == ("Nothing of attention was measured on sm_121, and nothing was modelled.",)
    assert next_step(report).startswith(
        "Run `tiledsched tune attention --arch sm_121`: where a GPU of sm_121 is present"
    )
    assert report.inert == report.failures == report.conditions == ()


def test_regimes_that_disagree(db):
    a, b, c, d = plain(128, 64), plain(128, 128), plain(64, 64), plain(64, 32)
    add_times(db, {a: 100.0, b: 110.0, c: 130.0, d: 50.0})
    assert report_of(db, "sm_90").regimes == ()
    add_times(db, {a: 150.0, b: 120.0, c: 300.0}, regime="sustained")  # d was measured in one regime only
    (one,) = report_of(db, "sm_90").regimes
    assert (one.programs, one.burst_winner, one.sustained_winner, one.same) == (3, a, b, False)
    assert (one.burst_loss, one.sustained_loss) == pytest.approx((150 / 120 - 1, 110 / 100 - 1))
    assert one.burst_loss_distinct
    assert one.sustained_loss_distinct
    assert one.to_json()["burst_winner"] == a.to_json()
    assert report_of(db, "sm_90", regime="sustained").regimes == (one,)
    assert report_of(db, "sm_90", device_name="NVIDIA Other").regimes == ()


def test_regimes_that_agree_or_cannot_be_told_apart(db):
    a, b = plain(128, 64), plain(128, 128)
    add_times(db, {a: 100.0, b: 110.0}, regime="burst")
    add_times(db, {a: 120.0, b: 120.5}, regime="sustained")
    (one,) = report_of(db, "sm_90").regimes
    assert one.same
    assert (one.burst_loss, one.burst_loss_distinct, one.sustained_loss) == (0.0, False, 0.0)
    add_times(db, {b: 119.5}, regime="sustained")  # the newest counts
    (one,) = report_of(db, "sm_90").regimes
    assert (one.same, one.burst_loss_distinct, one.sustained_loss_distinct) == (False, False, True)


def test_regimes_compare_programs_and_not_accuracy_classes(db):
    a, same, fp16 = plain(128, 64), plain(128, 64, latency_k=2), plain(128, 64, accum_mode="fp16")
    codes = {a: "a" * 24, same: "a" * 24}
    add_times(db, {a: 100.0, plain(64, 64): 200.0, fp16: 10.0}, fingerprints=codes)
    add_times(db, {same: 100.0, plain(64, 64): 200.0, fp16: 10.0}, fingerprints=codes, regime="sustained")
    fp16_only, fp32 = sorted(report_of(db, "sm_90").regimes, key=lambda one: one.accum_mode)
    assert (fp16_only.programs, fp32.programs, fp32.same) == (1, 2, True)
