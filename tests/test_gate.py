"""`tiledsched compare --gate`: repeated runs decide what became slower; and `tune --effort served`, which measures them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from report_samples import DEVICE, PROBLEM, SOURCE, TOOLCHAIN, check_golden, plain, taken
from test_compare import known
from test_docs import ROOT, blocks, parse
from test_search_tuner import LANDSCAPES, Recorded, tune

from tiledsched.cli import main
from tiledsched.core.errors import ConfigError
from tiledsched.report.compare import Comparison, ProgramTime, judged
from tiledsched.report.gate import judged_by_runs
from tiledsched.store.db import TuningDB
from tiledsched.store.records import Entry

NAMES = map(str, itertools.count())


def side(name, times_us, code, half=0.0005, **changes):
    """A time with a run for each of some times."""
    runs = tuple(ProgramTime("s", code, us, us * (1 - half), us * (1 + half), next(NAMES)) for us in times_us)
    return known(runs[0].us, problem_id=name, problem=name, fingerprint=code, uid=runs[0].uid, runs=runs, **changes)


def gate(pairs, code="b", **changes):
    """The verdicts at 3% by problem, of the times of its runs before and after."""
    rows = [judged(side(name, a, "a"), side(name, b, code, **changes), 0.02) for name, (a, b) in pairs.items()]
    found = judged_by_runs(Comparison(a="A", b="B", rows=tuple(rows), drift=(), threshold=0.02), 0.03)
    return found, {row.b.problem: row.verdict for row in found.rows}


def drawn(rng, noise, slower=(), runs=3):
    """Runs of 20 problems with made-up noise, of which some take 3% longer afterwards."""
    mean = {f"p{place}": 100 * (1 + 0.03 * (place in slower)) for place in range(20)}
    return {name: tuple(us * np.exp(rng.normal(0, noise, runs)) for us in (100, after)) for name, after in mean.items()}


@pytest.mark.parametrize(
    ("noise", "code", "alarms", "caught"), [(0.003, "a", 0, 95), (0.003, "b", 0, 95), (0.02, "b", 2, 0)]
)
def test_noise_gives_no_alarm_and_slow_downs_of_3_percent_do_or_are_called_unclear(noise, code, alarms, caught) -> None:
    rng = np.random.default_rng(0)
    found = [gate(drawn(rng, noise), code)[0] for _ in range(100)]
    assert sum(each.regressed for each in found) <= alarms
    assert np.mean([each.noise for each in found]) == pytest.approx(noise, rel=0.1)
    assert all((row.noticed > 0.03) == (row.verdict == "tied") for each in found for row in each.rows)
    planted = [gate(drawn(rng, noise, [place % 20]), code)[1][f"p{place % 20}"] for place in range(100)]
    assert planted.count("slower") >= caught


QUIET = {f"p{place}": ((100.0, 100.1, 99.9), (100.1, 100.0, 99.9)) for place in range(19)}
LEVEL, SLOWER = (100, 100.1, 99.9), (104, 104.1, 103.9)


@pytest.mark.parametrize(
    ("others", "a", "b", "code", "half", "verdict"),
    [
        (QUIET, LEVEL, (102, 102.1, 101.9), "b", 5e-4, "same"),  # slower beyond doubt, and by less than the limit
        (QUIET, LEVEL, SLOWER, "b", 5e-4, "slower"),
        (QUIET, LEVEL, SLOWER, "a", 5e-4, "slower"),  # by its launch, say: the machine code is the same
        (QUIET, SLOWER, LEVEL, "b", 5e-4, "faster"),
        (QUIET, LEVEL, (100, 112, 100), "b", 5e-4, "tied"),  # one run was disturbed
        (QUIET, LEVEL, SLOWER, "b", 0.1, "tied"),  # so much do the samples of a run spread
        ({"p0": QUIET["p0"]}, LEVEL, SLOWER, "a", 5e-4, "slower"),
        ({}, LEVEL, SLOWER, "a", 5e-4, "slower"),
        ({}, (100, 101), (103.5, 104.5), "b", 5e-4, "tied"),  # one problem alone tells little
    ],
)
def test_the_verdict_of_one_problem_beside_others(others, a, b, code, half, verdict) -> None:
    found, verdicts = gate(others | {"p": (a, b)}, code, half=half)
    assert verdicts["p"] == verdict
    if len(others) > 1:
        assert {verdicts[name] for name in others} == {"same" if half < 0.01 else "tied"}
        assert found.noise < 0.002


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no two runs of one program.*--effort served"):
        gate({"p": ((100,), (101,))})
    for changes in ({"device": "another"}, {"modelled": True}):
        with pytest.raises(ConfigError, match="measurements of one GPU"):
            gate(QUIET, **changes)


def put_runs(path, times_us, schedule):
    """Add a run for each of some times of each problem, beside what does not count: the search before, and other programs."""

    def put(run, us, schedule=schedule, code=schedule.id * 2, samples=10, **more):
        own = taken(schedule, us, fingerprint=code, **more)
        own = dataclasses.replace(own, samples_us=own.samples_us * (samples // 5))
        return db.record_measurement(run, "attention", SOURCE, TOOLCHAIN, own)

    with TuningDB.open(path) as db:
        for problem, runs in times_us.items():
            for us in runs:
                run = db.start_run({}, "sm_90")
                put(run, us * 1.5, problem=problem)
                number = put(run, us, problem=problem)
                put(run, us * 2, problem=problem, code="f" * 24)
                put(run, us * 3, plain(32, 32), problem=problem)
                put(None, us * 4, problem=problem, samples=5)
                if path == "head.db":
                    put(db.start_run({}, "sm_90"), us * 5, problem=problem, regime="sustained")
            entry = {"schedule": schedule, "fingerprint": schedule.id * 2, "toolchain": TOOLCHAIN}
            where = {"kernel": "attention", "arch": "sm_90", "device_name": DEVICE.name, "regime": "burst"}
            db.put_entry(Entry(**where, problem=problem, provenance="measured", measurement_id=number, **entry))


def test_two_databases_are_judged_on_the_command_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, third, fourth = (PROBLEM.replace(batch=batch) for batch in (1, 2, 3, 4))
    put_runs("base.db", {fourth: (30, 31)}, plain(128, 64))  # known to both, and not measured anew
    shutil.copy("base.db", "head.db")
    put_runs("base.db", {first: (100, 100.2, 99.9), second: (50, 50.1, 50), third: (70, 70.1, 70)}, plain(128, 64))
    put_runs("head.db", {first: (104.1, 104.2, 104), second: (50.1, 50, 50)}, plain(64, 64))
    assert main(["compare", "base.db", "head.db", "--gate", "3%", "--all", "--markdown", "gate.md"]) == 1
    check_golden("compare_gate.txt", capsys.readouterr().out)
    check_golden("compare_gate.md", (tmp_path / "gate.md").read_text())
    assert main(["compare", "base.db", "head.db", "--gate", "9", "--json"]) == 1  # the third is missing
    found = json.loads(capsys.readouterr().out)
    assert {(row["verdict"], row["b_runs"]) for row in found["rows"]} == {("same", 3)}
    assert (found["threshold"], found["regressed"], len(found["only_a"])) == (0.09, True, 1)
    put_runs("head.db", {third: (70, 77, 70)}, plain(64, 64))
    assert main(["compare", "base.db", "head.db", "--gate", "9"]) == 0
    assert "B=3,H=32 --effort served --db head.db" in capsys.readouterr().out  # a tie
    for limit in ("nan", "0.03"):  # a share, where a percentage is meant
        assert main(["compare", "base.db", "head.db", "--gate", limit]) == 2
        assert "--gate" in capsys.readouterr().err
    assert main(["compare", "base.db", "base.db", "--gate", "3"]) == 2
    assert "no two runs" in capsys.readouterr().err
    assert main(["compare", "base.db", "head.db", "--markdown", "gate.md"]) == 2
    assert "pass --gate PERCENT" in capsys.readouterr().err


def test_an_effort_of_served_measures_what_is_served_anew_and_nothing_else(tmp_path) -> None:
    recorded = Recorded(LANDSCAPES[4])
    slow = max(recorded.measurements, key=lambda each: each.median_us * (each.accuracy is not None)).schedule
    with TuningDB.open(tmp_path / "x.db") as db:
        results = [tune(recorded, db, effort="served", served=slow) for _ in range(2)]
        assert {result.entry.schedule for result in results} == {slow}
        assert [(each.run_id, each.measurement.schedule) for each in db.measurements()] == [(2, slow), (1, slow)]
        with pytest.raises(ConfigError, match=r"no GPU.*leave out --effort served"):
            tune(recorded, db, effort="served", measure=False)


def test_the_workflow_in_the_documentation_runs_commands_that_there_are() -> None:
    (code,) = blocks(ROOT / "docs" / "gate.md", "yaml")
    lines = [line.strip().replace("$side", "base") for line in code.splitlines() if "  tiledsched " in line]
    assert [parse(line.split()[1:]) for line in lines] == [None, None]
