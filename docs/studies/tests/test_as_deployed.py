"""The study of tunes for graphs, on a made-up GPU."""

from __future__ import annotations

import argparse
import csv

import op_kernels as kernels
import pytest
from test_deploy import session  # noqa: F401  # a fixture

from docs.studies import as_deployed
from docs.studies.as_deployed import append, judged, memories, regrets, summary
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import GIB

PROBLEM = kernels.RmsNorm.problem(rows=8, columns=100)
OPTIONS = argparse.Namespace(effort="quick", cold=False, extra=4, rounds=8, share=0.5)
FAST, SLOW, LUCKY = (Schedule(TILE=tile) for tile in (16, 32, 64))


def test_the_choice_for_graphs_is_judged_against_all_programs(session, tmp_path):  # noqa: F811
    (row,) = regrets(session, PROBLEM, OPTIONS)
    assert (row.regime, row.programs, row.rounds, row.same, row.captured) == ("graph", 2, 8, False, True)
    assert (row.oracle_us, row.regret, row.eager_regret) == pytest.approx((70.0, 0.0, 10 / 70))
    assert "eager choice +14.29%; oracle of 2 programs 70.00 us; other program, looked up as deployed" in summary(row)
    for _ in range(2):
        append(tmp_path / "rows.csv", row)
    with (tmp_path / "rows.csv").open() as file:
        assert [each["regret"] for each in csv.DictReader(file)] == [str(row.regret)] * 2


def test_the_oracle_is_not_judged_by_the_rounds_that_chose_it():
    sampled = {FAST: (10.0,) * 12, SLOW: (11.0,) * 12, LUCKY: (9.0, 12.0) * 6}
    row = judged(
        sampled, problem=PROBLEM, regime="graph", rounds=12, choice=FAST, eager=SLOW, captured=True, seconds=1.0
    )
    assert (row.oracle, row.oracle_us) == (LUCKY.short(), 12.0)
    assert (row.regret, row.eager_regret) == pytest.approx((10 / 12 - 1, 11 / 12 - 1))


def test_memory_is_filled_by_another_process_and_by_the_tune(session, monkeypatch):  # noqa: F811
    monkeypatch.setattr(as_deployed, "in_use", lambda: (round(0.1 * GIB), GIB))
    monkeypatch.setattr(as_deployed, "FILLER", "print('full', flush=True); import sys; sys.stdin.read()")
    rows = list(memories(session, PROBLEM, OPTIONS))
    assert [each.by for each in rows] == ["another process", "the tune"]
    assert all(0 < each.peak_gib < each.cap_gib for each in rows)
    assert "0 failed" not in rows[0].outcome
    assert "took" in summary(rows[1])
