"""Evidence and compilers: which entry answers, when it is stale, and what `refresh` makes of what was measured before."""

from __future__ import annotations

import dataclasses
import json
import random
from datetime import datetime, timezone

import pytest
from store_samples import DEVICE, PROBLEM, entry, measurement
from test_search_tuner import LANDSCAPES, Recorded

from tiledsched.build.toolchain import RELEASES, Toolchain, compiler_at_hand, installed_toolchain
from tiledsched.cli import main
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.replay import ReplayRunner
from tiledsched.measure.runner import RivalTime
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.process import warn_once
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import for_compiler, leaders, of_one_compiler, stale
from tiledsched.tuning.options import RefreshOptions
from tiledsched.tuning.prior import winners_nearby
from tiledsched.tuning.refresh import KEPT, LEFT, RACED
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.session import Session


def toolchain(version: str) -> Toolchain:
    return Toolchain(cuda_tile="1.7.0", tileiras=version, ptxas=version, nvvm=version)


def measured(version: str, us: float = 100.0, **more):
    """An entry whose machine code that compiler built, with its evidence filled in."""
    taken = measurement(us)
    made = entry("measured", device_name=DEVICE.name, regime="burst", toolchain=toolchain(version), **more)
    stored = dataclasses.replace(_stored(taken), toolchain=toolchain(version))
    return made.replace(measurement=stored.summary)


def _stored(taken):
    from store_samples import stored

    return dataclasses.replace(stored(), measurement=taken)


def put_measured(db, taken, compiler, source_hash="abc", **more) -> None:
    """Store a measurement, and an entry that serves it."""
    number = db.record_measurement(None, "attention", source_hash, compiler, taken)
    assert db.put_entry(
        entry(
            "measured",
            problem=taken.problem,
            schedule=taken.schedule,
            fingerprint=taken.fingerprint,
            device_name=taken.device.name,
            regime=taken.regime,
            measurement_id=number,
            toolchain=compiler,
            source_hash=source_hash,
            **more,
        )
    )


# Which entry answers


@pytest.mark.parametrize(
    ("at_hand", "answers"),
    [
        ("13.4.92", "13.4.92"),
        ("13.4.93", "13.4.92"),  # of the same release
        ("13.5.37", "13.5.37"),
        ("13.5.1", "13.5.37"),
        ("13.6.2", "13.5.37"),  # the nearest
        ("13.2.0", "13.3.1"),
        ("", "13.5.37"),  # no compiler: the newest evidence
    ],
)
def test_the_entry_of_the_nearest_compiler_answers(at_hand, answers) -> None:
    entries = [measured(version) for version in ("13.4.92", "13.5.37", "13.3.1")]
    for _ in range(6):
        random.Random(at_hand).shuffle(entries)
        assert [each.compiler for each in for_compiler(entries, at_hand)] == [answers]


def test_what_was_measured_with_another_compiler_is_stronger_than_what_was_not_measured() -> None:
    modelled = entry("modelled", device_name=DEVICE.name, regime="burst", toolchain=toolchain("13.5.37"))
    assert for_compiler([modelled, measured("13.4.92")], "13.5.37") == [measured("13.4.92")]


def test_entries_of_several_compilers_stand_side_by_side(tmp_path) -> None:
    with TuningDB.open(tmp_path / "x.db") as db:
        for version, us in (("13.4.92", 100.0), ("13.5.37", 112.0), ("13.4.92", 99.0)):
            put_measured(db, measurement(us), toolchain(version))
        assert [(each.compiler, each.median_us) for each in db.entries()] == [("13.4.92", 99.0), ("13.5.37", 112.0)]
        assert db.check() == []
        assert {each.toolchain.tileiras for each in of_one_compiler(db.measurements(), "13.5.37")} == {"13.5.37"}
        assert len(of_one_compiler(db.measurements(), "13.4.92")) == 2
        assert len(of_one_compiler(db.measurements(), "13.4.92", fullest=True)) == 2  # one schedule each: the nearest
        with db.writing() as session:
            session.connection().exec_driver_sql("UPDATE entries SET compiler = '13.4.1' WHERE compiler = '13.4.92'")
        assert any("kept for compiler '13.4.1'" in line for line in db.check())


# Stale


def answer(entries, **more):
    return LookupTable(entries, Attention, **more).resolve(PROBLEM, "sm_90", DEVICE.name)


def test_evidence_of_another_compiler_is_called_stale() -> None:
    served = answer([measured("13.4.92")], compiler="13.5.37")
    assert served.provenance == "measured"
    assert "tileiras 13.4.92" in served.stale
    assert "13.5.37" in served.stale
    assert "tiledsched refresh attention --arch sm_90" in served.stale
    assert not answer([measured("13.4.92")], compiler="13.4.92").stale
    assert not answer([measured("13.4.92"), measured("13.5.37")], compiler="13.5.37").stale
    assert not stale(entry("modelled", toolchain=toolchain("13.4.92")), "13.5.37")


def test_machine_code_in_a_bundle_needs_no_compiler_and_is_not_stale() -> None:
    asked = []

    def at_hand():
        asked.append(1)
        return {measured("13.4.92").fingerprint}

    assert not answer([measured("13.4.92")], compiler="13.5.37", at_hand=at_hand).stale
    assert asked
    asked.clear()
    assert not answer([measured("13.5.37")], compiler="13.5.37", at_hand=at_hand).stale
    assert not asked  # nobody reads bundles where nothing is stale


@pytest.mark.parametrize(
    ("held", "says"),
    [({"f" * 24, "0" * 24}, False), ({"0" * 24}, True), (set(), False)],
    ids=["what was measured", "other programs", "none, so that nothing runs"],
)
def test_without_a_compiler_only_what_a_bundle_holds_is_not_stale(held, says) -> None:
    assert measured("13.4.92").fingerprint == "f" * 24
    told = answer([measured("13.4.92")], at_hand=lambda: held).stale
    assert ("no bundle here holds the machine code that was measured, and there is no compiler" in told) is says
    assert bool(told) is says
    assert not answer([measured("13.4.92").replace(fingerprint="")], at_hand=lambda: held).stale  # nobody knows


def test_explain_says_stale_unless_the_measured_program_runs() -> None:
    from tiledsched.serve.explain import explain_problem

    table = LookupTable([measured("13.4.92")], Attention, compiler="13.5.37")
    said = explain_problem(table, PROBLEM, "sm_90", DEVICE.name)
    assert "  stale       tileiras 13.4.92 built" in str(said)
    assert said.to_json()["stale"] is True
    seen = dataclasses.replace(said, launched_fingerprint=measured("13.4.92").fingerprint)
    assert "stale" not in str(seen)
    assert seen.to_json()["stale"] is False


def test_the_log_says_it_once(caplog) -> None:
    warn_once.cache_clear()
    for _ in range(3):
        warn_once("attention: stale")
    assert [record.message for record in caplog.records] == ["attention: stale"]


def test_show_and_doctor_say_it(tmp_path, monkeypatch, capsys) -> None:
    from tiledsched import doctor

    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "x.db"))
    with TuningDB.open(tmp_path / "x.db") as db:
        for version, us in (("13.4.92", 100.0), ("13.5.37", 110.0)):
            put_measured(db, measurement(us), toolchain(version))
    show = ["show", "attention", "--device", DEVICE.name, "--json"]

    def shown(*more):
        assert main([*show, *more]) == 0
        return [(row["compiler"], row["stale"]) for row in json.loads(capsys.readouterr().out)["entries"]]

    assert shown("--compiler", "13.5.37") == [("13.5.37", False)]
    assert shown("--compiler", "13.6.1") == [("13.5.37", True)]
    monkeypatch.setattr("tiledsched.build.toolchain.compiler_at_hand", lambda: "13.4.92")
    assert shown() == [("13.4.92", False)]
    assert shown("--compiler", "all") == [("13.4.92", False), ("13.5.37", True)]
    assert main([*show[:-1], "--compiler", "13.6.1"]) == 0
    said = capsys.readouterr()
    assert "measured, stale" in said.out
    assert "here is 13.6.1; run: tiledsched refresh" in said.err

    def evidence():
        machine = doctor.Machine(list_devices=lambda: [DEVICE])
        return next(each for each in doctor.examine(machine) if each.name == "evidence")

    assert (evidence().status, evidence().detail) == (
        "ok",
        f"2 entries measured on {DEVICE.name}: 1 with tileiras 13.4.92, 1 with tileiras 13.5.37",
    )
    monkeypatch.setattr("tiledsched.build.toolchain.compiler_at_hand", lambda: "13.6.1")
    assert evidence().status == "warn"
    assert "1 are stale: the compiler here is tileiras 13.6.1" in evidence().detail
    assert "tiledsched refresh attention" in evidence().remedy
    assert "'nvidia-cuda-tileiras==13.5.*'" in evidence().remedy


# Refresh

SECOND = "13.4.10"
"""A compiler of which nothing ships, and to which that of the recorded landscapes is the nearest."""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Refresh one recorded problem under a compiler; `bench(compiler, gpu=...)`."""
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "x.db"))
    return refreshed


def refreshed(compiler: Recorded, *, gpu: bool = True, rivals=None, **options):
    """Refresh what a database holds of a compiler's problem, on a recorded GPU."""
    device = compiler.measurements[0].device
    tools = Tools(
        toolchain=lambda: compiler.toolchain,
        artifacts=lambda folder: compiler,
        pool=lambda jobs: compiler,
        devices=lambda: [device] if gpu else [],
        runner=lambda kernel, seed: ReplayRunner(Attention, compiler.measurements, seed=1),
        rivals=lambda kernel, runner, regime: rivals,
        space=lambda arch, kernel, file: space_for(arch, kernel).limited_to(compiler.listed),
    )
    with Session("sm_90", tools=tools) as session:
        return session.refresh(Attention, [compiler.problem], RefreshOptions(**options))


def first_and_second(changes=lambda schedule: True) -> tuple[Recorded, Recorded]:
    """Two compilers that agree on some of the machine code of one recorded problem."""
    first = Recorded(LANDSCAPES[4])
    second = first.recompiled(changes)
    second.toolchain = toolchain(SECOND)
    return first, second


def tuned(db: TuningDB, compiler: Recorded) -> None:
    """What a tune under a compiler leaves behind: the fastest program, measured."""
    best, second, *_ = sorted(compiler.measurements, key=lambda taken: taken.median_us)
    put_measured(db, best, compiler.toolchain, Attention.source_hash(), runner_up=second.schedule)


@pytest.fixture
def db(tmp_path):
    with TuningDB.open(tmp_path / "x.db") as db:
        yield db


def test_the_same_machine_code_keeps_its_evidence(bench, db) -> None:
    first, second = first_and_second(lambda schedule: False)
    tuned(db, first)
    report = bench(second, gpu=False)
    (row,) = report.rows
    assert (row.outcome, row.why) == (KEPT, "")
    assert len(db.measurements()) == 1
    new, old = db.entries()
    assert (old.compiler, new.compiler) == (first.toolchain.tileiras, SECOND)
    assert (old.measurement.uid, old.schedule) == (new.measurement.uid, new.schedule)
    assert new.measurement.toolchain == first.toolchain  # it says what was measured
    assert db.check() == []
    again = bench(second, gpu=False)
    assert (again.current, again.rows, again.compiled) == (1, [], 0)


def test_without_a_gpu_it_says_what_would_be_raced_and_changes_nothing(bench, db) -> None:
    first, second = first_and_second()
    tuned(db, first)
    (before,) = db.entries()
    report = bench(second, gpu=False)
    (row,) = report.rows
    assert (row.outcome, row.why, row.now) == (LEFT, "its machine code is another", None)
    assert row.leaders == tuple(leaders(before)) == (before.schedule, before.runner_up)
    assert db.entries() == [before]
    assert report.to_json()["to_race"] == 1


def test_what_changed_is_raced_and_the_old_leaders_take_part(bench, db) -> None:
    first, second = first_and_second()
    tuned(db, first)
    (before,) = db.entries()
    report = bench(second)
    (row,) = report.rows
    assert row.outcome == RACED
    assert row.now.compiler == SECOND
    assert row.now.median_us <= 1.01 * second.best_us
    assert row.change == pytest.approx(report.change)
    raced = {stored.measurement.schedule for stored in db.measurements() if stored.toolchain.tileiras == SECOND}
    assert set(row.leaders) <= raced
    assert before in db.entries()
    assert db.check() == []


def test_what_won_on_like_problems_under_this_compiler_takes_part(bench, db) -> None:
    """Where the old winner became slow, its like did elsewhere: what was found there is raced before the search."""
    first, second = first_and_second()
    tuned(db, first)
    there = first.problem.replace(seq_q=first.problem.seq_q * 2, seq_k=first.problem.seq_k * 2)
    slowest = max(second.measurements, key=lambda taken: taken.median_us)
    won = dataclasses.replace(slowest, problem=there)
    put_measured(db, won, second.toolchain, Attention.source_hash())
    (row,) = bench(second).rows
    assert row.outcome == RACED
    raced = {stored.measurement.schedule for stored in db.measurements(first.problem)}
    assert slowest.schedule in raced


def test_winners_nearby_are_those_of_the_nearest_problems_first() -> None:
    def won(length, tile):
        problem = make_problem(length)
        return entry(
            "measured", problem=problem, schedule=space_for("sm_90", Attention).default(problem).replace(tile_n=tile)
        )

    def make_problem(length):
        return Attention.problem(batch=1, heads=8, kv_heads=8, seq_q=length, seq_k=length, head_dim=64, dtype="float16")

    entries = [won(512, 64), won(1024, 32), won(4096, 128), won(8192, 128), won(16384, 256)]
    found = winners_nearby(make_problem(8192), entries)
    assert [schedule["tile_n"] for schedule in found[:1]] == [128]  # of 4096 or 16384, and its own does not count
    assert len(found) == len(set(found)) == 4
    assert winners_nearby(make_problem(8192), []) == []


def test_a_downgrade_and_an_upgrade_bring_either_evidence_back(bench, db) -> None:
    first, second = first_and_second()
    tuned(db, first)
    bench(second)
    after = db.entries()
    for compiler in (first, second, first, second):
        report = bench(compiler)
        assert (report.current, report.rows, report.compiled) == (1, [], 0)
        assert db.entries() == after
        table = LookupTable(after, Attention, compiler=compiler.toolchain.tileiras)
        served = table.resolve(first.problem, "sm_90", first.measurements[0].device.name)
        assert served.entry.compiler == compiler.toolchain.tileiras
        assert (served.provenance, served.stale) == ("measured", "")
    assert db.check() == []


def test_what_no_longer_builds_is_raced(bench, db) -> None:
    first, second = first_and_second(lambda schedule: False)
    tuned(db, first)
    (before,) = db.entries()
    del second.fingerprints[before.schedule]
    (row,) = bench(second, gpu=False).rows
    assert (row.outcome, row.why) == (LEFT, "it does not build: not recorded")
    (row,) = bench(second).rows
    assert row.outcome == RACED
    assert row.now.schedule != before.schedule


def test_a_change_of_source_is_looked_at_too(bench, db, monkeypatch) -> None:
    first, _ = first_and_second()
    tuned(db, first)
    monkeypatch.setattr(Attention, "source_hash", lambda: "another source")
    (row,) = bench(first, gpu=False).rows
    assert row.outcome == KEPT
    (now,) = db.entries()
    assert now.source_hash == "another source"
    assert now.compiler == first.toolchain.tileiras


class Races:
    """The process of the rivals: which are here in which versions, and that each takes 90 us to our 100."""

    def __init__(self, **versions: str) -> None:
        self.here, self.raced, self.closed = versions, [], 0

    def versions(self, problem):
        return self.here

    def race(self, problem, candidate):
        self.raced.append(candidate.artifact.fingerprint)
        return [
            RivalTime(
                name=name,
                median_us=90.0,
                ours_us=100.0,
                ratio=0.9,
                ratio_low=0.89,
                ratio_high=0.91,
                samples=30,
                host_us=50.0,
                capturable=True,
                version=version,
            )
            for name, version in self.here.items()
        ]

    def close(self) -> None:
        self.closed += 1


def test_rivals_that_were_not_timed_or_in_another_version_are(bench, db, monkeypatch) -> None:
    first, second = first_and_second(lambda schedule: False)
    tuned(db, first)
    (before,) = db.entries()
    none = bench(first, rivals=None)
    assert (none.current, none.rivals, db.entries()) == (1, [], [before])
    races = Races(torch_flash="torch 2.11")
    (timed,) = bench(first, rivals=races).rivals
    (entry,) = db.entries()
    assert [each.name for each in entry.rivals] == [each.name for each in timed.rivals] == ["torch_flash"]
    assert (entry.schedule, entry.median_us, entry.fingerprint) == (
        before.schedule,
        before.median_us,
        before.fingerprint,
    )
    assert (races.raced, races.closed) == ([before.fingerprint], 1)
    again = Races(torch_flash="torch 2.11")
    assert bench(first, rivals=again).rivals == []
    assert again.raced == []
    more = Races(torch_flash="torch 2.11", flash_attention_4="flash-attn-4 4.0")
    assert bench(first, rivals=more, budget_s=0.0).rivals == []
    report = bench(first, rivals=more)
    assert report.to_json()["rivals"] == len(report.rivals) == 1
    assert [each.name for each in db.entries()[0].rivals] == ["torch_flash", "flash_attention_4"]
    assert len(bench(first, rivals=Races(torch_flash="torch 2.12")).rivals) == 1
    # What is kept of another source or under another compiler is looked at as well.
    monkeypatch.setattr(Attention, "source_hash", lambda: "another source")
    report = bench(first, rivals=Races(torch_flash="torch 2.14"))
    assert ([row.outcome for row in report.rows], len(report.rivals)) == ([KEPT], 1)
    kept = Races(torch_flash="torch 2.13")
    report = bench(second, rivals=kept)
    assert [row.outcome for row in report.rows] == [KEPT]
    assert [each.compiler for each in report.rivals] == [SECOND]
    assert db.check() == []


def test_another_kind_of_gpu_races_nothing(bench, db) -> None:
    first, second = first_and_second()
    second.measurements = [
        dataclasses.replace(m, device=dataclasses.replace(m.device, name="NVIDIA Other")) for m in second.measurements
    ]
    tuned(db, first)
    assert [row.outcome for row in bench(second).rows] == [LEFT]


def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "x.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    assert main(["refresh", "attention", "--arch", "sm_121", "--runner", "none"]) == 0
    assert "nothing of attention was measured for sm_121; run: tiledsched tune attention" in capsys.readouterr().out
    assert main(["refresh", "attention", "--arch", "sm_90", "-p", "S=3"]) == 2
    assert "no problem that was measured matches -p; leave it out" in capsys.readouterr().err
    assert main(["refresh", "nonsense"]) == 2


@pytest.mark.compiler
def test_what_ships_is_built_by_this_compiler(tmp_path, monkeypatch, capsys) -> None:
    """Both compilers' entries ship: with either the evidence stands, of this source as it is or of the same machine code."""
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "x.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    assert installed_toolchain().tileiras == compiler_at_hand()
    assert compiler_at_hand().startswith(RELEASES)
    command = ["refresh", "softmax", "--arch", "sm_90", "--problem", "rows=8192:131072", "--runner", "none"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kept"] + found["current"], found["to_race"]) == (2, 0)
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "2 of tileiras" in said  # once kept, current
    assert said.count("its machine code is another") == found["to_race"]
    with TuningDB.open(tmp_path / "x.db") as db:
        assert len(db.entries()) == len(db.measurements()) == found["kept"]
        assert db.check() == []
        assert all(each.updated_at > datetime(2026, 11, 1, tzinfo=timezone.utc) for each in db.entries())
