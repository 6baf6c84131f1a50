"""What the report answers first, and from what: shipped evidence, regret, knobs held, several archs."""

from __future__ import annotations

import csv
import dataclasses
import math
from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import (
    DEVICE,
    PROBLEM,
    SOURCE,
    TOOLCHAIN,
    add_modelled,
    add_times,
    plain,
    problem_of,
    report_of,
    taken,
)

from tiledsched.cli import main
from tiledsched.core.config import load_settings
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.report import WithShipped
from tiledsched.report.answer import answer, next_step, problem_answer
from tiledsched.report.csv_files import knobs_csv, winners_csv
from tiledsched.report.regret import LIMITS, few_schedules
from tiledsched.serve.entries import load_entries
from tiledsched.store.db import TuningDB
from tiledsched.store.records import Entry, RivalTime
from tiledsched.tuning.resources import read_candidates

CAUSAL = PROBLEM.replace(causal=True)


@pytest.fixture
def db():
    with TuningDB.open(":memory:") as opened:
        yield opened


def only_of(report, problem):
    return next(one for one in report.measured.problems if one.problem == problem)


def only(report):
    (one,) = report.measured.problems
    return one


def grid(tiles=(1.0, 1.06, 1.5, 2.1), occupancies=(1.0, 1.2), inert=1.0):
    """Times of four tiles with four programs each. The default, 64x64, is the third tile."""
    return {
        plain(*tile, occupancy=occupancy, latency_k=latency): 100.0 * slower * factor * (inert if latency else 1)
        for tile, slower in zip(((128, 64), (128, 128), (64, 64), (64, 128)), tiles, strict=True)
        for occupancy, factor in zip((1, 2), occupancies, strict=True)
        for latency in (0, 2)
    }


def month():
    return datetime.now(timezone.utc).strftime("%Y-%m")


def test_the_answer_on_one_problem(db):
    add_times(db, grid())
    report = report_of(db)
    assert answer(report) == (
        f"Measured on NVIDIA H200 (sm_90, {month()}): 16 programs of attention for 1 problem.",
        "On NVIDIA H200, attention is sensitive to its tile: the second best tile takes 6.0% longer (1 problem), and the worst "
        "2.1 times as long.",
        "The untuned default takes 50% longer than the best schedule (1 problem).",
        "Leave `occupancy` at 1 and `latency_k` at 0: no other value tried is more than 1% faster.",
        "The best schedule is `128x64 warps=4 occ=1`: 100 µs (5,498 TFLOP/s).",
    )
    assert next_step(report) == ""
    assert problem_answer(only(report), report) == (
        "On NVIDIA H200 the best schedule is `128x64 warps=4 occ=1`: 100 µs (5,498 TFLOP/s), measured. The second best tile, "
        "128x128, takes 6.0% longer and the untuned default takes 50% longer. Of 16 programs, the best included, 2 are within 1% "
        "of the best time and 2 within 5%."
    )


def test_the_answer_on_several_problems_gpus_and_estimates(db):
    """Each problem prefers another occupancy; the second device repeats the first problem."""
    add_times(db, grid())
    add_times(db, grid((1.0, 1.1, 1.5, 2.3), (1.3, 1.0)), problem=CAUSAL)
    add_times(db, {plain(64, 64): 9.0}, problem=PROBLEM.replace(batch=1))
    add_modelled(db, plain(128, 64), problem=PROBLEM.replace(batch=2))
    lines = answer(report_of(db))
    assert lines == (
        f"Measured on NVIDIA H200 (sm_90, {month()}): 32 programs of attention for 2 problems; of 1 other problem little but the "
        "winner of a search is known; 1 other problem is only modelled.",
        "On NVIDIA H200, attention is sensitive to its tile: the second best tile takes 8.0% longer (median of 2 problems), and "
        "the worst 2.2 times as long.",
        "The untuned default takes 72% longer than the best schedule (median of 2 problems).",
        "Tune `occupancy` (1 is faster for 1 problem, 2 for 1) for each problem.",
        "Leave `latency_k` at 0: no other value tried is more than 1% faster.",
        "128x64 is the best tile for all. Among these problems, the highest rate is that of B=4 H=32 S=4096 D=64 float16: `128x64 warps=4 occ=1`, "
        "100 µs (5,498 TFLOP/s).",
    )
    add_times(db, grid(), device="NVIDIA H100")
    first, tile, *_ = answer(report_of(db))
    assert "on NVIDIA H100 and NVIDIA H200 (sm_90" in first
    assert "48 programs of attention for 3 problems, counted on each GPU" in first
    assert tile.startswith(
        "On NVIDIA H100 and NVIDIA H200, attention is sensitive to its tile: the second best tile takes 6.0%"
    )


@pytest.mark.parametrize(
    ("tiles", "said"),
    [
        (
            (1.0, 1.003, 1.5, 2.1),
            "has more than one good tile: the second best takes 0.3% longer (1 problem), and the worst 2.1 times",
        ),
        (
            (1.0, 1.003, 1.01, 1.02),
            "is not sensitive to its tile: the second best takes 0.3% longer (1 problem), and the worst 2.0%",
        ),
        ((1.0, 1.0, 1.0, 1.0), "is not sensitive to its tile: the second best takes as long (1 problem)."),
    ],
)
def test_a_kernel_that_is_not_sensitive_to_its_tile(db, tiles, said):
    add_times(db, grid(tiles))
    assert f"attention {said}" in answer(report_of(db))[1]


def test_a_tile_that_was_hardly_searched_concludes_nothing(db):
    """Of three tiles one program each was timed, of the fourth four: what the others cost is not known."""
    full = (128, 64)
    times = {
        each: us for each, us in grid().items() if (each["tile_m"], each["tile_n"]) == full or each == plain(64, 64)
    }
    times |= {plain(128, 128): 106.0, plain(64, 128): 210.0}
    add_times(db, times)
    report = report_of(db)
    one = only(report)
    assert [(tile.programs, tile.searched) for tile in one.tiles] == [(4, True), (1, False), (1, False), (1, False)]
    assert (one.second_tile, one.tile_drop, one.worst_tile, report.measured.sensitivity) == (None, None, None, ())
    assert answer(report)[1] == (
        "How much attention depends on its tile is not known: too few programs of any other tile were timed."
    )
    assert next_step(report) == (
        "To learn what any other tile costs, run `tiledsched record attention --arch sm_90 -p S=4096,D=64,B=4,H=32` on the same "
        "GPU: too few were timed for 1 problem."
    )
    assert "Too little was tried of any other tile to say what it costs (128x128: 1 program)." in problem_answer(
        one, report
    )


def test_a_tile_as_good_as_the_best_needs_no_more_search(db):
    times = {each: us for each, us in grid().items() if (each["tile_m"], each["tile_n"]) == (128, 64)}
    add_times(db, times | {plain(64, 128): 100.4})
    assert only(report_of(db)).tile_drop == pytest.approx(0.004)


def test_untried_and_unclear_knobs_are_what_to_run_next(db):
    """Both values of one knob were tried beside few programs; the other is fast with one tile and slow with the next."""
    times = {
        plain(tile, n, occupancy=occupancy): 100.0 * (1.15 if (tile == 128) == (occupancy == 2) else 1)
        for tile in (64, 128)
        for n in (32, 64)
        for occupancy in (1, 2)
    }
    add_times(db, times | {plain(64, 32, latency_k=2): 100.0})
    report = report_of(db)
    *_, unclear, untried, _ = answer(report)
    assert unclear == "Tune `occupancy`: no value is known to be good for every program."
    assert untried == "Too few programs that differ in one knob alone were timed to judge `latency_k`."
    assert next_step(report) == (
        "To learn more about `occupancy` and `latency_k`, run `tiledsched tune attention --arch sm_90 -p S=4096,D=64,B=4,H=32 "
        "--neighbours` on the same GPU, and likewise for other problems: it times schedules that differ from the best in one or "
        "two knobs."
    )


def test_a_winner_alone_says_nothing_of_other_choices(db):
    """The default costs nothing where it won; of problems whose losers are not known only those would be counted."""
    add_times(db, {plain(64, 64): 100.0}, problem=CAUSAL)
    report = report_of(db)
    assert only(report).default_drop is None
    assert answer(report) == (
        f"Measured on NVIDIA H200 (sm_90, {month()}): the best schedule of 1 problem of attention.",
        "What other schedules cost is not known.",
        "The best schedule is `64x64 warps=4 occ=1`: 100 µs (2,749 TFLOP/s).",
    )
    assert next_step(report) == (
        "To learn what other schedules cost, run `tiledsched record attention --arch sm_90 -p S=4096,D=64,B=4,H=32,causal=yes` on "
        "the same GPU: it measures 300 programs of a problem."
    )
    assert problem_answer(only(report), report) == (
        "On NVIDIA H200 the best schedule is `64x64 warps=4 occ=1`: 100 µs (2,749 TFLOP/s), measured. The untuned default is the "
        "best. No other schedule was timed."
    )


def test_the_answer_of_the_model(db):
    add_modelled(db, plain(128, 64), arch="sm_121", runner_up=plain(64, 128), margin=0.25)
    report = report_of(db, "sm_121")
    assert answer(report) == (
        "Nothing was measured on sm_121: every figure is the performance model's estimate, for 1 problem of attention.",
        "Of other schedules only the model's runner-up is known: it takes 25% longer (1 problem).",
        "The best schedule is `128x64 warps=4 occ=1`: 90 µs (6,108 TFLOP/s).",
    )
    assert next_step(report) == (
        "To measure, run `tiledsched tune attention --arch sm_121 -p S=4096,D=64,B=4,H=32` on a machine with a GPU of sm_121: for "
        "this problem the estimates differ most."
    )
    assert problem_answer(report.modelled.problems[0], report).startswith(
        "By the model's estimate for sm_121 the best schedule"
    )


def test_clocks_that_were_held_down_are_said(db):
    for schedule, us in grid().items():
        db.record_measurement(
            None, "attention", SOURCE, TOOLCHAIN, taken(schedule, us, clock=1200, reasons=("power cap",))
        )
    warning = answer(report_of(db))[1]
    assert warning.startswith("The clock of NVIDIA H200 was held down in 16 of 16 measurements, at 1200 MHz")
    assert warning.endswith("Times at a low clock decide little.")


def test_a_map_over_compiler_hints_is_no_tile(db):
    """Without a tile the map is drawn over what there is; the sentences do not call it one."""
    schedules = [
        plain(64, 64, occupancy=occupancy, num_worker_warps=warps) for occupancy in (1, 2, 3) for warps in (4, 8)
    ]
    times = {
        Schedule({knob: value for knob, value in each.items() if knob in ("occupancy", "num_worker_warps")}): 50.0
        + place
        for place, each in enumerate(schedules)
    }
    add_times(db, times)
    report = report_of(db)
    assert {*report.tile_knobs} == {"occupancy", "num_worker_warps"}
    assert "tile" not in " ".join((*answer(report), problem_answer(only(report), report))).replace("tiledsched", "")


def test_rivals_stand_beside_the_best(db):
    number = add_times(db, grid())[plain(128, 64)]
    rivals = tuple(
        RivalTime(name=name, version="1", median_us=100.0 * ratio, ratio=ratio)
        for name, ratio in (("torch", 1.08), ("fa4", 0.9))
    )
    db.put_entry(entry(plain(128, 64), measurement_id=number, rivals=rivals))
    report = report_of(db)
    assert problem_answer(only(report), report).endswith(
        "Of other implementations, fa4 takes 10% less time and torch takes 8.0% longer."
    )


def test_the_default_is_found_in_evidence_of_an_older_space(db):
    default = plain(64, 64)
    older = Schedule({knob: value for knob, value in default.items() if knob != "flat_steps"})
    add_times(db, {older: 150.0, plain(128, 64): 100.0})
    assert only(report_of(db)).default_drop == pytest.approx(0.5)


def entry(schedule, **more):
    return Entry(
        kernel="attention",
        arch="sm_90",
        problem=PROBLEM,
        provenance="measured",
        schedule=schedule,
        fingerprint=schedule.id * 2,
        device_name=DEVICE.name,
        regime="burst",
        toolchain=TOOLCHAIN,
        **more,
    )


def test_the_runner_up_of_the_race_is_told_where_only_the_winner_is_here(db):
    number = add_times(db, {plain(128, 64): 100.0})[plain(128, 64)]
    db.put_entry(entry(plain(128, 64), measurement_id=number, runner_up=plain(64, 64), margin=0.03))
    one = only(report_of(db))
    assert one.runner_up.schedule == plain(64, 64)
    assert one.runner_up_drop == pytest.approx(0.03)
    assert one.programs == 1


def test_a_trace_is_in_the_order_of_the_newest_run(db):
    for run, times in ((db.start_run({}, "sm_90"), (500.0,)), (db.start_run({}, "sm_90"), (140.0, 100.0, 120.0))):
        for place, us in enumerate(times):
            db.record_measurement(run, "attention", "s", TOOLCHAIN, taken(plain(64, 32 * 2**place), us))
    assert only(report_of(db)).trace == pytest.approx((1.4, 1.0, 1.2))
    assert only(report_of(db)).noise == pytest.approx(0.005)


def test_how_few_schedules_serve_all_problems(db):
    """One schedule is within 4% of the best everywhere; the winners were timed on their own problem alone."""
    shared = plain(64, 64)
    others = [plain(64, 64, occupancy=occ, latency_k=k) for occ in (1, 2, 3) for k in range(7)][1:]
    for place, problem in enumerate((PROBLEM, CAUSAL, PROBLEM.replace(batch=8))):
        times = dict.fromkeys(others, 200.0) | {shared: 104.0, plain(128, 32 * 2**place): 100.0}
        add_times(db, times, problem=problem)
    found = few_schedules(report_of(db).measured.problems)
    assert [(each.limit, len(each.schedules)) for each in found.sets] == [(0.01, 3), (0.02, 3), (0.05, 1)]
    assert found.sets[-1].schedules == (shared,)
    assert found.sentence == (
        "1 schedule is enough to keep all 3 problems within 5% of their best, 3 within 2%, 3 within 1%. A schedule counts only for "
        "problems on which it was timed; each of the 1 was on 3 of the 3 on average."
    )


def test_a_schedule_serves_no_problem_on_which_it_was_not_timed():
    one, two = problem_of({plain(64, 64): 100.0}), problem_of({plain(128, 64): 100.0})
    found = few_schedules([one, two])
    assert {len(each.schedules) for each in found.sets} == {2}
    assert (
        "each of the 2 was on 1 of the 2 on average. Fewer may be enough: `tiledsched tune attention --candidates"
        in found.sentence
    )
    assert few_schedules([one]).sentence == few_schedules([]).sentence == ""


@given(
    losses=st.lists(
        st.lists(st.sampled_from([None, 100.0, 100.5, 101.5, 104.0, 110.0]), min_size=6, max_size=6),
        min_size=2,
        max_size=4,
    )
)
@settings(max_examples=40, deadline=None)
def test_the_schedules_found_serve_every_problem(losses):
    """Each set keeps its promise by the times themselves."""
    schedules = [Schedule(k=k) for k in range(6)]
    tables = [{s: us for s, us in zip(schedules, row, strict=True) if us} for row in losses]
    if not all(tables):
        return
    found = few_schedules([problem_of(table) for table in tables])
    for found_set in found.sets:
        for table in tables:
            known = [table[each] for each in found_set.schedules if each in table]
            assert min(known) <= min(table.values()) * (1 + found_set.limit)
    assert [each.limit for each in found.sets] == list(LIMITS)


def test_the_winners_are_a_file_of_candidates(db, tmp_path):
    add_times(db, grid())
    add_times(db, grid(occupancies=(1.3, 1.0)), problem=CAUSAL)
    (tmp_path / "winners.csv").write_text(winners_csv(report_of(db)))
    read, *_ = read_candidates(tmp_path / "winners.csv", space_for("sm_90", Attention))
    assert [Schedule(each) for each in read] == [plain(128, 64), only_of(report_of(db), CAUSAL).best.schedule]


def test_the_effects_of_knobs_are_a_file(db):
    add_times(db, grid())
    rows = list(csv.DictReader(knobs_csv(report_of(db)).splitlines()))
    assert [(row["knob"], row["value"], row["against"], row["pairs"]) for row in rows] == [
        ("tile_m", "64", "128", "8"),
        ("occupancy", "2", "1", "4"),
        ("tile_n", "128", "64", "4"),
        ("latency_k", "2", "0", "4"),
    ]
    assert [float(rows[1][name]) for name in ("ratio", "ci_low", "ci_high")] == pytest.approx([1.2, 1.2, 1.2])
    assert {row["modelled_ratio"] for row in rows} == {""}


def test_shipped_evidence_is_read_beneath_ones_own(db, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "none.db"))
    mine = PROBLEM.replace(batch=3)
    add_times(db, {plain(128, 64): 1000.0}, problem=mine)
    served = load_entries(load_settings(), {"sm_90"}, "attention")
    found = report_of(WithShipped(db, Attention, "sm_90", served))
    problems = {one.problem: one for one in found.measured.problems}
    assert {mine, PROBLEM} <= set(problems)
    assert len(problems) > 100  # every problem of the shipped table
    assert sum(one.programs > 100 for one in found.measured.problems) >= 18  # and its landscapes
    for one in found.measured.problems:  # some of which were timed warm in graphs, which no paced time is compared with
        assert one.served is None or one.problem == mine or one.best.us > 0.95 * one.served.median_us
    assert any(one.default_drop for one in found.measured.problems)
    drops = [one.runner_up_drop for one in found.measured.problems if one.runner_up]
    assert min(drops) > -0.003  # a race tells apart what is 0.3% slower, by pairs of rounds, not by medians
    assert math.isfinite(max(drops))
    other = WithShipped(db, kernel_named("matmul"), "sm_121", [])  # whose shipped landscape is of another arch
    assert not list(other.measurements_by_problem("sm_121", kernel_named("matmul")))


def test_looks_of_a_warm_landscape_are_no_cold_times(db):
    """Of a landscape timed in graphs the hopeless have one cold look: beside one paced winner they would be its only rivals."""

    def put(us, tile, samples, graph_launches, problem=PROBLEM):
        found = taken(plain(64, tile), us, problem=problem)
        found = dataclasses.replace(
            found,
            samples_us=(us,) * samples,
            ci_low_us=us,
            ci_high_us=us,
            conditions=dataclasses.replace(found.conditions, graph_launches=graph_launches),
        )
        db.record_measurement(None, "attention", SOURCE, TOOLCHAIN, found)

    for problem in (PROBLEM, CAUSAL):
        put(12.0, 32, 30, 20, problem)
        put(90.0, 64, 1, 0, problem)
    put(17.0, 128, 30, 0)
    found = {one.problem: one for one in report_of(db).measured.problems}
    assert [timed.us for timed in found[PROBLEM].timed] == [17.0]
    assert [timed.us for timed in found[CAUSAL].timed] == [12.0, 90.0]  # nothing there is timed as it is now


def test_the_shipped_report_out_of_the_box(tmp_path, monkeypatch, capsys):
    """From an empty home, without a database: below 5 MB, and the answer is there."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("TILEDSCHED_DB", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "matmul", "--arch", "h200"]) == 0
    assert str(tmp_path) not in capsys.readouterr().out  # relative, as given
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert len(page) < 5_000_000
    assert "measured" in page
    assert "Measured on NVIDIA H200 (sm_90, 2026-11)" in page
