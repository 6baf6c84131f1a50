"""Recording landscapes: the plan over the shipped space, and the recorder on a GPU and a compiler made of arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from fake_builds import FakeBuilds
from store_samples import DEVICE, TOOLCHAIN, artifact

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DatabaseError, Failure, FailureKind, NoValidScheduleError
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.replay import ReplayRunner
from tiledsched.measure.runner import Batch, Checked, Conditions
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import export_landscape, read_table
from tiledsched.tuning.builder import Builder
from tiledsched.tuning.options import RecordOptions
from tiledsched.tuning.record import COVERAGE, FIELD, LEADERS, SUSTAINED, Recorder, plan

ROOT = Path(__file__).parent.parent
PROBLEM = Attention.standard(seq_len=4096, head_dim=128, causal=True)
PINNED = {"accum_mode": "fp32"}
SPACE = space_for("sm_90", Attention)
ACCURACY = Accuracy(max_abs_error=1e-3, worst_tile_error=5e-4, worst_tile=(0, 0, 0), repeatable=True)


def small_space(least: int) -> SearchSpace:
    """The shipped space with at most two values for a knob: for as many knobs as it takes to have `least` schedules."""
    names = list(SPACE.knobs)
    for free in range(1, len(names)):
        knobs = {}
        for name, knob in SPACE.knobs.items():
            others = [value for value in knob.choices if value != knob.default]
            both = name in (*names[:free], names[-1])
            knobs[name] = dataclasses.replace(knob, choices=(knob.default, *others[: int(both)]))
        space = dataclasses.replace(SPACE, knobs=knobs)
        if sum(1 for _ in space.schedules(PROBLEM, pinned=PINNED)) >= least:
            break
    return space


SMALL, TINY = small_space(400), small_space(70)
INERT = list(SPACE.knobs)[-1]
"""The knob that changes nothing in the made-up machine code."""


def planned(count: int | None = None, **changes) -> list[Schedule]:
    values = {"problem": PROBLEM, "pinned": PINNED, "space": SMALL, **changes}
    return list(itertools.islice(plan(values.pop("space"), values.pop("problem"), **values), count))


def differences(a: Schedule, b: Schedule) -> int:
    return sum(a[name] != b[name] for name in a)


def test_a_plan_holds_every_valid_schedule_once_and_the_same_each_time() -> None:
    everything = planned()
    assert len(everything) == len(set(everything))
    assert set(everything) == set(SMALL.schedules(PROBLEM, pinned=PINNED))
    assert planned(50) == everything[:50] != planned(50, seed=1)
    assert planned(50, problem=PROBLEM.replace(seq_q=1024, seq_k=1024, batch=16)) == everything[:50]  # of one class


def test_a_plan_begins_with_the_default_the_seeds_and_their_neighbours() -> None:
    default = SMALL.default(PROBLEM, pinned=PINNED)
    seed = next(each for each in planned(200) if differences(each, default) > 2)
    older = Schedule({name: value for name, value in seed.items() if value != SMALL.knobs[name].default} | {"gone": 1})
    broken = default.replace(tile_m=7)
    order = planned(400, seeds=[older, broken])
    assert order[:2] == [default, seed]
    assert broken not in order
    assert all(min(differences(each, default), differences(each, seed)) == 1 for each in order[2:20:2])
    assert {each for each in SMALL.schedules(PROBLEM, pinned=PINNED) if differences(each, default) == 1} <= set(order)


def values_of(schedules) -> Counter:
    """How often each value of each knob occurs."""
    return Counter((name, repr(value)) for each in schedules for name, value in each.items())


def test_every_value_has_its_share() -> None:
    pinned = PINNED | {"tile_m": 128, "num_worker_warps": 8}
    allowed, order = values_of(SMALL.schedules(PROBLEM, pinned=pinned)), planned(120, pinned=pinned)
    counts, share = values_of(order), int(0.9 * COVERAGE * len(order))
    assert [value for value, most in allowed.items() if counts[value] < min(most, share)] == []


# The recorder


class Compiler(FakeBuilds):
    """Compiles and keeps everything; schedules that differ in one knob only are one program."""

    def __init__(self) -> None:
        super().__init__()
        self.works = True
        self.toolchain = TOOLCHAIN
        self.version = "1"
        """Another one makes other machine code of everything."""

    @staticmethod
    def fingerprint(schedule, version="1") -> str:
        values = {name: value for name, value in schedule.items() if name != INERT}
        return stable_id(values if version == "1" else {**values, "version": version}, 24)

    def outcome(self, schedule):
        if self.works:
            return artifact(self.fingerprint(schedule, self.version))
        return Failure(kind=FailureKind.COMPILE_ERROR, message="no")


class Gpu:
    """Counts what is asked of it, and can be interrupted or find a result wrong."""

    name, device, begun, looks = "gpu", DEVICE, 0, 0

    def __init__(
        self, *, seed=0, interrupt_after=10**9, wrong=lambda schedule: False, conditions: Conditions | None = None
    ) -> None:
        self._rng, self._interrupt_after, self._wrong = random.Random(seed), interrupt_after, wrong
        self.conditions = conditions or Conditions()

    def _time(self, candidate, regime="burst") -> float:
        """100 to 600 us by the machine code; in the sustained regime others are fastest."""
        place = int(candidate.artifact.fingerprint[:6], 16) / 16**6
        true_us = 100 * (1 + 5 * place) * (1.3 - 0.2 * place if regime == "sustained" else 1)
        return true_us * self._rng.gauss(1, 0.002)

    def begin(self, problem):
        self.begun += 1

    def probe(self, candidate):
        self.looks += 1
        if self.looks > self._interrupt_after:
            raise KeyboardInterrupt
        return self._time(candidate)

    def check(self, candidate):
        if self._wrong(candidate.schedule):
            return Failure(kind=FailureKind.WRONG_RESULT, message="planted")
        return Checked(accuracy=ACCURACY, first_look_us=self._time(candidate))

    def sample(self, candidates, *, rounds, regime):
        return [
            Batch(samples_us=tuple(self._time(each, regime) for _ in range(rounds)), conditions=self.conditions)
            for each in candidates
        ]

    def close(self): ...


class Site:
    """A database, and what is needed to record into it."""

    def __init__(self, db: TuningDB) -> None:
        self.db, self.compiler = db, Compiler()
        self.said: list[str] = []

    def recorder(self, runner, *, space=SMALL, **options) -> Recorder:
        options = {"programs": 40, "sustained_leaders": 5, **options}
        return Recorder(
            Builder(self.db, self.compiler, Attention, space.arch, self.compiler.toolchain, self.compiler),
            space,
            RecordOptions(**options),
            run_id=self.db.start_run({}, "sm_90"),
            runner=runner,
            progress=self.said.append,
        )

    def record(self, folder, runner=None, **options):
        return next(self.recorder(runner or Gpu(), **options).record([PROBLEM], folder))

    def build(self, folder, **options):
        return next(self.recorder(None, **options).record([PROBLEM], folder))

    def samples(self, regime: str) -> list[int]:
        return [len(one.measurement.samples_us) for one in self.db.measurements(PROBLEM, regime=regime, latest=True)]


@pytest.fixture
def site(tmp_path):
    with TuningDB.open(tmp_path / "tuning.db") as db:
        yield Site(db)


def test_a_landscape_is_recorded_and_replayed(site, tmp_path) -> None:
    result = site.record(tmp_path)
    assert (result.programs, result.failed, result.complete) == (40, 0, True)
    assert [(file.regime, file.distinct_programs) for file in result.files] == [("burst", 40), ("sustained", 5)]
    burst, sustained = ([one.measurement for one in read_table(file.path).measurements] for file in result.files)
    times, first = sorted(one.median_us for one in burst), result.files[0]
    assert (len(burst), len(sustained), first.best_us) == (40, 5, times[0])
    assert (first.worst_ratio, first.best_tflops) == (times[-1] / times[0], PROBLEM.tflops(times[0]))
    for taken in burst:
        samples, ratio = len(taken.samples_us), taken.median_us / times[0]
        assert samples in (1, FIELD.opening_rounds, LEADERS.opening_rounds)
        assert samples == LEADERS.opening_rounds or ratio > 1.05
        assert samples > 1 or ratio > 3  # only the hopeless
    assert {one.schedule for one in sustained} == {one.schedule for one in burst if one.median_us <= times[4]}
    assert {len(one.samples_us) for one in sustained} == {SUSTAINED.opening_rounds}
    races = [line.split(": ")[1].split(",")[0] for line in site.said if "programs measured" in line]
    assert races == ["burst", "burst", "sustained"], "all, then the leaders, of which no others came near"
    ReplayRunner(Attention, burst).begin(PROBLEM)
    for device, regime, programs in (
        ("another GPU", "burst", 0),
        (DEVICE.name, "burst", 40),
        (DEVICE.name, "sustained", 5),
    ):
        assert export_landscape(site.db, tmp_path / "l.json", PROBLEM, device, regime) == programs


def test_a_second_run_measures_and_compiles_nothing(site, tmp_path) -> None:
    site.record(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.xz")}
    compiled, runner = site.compiler.compiled, Gpu(seed=2)
    again = site.record(tmp_path, runner)
    assert (again.measured, again.compiled, runner.begun, runner.looks) == (0, 0, 0, 0)
    assert (site.compiler.compiled, {path: path.read_bytes() for path in before}) == (compiled, before)
    more = site.record(tmp_path, programs=50)
    assert more.programs == 50
    assert 10 <= more.measured < 50


def test_what_was_measured_while_the_clock_was_held_down_is_said_and_measured_again(site, tmp_path) -> None:
    site.record(tmp_path, Gpu(conditions=Conditions(sm_clock_mhz=513, throttle_reasons=("hardware thermal",))))
    assert any(": clock held down in" in line and "at 513 MHz" in line for line in site.said)
    site.said.clear()
    assert site.record(tmp_path, Gpu(seed=2)).measured > 0
    assert not any("held down" in line for line in site.said)
    assert site.record(tmp_path, Gpu(seed=3)).measured == 0


def test_builds_come_first_and_need_no_gpu_and_a_budget_ends_what_follows(site, tmp_path) -> None:
    built = site.build(tmp_path)
    assert (built.programs, built.measured, built.complete, built.files) == (40, 0, False, ())
    assert built.compiled == site.compiler.compiled > 0
    ended = site.record(tmp_path, budget_s=0.0)
    assert (ended.complete, ended.measured, ended.files) == (False, 0, ())
    result = site.record(tmp_path)
    assert (result.compiled, result.complete) == (0, True)


@pytest.mark.parametrize("looks", [1, 130])
def test_an_interrupted_run_goes_on(site, tmp_path, looks) -> None:
    with pytest.raises(KeyboardInterrupt):
        site.record(tmp_path, Gpu(interrupt_after=looks), programs=120)
    kept = site.samples("burst").count(FIELD.opening_rounds)
    assert (kept > 0) == (looks > 128)  # a batch of 64, each looked at twice at most, is stored when it is done
    runner = Gpu(seed=3)
    assert site.record(tmp_path, runner, programs=120).complete
    samples = site.samples("burst")
    assert len(samples) == 120
    assert runner.looks <= 2 * (120 - kept) + samples.count(LEADERS.opening_rounds) + 10


def test_failures_are_rows_and_not_tried_again(site, tmp_path) -> None:
    def bad(schedule):
        return int(Compiler.fingerprint(schedule), 16) % 3 == 0

    result = site.record(tmp_path, Gpu(wrong=bad))
    assert result.complete
    assert len(site.db.failures("sm_90", PROBLEM, stage="measure")) == result.failed == result.failed_programs > 0
    assert not any(bad(one.measurement.schedule) for one in site.db.measurements(regime="sustained"))
    runner = Gpu(wrong=bad)
    again = site.record(tmp_path, runner)
    assert (runner.looks, again.failed_programs) == (0, result.failed_programs)


def test_fewer_programs_than_asked_for_are_stated_and_none_is_an_error(site, tmp_path) -> None:
    result, everything = site.build(tmp_path, programs=10**6, space=TINY), list(TINY.schedules(PROBLEM, pinned=PINNED))
    programs = {(Compiler.fingerprint(each), Attention.grids(PROBLEM, each, DEVICE)) for each in everything}
    assert (result.schedules, result.programs) == (len(everything), len(programs))
    assert f"only {result.programs} distinct programs could be had, 1000000 were asked for" in site.said[-1]
    site.compiler.works, site.compiler.toolchain = False, dataclasses.replace(TOOLCHAIN, tileiras="13.5.9")
    with pytest.raises(NoValidScheduleError, match=r"none of \d+ schedules builds.*: no; run: tiledsched doctor"):
        site.record(tmp_path, space=TINY)


def test_only_the_code_that_another_compiler_makes_anew_is_measured_again(site, tmp_path) -> None:
    first, runner = site.record(tmp_path, programs=30), Gpu(seed=2)
    before = first.files[0].path.read_bytes()
    site.compiler.toolchain = dataclasses.replace(TOOLCHAIN, tileiras="13.5.1")
    result = site.record(tmp_path, runner, programs=30)
    assert result.compiled == site.compiler.compiled / 2 > 0
    assert (result.measured, runner.looks, result.complete) == (0, 0, True)
    assert result.files[0].path.read_bytes() == before

    site.compiler.toolchain = dataclasses.replace(TOOLCHAIN, tileiras="13.5.2")
    site.compiler.version = "2"
    result = site.record(tmp_path, programs=30)
    compilers = Counter(one.toolchain.tileiras for one in read_table(result.files[0].path).measurements)
    assert compilers == {"13.4.12": 30, "13.5.2": 30}  # what is known of the old code stays known
    assert result.files[0].distinct_programs == 60


def test_what_is_timed_beside_others_is_no_part_of_a_landscape(site, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tiledsched.tuning.race.PATIENCE_S", 0.0)
    result = site.record(tmp_path, Gpu(conditions=Conditions(concurrent_pids=(4711,))))
    assert (result.complete, result.measured, result.failed, result.files) == (False, 0, 0, ())
    assert "left, because all is timed beside process 4711 on the GPU; end it and run again" in " ".join(site.said)
    assert site.db.measurements(disturbed=True)
    assert site.record(tmp_path).complete


# The file format


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (3, "newer tiledsched.*reads 2; upgrade"),
        (1, "1 is not read.*export the file again"),
        ("2", "not read"),
        (True, "not read"),
    ],
)
def test_another_version_is_refused(tmp_path, version, words) -> None:
    (tmp_path / "l.json").write_text(json.dumps({"schema_version": version}))
    with pytest.raises(DatabaseError, match=words):
        read_table(tmp_path / "l.json")


def test_the_documented_snippet_runs(site, tmp_path, capsys, monkeypatch) -> None:
    example = ROOT / "docs" / "examples" / "replay_landscape.py"
    site.record(tmp_path).files[0].path.rename(tmp_path / "landscape.json.xz")
    monkeypatch.chdir(tmp_path)
    exec(compile(example.read_text(), example, "exec"), {})
    said = capsys.readouterr().out
    assert "TFLOP/s" in said
    assert "winner" in said
