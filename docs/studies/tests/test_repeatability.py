"""The repeatability study on made-up GPUs: candidates, methods, referee, rows and their summary."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import datetime, timezone

import pytest
from fake_builds import FakeBuilds, print_of
from golden import check_golden
from store_samples import DEVICE, TOOLCHAIN, artifact, measurement

from docs.studies.repeatability import __main__ as command
from docs.studies.repeatability.methods import Choice, Exhaustive, InTurn, RaceMethod
from docs.studies.repeatability.rows import StudyRow, read_rows
from docs.studies.repeatability.session import Field, Known, find_field, mixed, run_session
from docs.studies.repeatability.summary import summarise
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.replay import ReplayRunner
from tiledsched.measure.runner import Candidate
from tiledsched.store.db import TuningDB
from tiledsched.tuning.builder import Builder

TEMPLATE = kernel_named("attention")
SPACE = space_for("sm_90", Attention)
PROBLEM = Attention.standard(seq_len=1024, head_dim=64)
OTHER = Attention.standard(seq_len=4096, head_dim=64)
DEFAULT = SPACE.default(PROBLEM, pinned={"accum_mode": "fp32"})
SCHEDULES = [
    DEFAULT,
    *(
        each
        for each in itertools.islice(SPACE.schedules(PROBLEM, pinned={"accum_mode": "fp32"}), 40)
        if each != DEFAULT
    ),
]
TIMES = {schedule: 100.0 + 5 * index for index, schedule in enumerate(SCHEDULES)}
BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def measured(problem=PROBLEM, noise=0.001):
    """Each program's measurement: its time, and samples a little around it."""
    return [
        measurement(
            us,
            problem=problem,
            schedule=schedule,
            fingerprint=print_of(schedule),
            samples_us=tuple(us * (1 + noise * step) for step in (-1.0, 0.0, 1.0)),
        )
        for schedule, us in TIMES.items()
    ]


@pytest.fixture
def db(tmp_path):
    with TuningDB.open(tmp_path / "tuning.db") as db:
        run = db.start_run({}, "sm_90")
        for one in [*measured(), *measured(OTHER)]:
            db.record_measurement(run, "attention", TEMPLATE.source_hash(), TOOLCHAIN, one)
        yield db


def builder(db, made=None):
    made = made or FakeBuilds()
    return Builder(db, made, TEMPLATE, "sm_90", TOOLCHAIN, made)


def candidates(count=5):
    return tuple(Candidate(schedule=each, artifact=artifact(print_of(each))) for each in SCHEDULES[:count])


# Who takes part


@pytest.mark.parametrize(
    ("total", "count", "ranks"),
    [
        (10, 10, range(10)),
        (3, 10, range(3)),
        (10, 4, [0, 1, 5, 9]),
        (11, 5, [0, 1, 2, 6, 10]),
        (10, 9, [0, 1, 2, 3, 4, 5, 6, 7, 9]),
        (100, 1, [0]),
        (100, 7, [0, 1, 2, 3, 35, 67, 99]),
    ],
)
def test_half_the_fastest_and_the_rest_evenly_spread(total, count, ranks) -> None:
    ranked = [Known(schedule=DEFAULT, key=("", ((rank, 1, 1),)), median_us=float(rank)) for rank in range(total)]
    assert [known.key[1][0][0] for known in mixed(ranked, count)] == list(ranks)


def test_the_field_is_the_default_and_known_programs_in_no_order_of_speed(db) -> None:
    slow_default = dataclasses.replace(measured()[0], median_us=1e6)
    db.record_measurement(None, "attention", TEMPLATE.source_hash(), TOOLCHAIN, slow_default)
    made = FakeBuilds()
    field = find_field(db, builder(db, made), SPACE, PROBLEM, DEVICE, 9)
    schedules = [each.schedule for each in field.candidates]
    assert schedules[0] == DEFAULT
    assert [each.id for each in schedules[1:]] == sorted(each.id for each in schedules[1:])
    assert set(SCHEDULES[1:5]) < set(schedules)
    assert SCHEDULES[-1] in schedules
    assert len(schedules) == made.compiled == 9
    assert [each.schedule for each in field.leaders] == SCHEDULES[1:5]
    again = find_field(db, builder(db), SPACE, PROBLEM, DEVICE, 9)
    assert again == field


# Methods


def test_the_race_method_says_what_it_took() -> None:
    runner = ReplayRunner(TEMPLATE, measured(noise=0.0), seed=1)
    method = RaceMethod(runner)
    method.prepare(PROBLEM, candidates())
    choice = method.choose(PROBLEM, candidates())
    assert (choice.schedule, choice.estimate_us, choice.ties, choice.failures) == (DEFAULT, 100.0, (), 0)
    assert choice.launches >= 5 * 3
    assert choice.kernel_seconds == pytest.approx(choice.launches * 1.05e-4, rel=0.1)


# A session


class Fixed:
    """A method that always chooses one schedule."""

    def __init__(self, name, schedule, log=None, ties=()) -> None:
        self.name, self._schedule, self._ties = name, schedule, ties
        self._log = [] if log is None else log

    def prepare(self, problem, candidates) -> None:
        pass

    def choose(self, problem, candidates) -> Choice:
        self._log.append((problem, self.name))
        return Choice(
            schedule=self._schedule,
            estimate_us=99.0 if self._schedule else None,
            ties=self._ties,
            launches=7,
            kernel_seconds=0.5,
            failures=0,
        )


def session(methods, *, seed=0, fields=None, keep=lambda rows: None, noise=0.0):
    field = Field(candidates=candidates(12), leaders=candidates(4))
    runner = ReplayRunner(TEMPLATE, [*measured(noise=noise), *measured(OTHER, noise=noise)], seed=3)
    fields = fields or [(PROBLEM, field)]
    return run_session(fields, methods, runner, seed=seed, began=BEGAN, keep=keep)


def test_regret_comes_from_one_interleaved_run_of_the_chosen_and_the_leaders() -> None:
    rows = session(
        [Fixed("race", SCHEDULES[1], ties=(SCHEDULES[0],)), Fixed("in-turn", SCHEDULES[10]), Fixed("exhaustive", None)]
    )
    by = {row.method: row for row in rows if row.method != "referee"}
    assert by["race"].regret == pytest.approx(0.05)
    assert by["in-turn"].regret == pytest.approx(0.5)
    assert by["race"].ties == (SCHEDULES[1].id, SCHEDULES[0].id)
    assert by["in-turn"].ties is None
    assert (by["exhaustive"].schedule_id, by["exhaustive"].regret, by["exhaustive"].cv) == ("", None, None)
    assert (by["race"].cv, by["race"].cv_of_10, by["race"].candidates, by["race"].launches) == (0.0, 0.0, 12, 7)
    assert by["race"].device_seconds >= 0
    assert {row.position for row in by.values()} == {1, 2, 3}
    judged = {row.schedule_id: row for row in rows if row.method == "referee"}
    assert set(judged) == {SCHEDULES[index].id for index in (0, 1, 2, 3, 10)}
    assert judged[SCHEDULES[10].id].estimate_us == 150.0
    assert judged[SCHEDULES[0].id].regret == 0.0
    assert {row.launches for row in judged.values()} == {60}
    assert {row.session for row in rows} == {"2026-01-02T03:04:05+00:00"}


# Rows and their summary


def row(session="a", method="race", schedule="x", *, problem=PROBLEM, **more) -> StudyRow:
    values = {
        "session": session,
        "seed": 1,
        "position": 1,
        "method": method,
        "problem": problem,
        "schedule_id": schedule,
        "schedule": "128x64",
        "fingerprint": "f" * 24,
        "estimate_us": 100.0,
        "ties": None,
        "regret": 0.0,
        "cv": 0.01,
        "cv_of_10": 0.002,
        "device_seconds": 4.0,
        "kernel_seconds": 1.5,
        "launches": 300,
        "candidates": 100,
        "failures": 0,
        "device": "NVIDIA Sample",
        "driver": "580.1",
        "versions": "cuda-tile 1.7.0",
    }
    return StudyRow(**{**values, **more})


STUDY = [
    # race: problem 1 chooses x, x, y; all in each other's tie set except that "c" knows only y
    row("a", ties=("x", "y"), device_seconds=4.0),
    row("b", ties=("x", "y"), device_seconds=6.0, regret=0.01),
    row("c", schedule="y", ties=("y",), device_seconds=8.0, regret=0.02),
    # in-turn: x, z, w on problem 1, cheaper; never twice the same
    row("a", "in-turn", device_seconds=1.0, regret=0.0),
    row("b", "in-turn", "z", device_seconds=3.0, regret=0.21),
    row("c", "in-turn", "w", device_seconds=2.0, regret=0.1, failures=2),
    # exhaustive: chose nothing once
    row("a", "exhaustive", device_seconds=8.0, kernel_seconds=3.0),
    row("b", "exhaustive", "", device_seconds=9.0, regret=None, cv=None, estimate_us=None, kernel_seconds=4.0),
    # the referee: x on two sessions, y on one; another problem once
    row("a", "referee", "x", estimate_us=99.0, cv=0.010, cv_of_10=0.001, device_seconds=None, failures=None),
    row("b", "referee", "x", estimate_us=101.0, cv=0.030, cv_of_10=0.002, device_seconds=None, failures=None),
    row("b", "referee", "y", estimate_us=110.0, cv=0.020, cv_of_10=None, device_seconds=None, failures=None),
    row("a", "referee", "x", problem=OTHER, cv=0.5, cv_of_10=0.25, device_seconds=None, failures=None),
]


def test_the_summary_says_how_often_and_how_well_each_method_chose() -> None:
    check_golden("studies/repeatability.md", summarise(STUDY).to_markdown())


# The command


def test_a_session_appends_rows_and_stores_no_measurement(db, tmp_path, capsys) -> None:
    path, before = tmp_path / "study.csv", len(db.measurements())
    for seed, names in ((1, ("race", "in-turn", "exhaustive")), (2, ("race", "in-turn"))):
        runner = ReplayRunner(TEMPLATE, [*measured(), *measured(OTHER)], seed=seed)
        others = {"in-turn": Fixed("in-turn", SCHEDULES[2]), "exhaustive": Fixed("exhaustive", SCHEDULES[3])}
        chosen = [others.get(name) or RaceMethod(runner) for name in names]
        rows = command.study([PROBLEM, OTHER], db, builder(db), SPACE, runner, chosen, 12, seed, path)
        assert {each.method for each in rows} == {*names, "referee"}
        assert {each.candidates for each in rows if each.method == "race"} == {12}
    assert len(db.measurements()) == before
    assert capsys.readouterr().err.count(" us, ") == 10
    methods = {each.method: each for each in summarise(read_rows(path)).methods}
    assert [methods[name].choices for name in ("race", "in-turn", "exhaustive")] == [4, 4, 2]
    assert methods["race"].worst_regret < 0.01
    assert methods["in-turn"].mean_regret == pytest.approx(0.1, abs=0.01)
    assert methods["exhaustive"].in_tie_set == 0.0
    assert command.main(["--summary", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "exhaustive" in printed
    assert "S=4096" in printed


# On a real GPU


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="needs a CUDA device")
def test_torch_methods_launch_the_artifact_and_get_it_right() -> None:
    import cuda.tile as ct
    import torch

    from tiledsched.build.compiler import BuildTask, compile_task

    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    problem = Attention.standard(seq_len=512, head_dim=64, causal=True, batch=2, heads=4)
    default = space_for(arch, Attention).default(problem, pinned={"accum_mode": "fp32"})
    made = [
        compile_task(BuildTask(kernel=Attention.locator(), schedule=each, problem=problem, arch=arch)).artifact
        for each in (default, default.replace(tile_m=64, tile_n=32))
    ]
    field = [
        Candidate(schedule=default, artifact=made[0]),
        Candidate(schedule=default.replace(tile_m=64, tile_n=32), artifact=made[1]),
    ]
    for method in (InTurn(TEMPLATE), Exhaustive(TEMPLATE)):
        method.prepare(problem, field)
        q, k, v, out = (method._arrays[name] for name in ("Q", "K", "V", "Out"))
        right = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        for candidate in field:
            out.fill_(float("nan"))
            ct.launch(torch.cuda.current_stream(), *method._launch(candidate, problem))
            torch.cuda.synchronize()
            assert float((out.float() - right).norm() / right.norm()) < 4e-3
        choice = method.choose(problem, field)
        assert choice.failures == 0
        assert choice.schedule in {candidate.schedule for candidate in field}
        assert 1.0 < choice.estimate_us < 1e4
