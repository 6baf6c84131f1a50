"""`fleet record`, `refresh` and `bench`: what the single commands find, though workers die on the way."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter

import fleet_jobs
import pytest
import sqlalchemy as sa
from store_samples import entry
from test_fleet import gone, home, started, wait_for

from tiledsched.core import config
from tiledsched.core.text import format_problem
from tiledsched.fleet import running as fleet_run
from tiledsched.fleet.leases import Leases
from tiledsched.kernels.attention import Attention
from tiledsched.rivals.rows import read_rows
from tiledsched.store import exchange, models
from tiledsched.store.db import TuningDB
from tiledsched.tuning.session import Session

__all__ = ["home"]
PROBLEMS = fleet_jobs.problems(3)
STAYS = 2
"""Heads of the problem in which a worker is killed."""


@pytest.fixture
def run(home, monkeypatch, cli):
    """Run a command of a fleet whose first worker is killed with a problem done and not yet brought home; what it printed."""
    plan = fleet_run.plan
    monkeypatch.setattr(
        fleet_run,
        "plan",
        lambda command, *given, **more: dataclasses.replace(plan(command, *given, **more), job=f"fleet_jobs:{command}"),
    )

    def run(command, *flags):
        asked = ["fleet", "run", command, "attention", "--arch", "sm_90", "--lease", "1", *flags]
        campaign = cli([*asked, "--open-only"]).out.split()[-1]
        (home / f"stay-{STAYS}").touch()
        monkeypatch.setenv("FLEET_GPUS", "sm_90:1")
        worker = started(home)
        wait_for((home / f"stays-{STAYS}").exists)
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        assert gone(home)
        for word in (f"stay-{STAYS}", f"stays-{STAYS}"):
            (home / word).unlink()
        said = cli([*asked, "--json"]).json
        assert (said["campaign"], said["command"]) == (campaign, f"fleet_jobs:{command}")
        assert (said["done"], said["failed"]) == (len(PROBLEMS), 0)
        with TuningDB.open(home / "x.db") as db:
            assert db.check() == []
            assert len(Leases(db).results(campaign)) == len(PROBLEMS)
            with db.reading() as session:
                ends = Counter(session.scalars(sa.select(models.AttemptRow.outcome)))
        assert ends["done"] == len(PROBLEMS)
        assert ends["expired"] >= 1
        assert list((home / "cache" / "fleet").glob("*/*")) == []
        return said

    return run


def alone(home, command, **options):
    """The single command's function on every problem, in one database."""
    return [
        getattr(fleet_jobs, command)(
            Session("sm_90", settings=config.load_settings({"db": str(home / "alone.db")}), jobs=1),
            Attention,
            problem,
            lambda text: None,
            **options,
        )
        for problem in PROBLEMS
    ]


def fill(path) -> None:
    """Something measured of every problem under its landscape's compiler; of every second, what another builds differently."""
    with TuningDB.open(path) as db:
        for problem in PROBLEMS:
            replay = fleet_jobs.Replay(problem, "sm_90")
            alike = [one for one in replay.measurements if fleet_jobs.changes(one.schedule) == (problem.heads % 2 == 0)]
            taken = max(alike, key=lambda one: one.median_us)
            number = db.record_measurement(None, "attention", Attention.source_hash(), replay.toolchain, taken)
            db.put_entry(
                entry(
                    "measured",
                    problem=problem,
                    schedule=taken.schedule,
                    fingerprint=taken.fingerprint,
                    regime="burst",
                    device_name=taken.device.name,
                    measurement_id=number,
                    toolchain=replay.toolchain,
                    source_hash=Attention.source_hash(),
                )
            )


def named() -> list[str]:
    return [word for problem in PROBLEMS for word in ("--problem", format_problem(problem))]


@pytest.mark.slow
def test_record_writes_the_landscapes_of_the_single_command(run, home) -> None:
    flags = ["--programs", "8", "--sustained-leaders", "2"]
    said = run("record", *named(), *flags, "--out", str(home / "fleet"))
    single = alone(home, "record", programs=8, sustained_leaders=2)
    told_of = ("schedules", "programs", "wanted", "failed", "complete", "landscapes")
    both = [
        [{name: row[name] for name in told_of} for row in rows]
        for rows in (single, [row["result"] for row in sorted(said["rows"], key=lambda row: row["problem"]["heads"])])
    ]
    assert both[0] == both[1]
    assert len(said["files"]) == 2 * len(PROBLEMS)
    with TuningDB.open(home / "alone.db") as db:
        for file in said["files"]:
            table = exchange.read_table(file)
            first = table.measurements[0].measurement
            wanted = db.landscape(first.problem, first.device.name, first.regime)
            assert samples(table.measurements) == samples(wanted)
            assert {each.fingerprint for each in table.artifacts} >= {each.measurement.fingerprint for each in wanted}


def samples(stored):
    return {(each.measurement.schedule, each.measurement.fingerprint): each.measurement.samples_us for each in stored}


@pytest.mark.slow
def test_refresh_serves_what_the_single_command_does(run, home, monkeypatch) -> None:
    for path in ("x.db", "alone.db"):
        fill(home / path)
    monkeypatch.setattr(
        "tiledsched.serve.entries._shipped",
        lambda *given: fleet_jobs.entries.Layer(name="shipped", where="", entries=()),
    )
    said = run("refresh")
    order = [row["problem"]["heads"] for row in said["rows"]]
    assert order == [each.heads for each in sorted(PROBLEMS, key=lambda each: -each.flops)] != sorted(order)
    single = alone(home, "refresh")
    assert [(row["kept"], row["raced"]) for row in single] == [(1, 0), (0, 1), (1, 0)]
    found = []
    for path in ("x.db", "alone.db"):
        with TuningDB.open(home / path) as db:
            found.append(
                {
                    (each.problem, each.compiler): (each.schedule, each.fingerprint, each.median_us, each.provenance)
                    for each in db.entries()
                }
            )
    assert found[0] == found[1]
    assert len(found[0]) == 2 * len(PROBLEMS)
    assert sum(
        row["result"]["kept"] + row["result"]["raced"] + row["result"]["current"] for row in said["rows"]
    ) == len(PROBLEMS)


@pytest.mark.slow
def test_bench_writes_the_rows_of_the_single_command(run, home) -> None:
    fill(home / "x.db")
    fill(home / "alone.db")
    run("bench", *named(), "--methods", "tiledsched,untuned", "--rounds", "8", "--csv", str(home / "rows.csv"))
    single = [
        row for result in alone(home, "bench", methods=["tiledsched", "untuned"], rounds=8) for row in result["rows"]
    ]
    rows = sorted(read_rows(home / "rows.csv"), key=lambda row: (row.problem.heads, row.method))
    assert [row.to_csv() for row in rows] == single
    assert {row.provenance for row in rows if row.method == "tiledsched"} == {"measured"}
    assert len(rows) == 2 * len(PROBLEMS)


def test_a_method_that_there_is_not_opens_no_campaign(tmp_path, cli) -> None:
    db = tmp_path / "x.db"
    assert (
        "unknown method 'servd'; known are tiledsched, served,"
        in cli(
            ["fleet", "run", "bench", "--arch", "sm_90", "--suite", "llama", "--methods", "servd", "--db", str(db)],
            code=2,
        ).err
    )
    assert not db.exists()
