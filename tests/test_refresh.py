"""Evidence and compilers: which entry answers, when it is stale, and what `refresh` makes of what was measured before."""

from __future__ import annotations

import dataclasses
import random
from datetime import datetime, timezone

import pytest
from store_samples import DEVICE, PROBLEM, entry, measurement, stored
from test_search_tuner import LANDSCAPES, Recorded

from tiledsched import doctor
from tiledsched.build.toolchain import RELEASES, Toolchain, compiler_at_hand, installed_toolchain
from tiledsched.core.config import warn_once
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.replay import ReplayRunner
from tiledsched.measure.runner import RivalTime
from tiledsched.serve.explain import explain_problem
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import for_compiler, leaders, of_one_compiler, stale
from tiledsched.tuning.options import RefreshOptions
from tiledsched.tuning.prior import winners_nearby
from tiledsched.tuning.refresh import KEPT, LEFT, RACED
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.session import Session


def toolchain(version: str) -> Toolchain:
    return Toolchain(cuda_tile="1.7.0", tileiras=version, ptxas=version, nvvm=version)


def measured(version: str):
    """An entry whose machine code that compiler built, with its evidence filled in."""
    made = entry("measured", device_name=DEVICE.name, regime="burst", toolchain=toolchain(version))
    evidence = dataclasses.replace(stored(), measurement=measurement(100.0), toolchain=toolchain(version))
    return made.replace(measurement=evidence.summary)


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


@pytest.fixture
def db(home):
    """An empty database, which commands and sessions use."""
    with TuningDB.open(home / "tuning.db") as db:
        yield db


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


def test_entries_of_several_compilers_stand_side_by_side(db) -> None:
    for version, us in (("13.4.92", 100.0), ("13.5.37", 112.0), ("13.4.92", 99.0)):
        put_measured(db, measurement(us), toolchain(version))
    assert [(each.compiler, each.median_us) for each in db.entries()] == [("13.4.92", 99.0), ("13.5.37", 112.0)]
    assert db.check() == []
    assert {each.toolchain.tileiras for each in of_one_compiler(db.measurements(), "13.5.37")} == {"13.5.37"}
    for fullest in (False, True):  # one schedule each: the nearest
        assert len(of_one_compiler(db.measurements(), "13.4.92", fullest=fullest)) == 2
    with db.writing() as session:
        session.connection().exec_driver_sql("UPDATE entries SET compiler = '13.4.1' WHERE compiler = '13.4.92'")
    assert any("kept for compiler '13.4.1'" in line for line in db.check())


# Stale


def answer(*versions, **more):
    return LookupTable([measured(each) for each in versions], Attention, **more).resolve(PROBLEM, "sm_90", DEVICE.name)


NO_COMPILER = "no bundle here holds the machine code that was measured, and there is no compiler"
OTHER_CODE = "0" * 24


@pytest.mark.parametrize(
    ("versions", "compiler", "held", "words"),
    [
        (("13.4.92",), "13.5.37", (), ("tileiras 13.4.92", "13.5.37", "tiledsched refresh attention --arch sm_90")),
        (("13.4.92",), "13.4.92", (), ()),
        (("13.4.92", "13.5.37"), "13.5.37", (), ()),
        (("13.4.92",), "13.5.37", ("f" * 24,), ()),  # machine code in a bundle needs no compiler
        # Without a compiler only what a bundle holds is not stale; where there is none, nothing runs.
        (("13.4.92",), "", ("f" * 24, OTHER_CODE), ()),
        (("13.4.92",), "", (OTHER_CODE,), (NO_COMPILER,)),
        (("13.4.92",), "", (), ()),
    ],
)
def test_evidence_of_machine_code_that_does_not_run_is_called_stale(versions, compiler, held, words) -> None:
    assert measured("13.4.92").fingerprint == "f" * 24
    served = answer(*versions, compiler=compiler, at_hand=lambda: set(held))
    assert (served.provenance, bool(served.stale)) == ("measured", bool(words))
    assert all(each in served.stale for each in words)


def test_what_is_not_measured_or_not_known_by_its_machine_code_is_not_stale_and_no_bundle_is_read_for_nothing() -> None:
    assert not stale(entry("modelled", toolchain=toolchain("13.4.92")), "13.5.37")
    unknown = LookupTable([measured("13.4.92").replace(fingerprint="")], Attention, at_hand=lambda: {OTHER_CODE})
    assert not unknown.resolve(PROBLEM, "sm_90", DEVICE.name).stale
    assert not answer("13.5.37", compiler="13.5.37", at_hand=lambda: pytest.fail("a bundle was read")).stale


def test_explain_says_stale_unless_the_measured_program_runs_and_the_log_says_it_once(caplog) -> None:
    table = LookupTable([measured("13.4.92")], Attention, compiler="13.5.37")
    told = explain_problem(table, PROBLEM, "sm_90", DEVICE.name)
    assert ("  stale       tileiras 13.4.92 built" in str(told), told.to_json()["stale"]) == (True, True)
    seen = dataclasses.replace(told, launched_fingerprint=measured("13.4.92").fingerprint)
    assert ("stale" in str(seen), seen.to_json()["stale"]) == (False, False)
    warn_once.cache_clear()
    for _ in range(3):
        warn_once("attention: stale")
    assert [record.message for record in caplog.records] == ["attention: stale"]


def test_show_and_doctor_say_it(db, monkeypatch, cli) -> None:
    for version, us in (("13.4.92", 100.0), ("13.5.37", 110.0)):
        put_measured(db, measurement(us), toolchain(version))
    show = ["show", "attention", "--device", DEVICE.name]

    def shown(*more):
        return [(row["compiler"], row["stale"]) for row in cli([*show, "--json", *more]).json["entries"]]

    def evidence():
        machine = doctor.Machine(list_devices=lambda: [DEVICE])
        return next(each for each in doctor.examine(machine) if each.name == "evidence")

    assert shown("--compiler", "13.5.37") == [("13.5.37", False)]
    assert shown("--compiler", "13.6.1") == [("13.5.37", True)]
    monkeypatch.setattr("tiledsched.build.toolchain.compiler_at_hand", lambda: "13.4.92")
    assert shown() == [("13.4.92", False)]
    assert shown("--compiler", "all") == [("13.4.92", False), ("13.5.37", True)]
    by_compiler = f"2 entries measured on {DEVICE.name}: 1 with tileiras 13.4.92, 1 with tileiras 13.5.37"
    assert (evidence().status, evidence().detail) == ("ok", by_compiler)
    said = cli([*show, "--compiler", "13.6.1"])
    assert "measured, stale" in said.out
    assert "here is 13.6.1; run: tiledsched refresh" in said.err
    monkeypatch.setattr("tiledsched.build.toolchain.compiler_at_hand", lambda: "13.6.1")
    assert evidence().status == "warn"
    assert "1 are stale: the compiler here is tileiras 13.6.1" in evidence().detail
    for words in ("tiledsched refresh attention", "'nvidia-cuda-tileiras==13.5.*'"):
        assert words in evidence().remedy


# Refresh

SECOND = "13.4.10"
"""A compiler of which nothing ships, and to which that of the recorded landscapes is the nearest."""


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


def test_the_same_machine_code_keeps_its_evidence(db) -> None:
    first, second = first_and_second(lambda schedule: False)
    tuned(db, first)
    (row,) = refreshed(second, gpu=False).rows
    assert (row.outcome, row.why, len(db.measurements())) == (KEPT, "", 1)
    new, old = db.entries()
    assert (old.compiler, new.compiler) == (first.toolchain.tileiras, SECOND)
    assert (old.measurement.uid, old.schedule) == (new.measurement.uid, new.schedule)
    assert new.measurement.toolchain == first.toolchain  # it says what was measured
    assert db.check() == []
    again = refreshed(second, gpu=False)
    assert (again.current, again.rows, again.compiled) == (1, [], 0)


@pytest.mark.parametrize(
    ("changes", "gpu", "name", "why"),
    [
        (True, False, "", "its machine code is another"),
        (True, True, "NVIDIA Other", "its machine code is another"),  # another kind of GPU races nothing
        (None, False, "", "it does not build: not recorded"),
    ],
)
def test_without_its_gpu_it_says_what_would_be_raced_and_changes_nothing(db, changes, gpu, name, why) -> None:
    first, second = first_and_second(lambda schedule: changes)
    tuned(db, first)
    (before,) = db.entries()
    if changes is None:
        del second.fingerprints[before.schedule]
    device = second.measurements[0].device
    device = dataclasses.replace(device, name=name or device.name)
    second.measurements = [dataclasses.replace(each, device=device) for each in second.measurements]
    report = refreshed(second, gpu=gpu)
    (row,) = report.rows
    assert (row.outcome, row.why, row.now, db.entries()) == (LEFT, why, None, [before])
    assert row.leaders == tuple(leaders(before)) == (before.schedule, before.runner_up)
    assert report.to_json()["to_race"] == 1


def test_what_changed_is_raced_and_the_old_leaders_and_what_won_on_like_problems_take_part(db) -> None:
    """Where the old winner became slow, its like did elsewhere: what was found there is raced before the search."""
    first, second = first_and_second()
    tuned(db, first)
    (before,) = db.entries()
    there = first.problem.replace(seq_q=first.problem.seq_q * 2, seq_k=first.problem.seq_k * 2)
    slowest = max(second.measurements, key=lambda taken: taken.median_us)
    put_measured(db, dataclasses.replace(slowest, problem=there), second.toolchain, Attention.source_hash())
    report = refreshed(second)
    (row,) = report.rows
    assert (row.outcome, row.now.compiler, row.change) == (RACED, SECOND, pytest.approx(report.change))
    assert row.now.median_us <= 1.01 * second.best_us
    taken = [each for each in db.measurements(first.problem) if each.toolchain.tileiras == SECOND]
    assert {*row.leaders, slowest.schedule} <= {each.measurement.schedule for each in taken}
    assert before in db.entries()
    assert db.check() == []


def test_winners_nearby_are_those_of_the_nearest_problems_first() -> None:
    def problem_of(length):
        return Attention.problem(batch=1, heads=8, kv_heads=8, seq_q=length, seq_k=length, head_dim=64, dtype="float16")

    entries = []
    for length, tile in ((512, 64), (1024, 32), (4096, 128), (8192, 128), (16384, 256)):
        problem = problem_of(length)
        schedule = space_for("sm_90", Attention).default(problem).replace(tile_n=tile)
        entries.append(entry("measured", problem=problem, schedule=schedule))
    found = winners_nearby(problem_of(8192), entries)
    assert found[0]["tile_n"] == 128  # of 4096 or 16384, and its own does not count
    assert len(found) == len(set(found)) == 4
    assert winners_nearby(problem_of(8192), []) == []


def test_a_downgrade_and_an_upgrade_bring_either_evidence_back(db) -> None:
    first, second = first_and_second()
    tuned(db, first)
    refreshed(second)
    after = db.entries()
    for compiler in (first, second, first):
        report = refreshed(compiler)
        assert (report.current, report.rows, report.compiled, db.entries()) == (1, [], 0, after)
        table = LookupTable(after, Attention, compiler=compiler.toolchain.tileiras)
        served = table.resolve(first.problem, "sm_90", first.measurements[0].device.name)
        assert (served.entry.compiler, served.provenance) == (compiler.toolchain.tileiras, "measured")
        assert not served.stale
    assert db.check() == []


class Races:
    """The process of the rivals: which are here in which versions, and that each takes 90 us to our 100."""

    closed = 0

    def __init__(self, **versions: str) -> None:
        self.here, self.raced = versions, []

    def versions(self, problem):
        return self.here

    def race(self, problem, candidate):
        self.raced.append(candidate.artifact.fingerprint)
        same = {"ratio": 0.9, "ratio_low": 0.89, "ratio_high": 0.91, "samples": 30, "host_us": 50.0, "capturable": True}
        return [
            RivalTime(name=name, median_us=90.0, ours_us=100.0, version=version, **same)
            for name, version in self.here.items()
        ]

    def close(self) -> None:
        self.closed += 1


def test_rivals_that_were_not_timed_or_in_another_version_are(db, monkeypatch) -> None:
    first, second = first_and_second(lambda schedule: False)
    tuned(db, first)
    (before,) = db.entries()
    none = refreshed(first, rivals=None)
    assert (none.current, none.rivals, db.entries()) == (1, [], [before])
    races = Races(torch_flash="torch 2.11")
    (timed,) = refreshed(first, rivals=races).rivals
    (after,) = db.entries()
    assert [each.name for each in after.rivals] == [each.name for each in timed.rivals] == ["torch_flash"]
    for name in ("schedule", "median_us", "fingerprint"):
        assert getattr(after, name) == getattr(before, name)
    assert (races.raced, races.closed) == ([before.fingerprint], 1)
    again, more = Races(torch_flash="torch 2.11"), Races(torch_flash="torch 2.11", flash_attention_4="flash-attn-4 4.0")
    assert (refreshed(first, rivals=again).rivals, again.raced) == ([], [])
    assert refreshed(first, rivals=more, budget_s=0.0).rivals == []
    report = refreshed(first, rivals=more)
    assert report.to_json()["rivals"] == len(report.rivals) == 1
    assert [each.name for each in db.entries()[0].rivals] == ["torch_flash", "flash_attention_4"]
    assert len(refreshed(first, rivals=Races(torch_flash="torch 2.12")).rivals) == 1
    # What is kept of another source or under another compiler is looked at as well.
    monkeypatch.setattr(Attention, "source_hash", lambda: "a" * 12)
    for compiler, version in ((first, "torch 2.14"), (second, "torch 2.13")):
        report = refreshed(compiler, rivals=Races(torch_flash=version))
        assert [row.outcome for row in report.rows] == [KEPT]
        assert [each.compiler for each in report.rivals] == [compiler.toolchain.tileiras]
    assert db.check() == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            "attention --arch sm_121 --runner none",
            0,
            "nothing of attention was measured for sm_121; run: tiledsched tune",
        ),
        ("attention --arch sm_90 -p S=3", 2, "no problem that was measured matches -p; leave it out"),
        ("nonsense", 2, "nonsense"),
    ],
)
def test_the_command(db, cli, words, code, said) -> None:
    assert said in "".join(cli(f"refresh {words}", code=code))


@pytest.mark.slow
@pytest.mark.compiler
def test_what_ships_is_built_by_this_compiler(home, db, cli) -> None:
    """Both compilers' entries ship: with either the evidence stands, of this source as it is or of the same machine code."""
    assert installed_toolchain().tileiras == compiler_at_hand()
    assert compiler_at_hand().startswith(RELEASES)
    command = ["refresh", "softmax", "--arch", "sm_90", "--problem", "rows=8192:131072", "--runner", "none"]
    found = cli([*command, "--json"]).json
    assert (found["kept"] + found["current"], found["to_race"]) == (2, 0)
    said = cli(command).out
    assert "2 of tileiras" in said  # once kept, current
    assert said.count("its machine code is another") == found["to_race"]
    with TuningDB.open(home / "tuning.db") as db:
        assert len(db.entries()) == len(db.measurements()) == found["kept"]
        assert db.check() == []
        assert all(each.updated_at > datetime(2026, 11, 1, tzinfo=timezone.utc) for each in db.entries())
