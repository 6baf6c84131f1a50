"""What the report answers first, and from what: shipped evidence, regret, knobs held, several archs."""

from __future__ import annotations

import dataclasses
import math

import pytest
from report_samples import (
    DEVICE,
    PROBLEM,
    SOURCE,
    TOOLCHAIN,
    add_modelled,
    add_times,
    landscape,
    plain,
    report_of,
    taken,
)

from tiledsched.cli import main
from tiledsched.core.config import load_settings
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.report import WithShipped, write_report
from tiledsched.report.document import Cards, Chart
from tiledsched.report.regret import broad, enough, regret_map
from tiledsched.report.text import document, side_by_side
from tiledsched.serve.entries import load_entries
from tiledsched.store.db import TuningDB
from tiledsched.store.records import Entry

CAUSAL = PROBLEM.replace(causal=True)


@pytest.fixture
def db():
    with TuningDB.open(":memory:") as opened:
        yield opened


def only(report):
    (one,) = report.measured.problems
    return one


def figures(report):
    """The cards of the first screen, by what they are of."""
    return {what: value for block in document(report) if isinstance(block, Cards) for value, what in block.items}


def test_the_first_screen_says_what_choices_cost(db):
    add_times(db, {plain(128, 64): 100.0, plain(64, 64): 150.0, plain(128, 128): 110.0, plain(64, 128): 220.0})
    found = figures(report_of(db))
    assert found["the default schedule costs (1 problem); most: +50% for B=4 H=32 S=4096 D=64 float16"] == "+50.0%"
    assert found["the second best tile costs (1 problem); most: +10% for B=4 H=32 S=4096 D=64 float16"] == "+10.0%"


def test_a_winner_alone_says_nothing_of_other_choices(db):
    """The default costs nothing where it won; of problems whose losers are not known only those would be counted."""
    add_modelled(db, plain(64, 64))
    add_times(db, {plain(64, 64): 100.0}, problem=CAUSAL)
    assert figures(report_of(db)) == {}
    assert report_of(db).measured.problems[0].default_drop is None


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
    assert any(block.name == "trace-measured-sm_90" for block in document(report_of(db)) if isinstance(block, Chart))


def test_regret_is_told_only_of_what_was_timed(db):
    first = landscape(db)
    second = landscape(db, CAUSAL, every=11)
    problems = broad(report_of(db).measured.problems)
    found = {(one.tuned, one.served): one.loss for one in regret_map(problems)}
    assert len(found) == 4
    assert found[PROBLEM, PROBLEM] == found[CAUSAL, CAUSAL] == 0.0
    winner = min(first, key=first.get)
    expected = second[winner] / min(second.values()) - 1 if winner in second else None
    assert found[PROBLEM, CAUSAL] == (None if expected is None else pytest.approx(expected))


def test_few_schedules_are_enough(db):
    """Three problems: one schedule is within 4% of the best everywhere, none is within 1% of two."""
    shared = plain(64, 64)
    others = [plain(64, 64, occupancy=occ, latency_k=k) for occ in (1, 2, 3) for k in range(7)][1:]
    for place, problem in enumerate((PROBLEM, CAUSAL, PROBLEM.replace(batch=8))):
        times = dict.fromkeys(others, 200.0) | {shared: 104.0, plain(128, 32 * 2**place): 100.0}
        add_times(db, times, problem=problem)
    found = {one.limit: one for one in enough(broad(report_of(db).measured.problems))}
    assert len(found[0.01].schedules) == 3
    assert found[0.05].schedules == (shared,)
    assert (
        figures(report_of(db))["or fewer keep all 3 problems with a landscape within 5% of their best"] == "1 schedule"
    )


def test_shipped_evidence_is_read_beneath_ones_own(db, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "none.db"))
    mine = PROBLEM.replace(batch=3)
    add_times(db, {plain(128, 64): 1000.0}, problem=mine)
    served = load_entries(load_settings(), {"sm_90"}, "attention")
    found = report_of(WithShipped(db, Attention, "sm_90", served))
    problems = {one.problem: one for one in found.measured.problems}
    assert {mine, PROBLEM} <= set(problems)
    assert len(problems) > 100  # every problem of the shipped table
    assert sum(one.programs > 200 for one in found.measured.problems) >= 15  # and its landscapes
    for one in found.measured.problems:  # some of which were timed warm in graphs, which no paced time is compared with
        assert one.problem == mine or one.best.us > 0.95 * one.served.median_us
    assert any(one.default_drop for one in found.measured.problems)
    drops = [one.runner_up_drop for one in found.measured.problems if one.runner_up]
    assert min(drops) > -0.003  # a race tells apart what is 0.3% slower, by pairs of rounds, not by medians
    assert math.isfinite(max(drops))
    other = WithShipped(db, kernel_named("matmul"), "sm_121", [])  # whose shipped landscape is of another arch
    assert [stored.run_id for stored in other.measurements("sm_90", regime="burst")] == [None]


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


def test_archs_stand_side_by_side(db, tmp_path):
    landscape(db)
    add_modelled(db, plain(128, 64), arch="sm_121")
    reports = [report_of(db, arch) for arch in ("sm_90", "sm_121")]
    blocks = side_by_side(reports)
    headings = [block.text for block in blocks if hasattr(block, "level")]
    assert headings[:2] == ["Tiling sensitivity on sm_90, sm_121: attention", "The same problems"]
    assert len(headings) == len(set(headings))  # links lead to one place each
    names = [block.name for block in blocks if isinstance(block, Chart)]
    assert names[0] == "rates"
    assert len(names) == len(set(names))
    written = {path.name for path in write_report(reports, tmp_path)}
    assert {"sm_90_schedules.csv", "sm_121_schedules.csv", "report.md", "report.html"} <= written
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| sm_90 | NVIDIA H200 | 1 | +" in markdown
    assert "| sm_121 | no GPU: modelled | 1 | not known |" in markdown
    assert "90.00 modelled" in markdown


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
    assert '<dl class="cards">' in page or "Only chosen schedules are known here" in page
