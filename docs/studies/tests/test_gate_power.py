"""The study of the gate's false alarms, on made-up runs."""

from __future__ import annotations

import math
import random

import pytest

from docs.studies import gate_power
from tiledsched.core.files import csv_text


def test_every_problem_has_two_programs_in_the_table():
    pairs = [pair for kernel in gate_power.PROBLEMS for _, pair in gate_power.entries_of(kernel)]
    assert len(pairs) == 20
    assert all(pair[gate_power.SERVED] != pair[gate_power.SLOWER] for pair in pairs)


@pytest.mark.parametrize(("noise", "alarms", "caught"), [(0.002, 0, "5 slower"), (0.05, 0, "5 tied")])
def test_the_summary_of_made_up_runs(tmp_path, capsys, monkeypatch, noise, alarms, caught):
    rng, rows = random.Random(0), []
    for run in range(6):
        for place in range(20):
            for program, us in (("served", 100.0), ("runner-up", 104.0)):
                us *= math.exp(rng.gauss(0, noise))
                names = {
                    "run": str(run),
                    "kernel": "k",
                    "problem": f"p{place}",
                    "program": program,
                    "schedule": program,
                }
                rows.append({**names, "us": us, "low_us": us * 0.999, "high_us": us * 1.001})
    (tmp_path / "runs.csv").write_text(csv_text(rows, gate_power.COLUMNS))
    monkeypatch.setattr(gate_power, "CHECKS", 5)
    assert gate_power.main(["summary", str(tmp_path / "runs.csv")]) == 0
    said = capsys.readouterr().out
    assert said.count(f": {alarms} of 5 give an alarm") == 2
    assert said.count(f"|{caught}|") >= 15
    assert gate_power.main(["summary", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
