"""What the report answers first, and from what: shipped evidence, regret, knobs held, several archs."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings, strategies as st
from report_samples import PROBLEM, SOURCE, TOOLCHAIN, add_times, grid, plain, problem_of, report_of, taken

from tiledsched.cli import main
from tiledsched.core.config import load_settings
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.report import WithShipped
from tiledsched.report.analysis import LIMITS, few_schedules
from tiledsched.report.answer import answer
from tiledsched.report.csv_files import winners_csv
from tiledsched.serve.entries import load_entries
from tiledsched.tuning.resources import read_candidates

CAUSAL = PROBLEM.replace(causal=True)


def only(report):
    (one,) = report.measured.problems
    return one


@pytest.mark.parametrize(
    ("tiles", "problems", "said"),
    [
        ((1.0, 1.06, 1.5, 2.1), 4, "is sensitive to its tile: the second best tile takes 6.0% longer (median of 4"),
        ((1.0, 1.003, 1.5, 2.1), 4, "has more than one good tile: the second best ties with the best (median of 4"),
        ((1.0, 1.003, 1.01, 1.02), 4, "is not sensitive to its tile: the second best ties with the best (median of 4"),
        (
            (1.0, 1.06, 1.5, 2.1),
            1,
            "the second best tile takes 6.0% longer (1 problem), and the worst 2.1 times as long.",
        ),
    ],
)
def test_what_is_said_of_tiles(db, tiles, problems, said):
    """From fewer than four problems follows nothing for the kernel."""
    for batch in range(1, 1 + problems):
        add_times(db, grid(tiles), problem=PROBLEM.replace(batch=batch))
    (found,) = [sentence for sentence in answer(report_of(db)) if "second best" in sentence]
    assert f"{'attention ' if problems > 1 else ', '}{said}" in found


def test_a_trace_is_in_the_order_of_the_newest_run(db):
    for run, times in ((db.start_run({}, "sm_90"), (500.0,)), (db.start_run({}, "sm_90"), (140.0, 100.0, 120.0))):
        for place, us in enumerate(times):
            db.record_measurement(run, "attention", SOURCE, TOOLCHAIN, taken(plain(64, 32 * 2**place), us))
    assert only(report_of(db)).trace == pytest.approx((1.4, 1.0, 1.2))


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
    sets, _ = few_schedules([problem_of(table) for table in tables])
    for limit, chosen in sets.items():
        for table in tables:
            assert min(table[each] for each in chosen if each in table) <= min(table.values()) * (1 + limit)
    assert tuple(sets) == LIMITS


def test_the_winners_are_a_file_of_candidates(db, tmp_path):
    add_times(db, grid())
    add_times(db, grid(occupancies=(1.3, 1.0)), problem=CAUSAL)
    report = report_of(db)
    (tmp_path / "winners.csv").write_text(winners_csv(report))
    read, *_ = read_candidates(tmp_path / "winners.csv", space_for("sm_90", Attention))
    assert [Schedule(each) for each in read] == [one.best.schedule for one in report.measured.problems]


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_shipped_report_out_of_the_box(new_home, capsys):
    """From an empty home, without a database: below 5 MB, and the answer is there."""
    assert main(["report", "matmul", "--arch", "h200"]) == 0
    assert str(new_home) not in capsys.readouterr().out  # relative, as given
    page = (new_home / "report" / "report.html").read_text(encoding="utf-8")
    assert len(page) < 5_000_000
    assert "measured" in page
    assert "Measured on NVIDIA H200 (sm_90, 2026-11)" in page
