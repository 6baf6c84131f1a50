"""What a tune names as its result is what is served afterwards, however little time there was, and with `--numerics same` computes the
bits of what was served before. No GPU, no compiler."""

from __future__ import annotations

import dataclasses
import json
import random
import time

import numpy
import pytest
from test_seen import H200, SCALE, Machine

from tiledsched.cli.tuned_output import print_refreshed, print_tuned
from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.registry import load_kernel
from tiledsched.core.space_files import space_for
from tiledsched.fleet.jobs import find_job
from tiledsched.measure.arrays import digest
from tiledsched.measure.runner import Checked
from tiledsched.serve.entries import load_table
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import contradictions
from tiledsched.tuning.options import RefreshOptions, TuneOptions
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.session import Session


class Slow(Machine):
    """Builds take 2 ms and end in any order; those in `refused` end last, and do not compile."""

    def __init__(self, seed=0, gpu=False, refused=()) -> None:
        super().__init__()
        self.rng, self.gpu, self.refused = random.Random(seed), gpu, refused

    @property
    def tools(self):
        return dataclasses.replace(super().tools, devices=lambda: [H200] if self.gpu else [])

    def build(self, tasks, *, leave=0):
        tasks = sorted(tasks, key=lambda task: (task.schedule in self.refused, self.rng.random()))
        for built in super().build(tasks, leave=leave):
            time.sleep(0.002)
            yield built

    def outcome(self, schedule):
        if schedule in self.refused:
            return Failure(kind=FailureKind.COMPILE_ERROR, message="planted")
        return super().outcome(schedule)


@pytest.fixture
def kernel(home):
    (home / "first.py").write_text(SCALE.replace("NAME", "First"))
    return load_kernel(f"{home}/first.py:First")


def tune(kernel, problems, machine, **options):
    with Session("sm_90", tools=machine.tools) as session:
        return session.tune(kernel, problems, TuneOptions(**options))


def check_served(report, machine, capsys) -> None:
    """What is printed is what `explain` says, and stands on an entry."""
    kernel = report.kernel
    table = load_table(load_settings(), kernel=kernel, archs={"sm_90"})
    for result, entry in zip(report.results, report.entries, strict=True):
        served = table.resolve(entry.problem, "sm_90", H200.name if machine.gpu else "")
        assert (served.schedule, served.provenance) == (entry.schedule, entry.provenance)
        assert served.entry is not None
        if result.is_served(entry):
            assert served.entry.run_id == report.run_id
        capsys.readouterr()
        print_tuned(dataclasses.replace(report, results=[result], entries=[entry]))
        printed = capsys.readouterr().out
        assert entry.schedule.short() in printed
        assert ("kept" in printed or "in place of" in printed) != result.is_served(entry)


@pytest.mark.parametrize(
    ("past", "gpu", "refuses_default", "options"),
    [
        ("", False, False, {"budget_s": 0.0}),
        ("", True, False, {"trials": 1}),
        ("", False, True, {"budget_s": 0.006}),
        ("", True, True, {"budget_s": 0.0}),
        ("modelled", False, True, {"trials": 1}),
        ("modelled", True, False, {"budget_s": 0.006}),
        ("modelled", False, False, {"budget_s": 0.0}),
        ("measured", False, False, {"trials": 1}),
        ("measured", True, True, {"budget_s": 0.006}),
        ("measured", False, True, {"budget_s": 0.0}),
        ("measured", True, False, {"budget_s": 0.0}),
    ],
)
def test_what_a_tune_names_is_served_whatever_the_budget(kernel, past, gpu, refuses_default, options, capsys) -> None:
    """Each pair of what was tuned before, a GPU or none, a default that compiles or does not, and a budget."""
    problems = [kernel.problem(rows=rows) for rows in (1000, 4096)]
    if past:
        tune(kernel, problems[:1], Slow(gpu=past == "measured"), effort="race")
    machine = Slow(3, gpu, [space_for("sm_90", kernel).default(problems[0])] if refuses_default else ())
    report = tune(kernel, problems, machine, effort="quick", rivals="off", **options)
    check_served(report, machine, capsys)
    assert all(result.stored for result in report.results)
    assert gpu <= ({each.provenance for each in report.entries} == {"measured"})


def test_a_budget_of_nothing_compares_the_default_and_what_is_served(kernel, capsys) -> None:
    """The default ends last of all builds, long after the budget: the winner was compared with it all the same."""
    problem = kernel.problem(rows=4096)
    default = space_for("sm_90", kernel).default(problem)

    class LastOfAll(Slow):
        def build(self, tasks, *, leave=0):
            yield from super().build(sorted(tasks, key=lambda task: task.schedule == default), leave=leave)

    machine = LastOfAll()
    machine.rng.random = lambda: 0.0
    report = tune(kernel, [problem], machine, budget_s=0.0)
    (result,) = report.results
    assert default in machine.schedules
    assert result.stored
    assert result.over_default is not None
    check_served(report, machine, capsys)


def test_a_tune_killed_in_the_middle_names_nothing_and_the_next_one_ends(kernel, capsys) -> None:
    problem = kernel.problem(rows=4096)

    class Killed(Slow):
        def build(self, tasks, *, leave=0):
            for count, built in enumerate(super().build(tasks, leave=leave)):
                if count == 1:
                    raise KeyboardInterrupt
                yield built

    with pytest.raises(KeyboardInterrupt):
        tune(kernel, [problem], Killed())
    with TuningDB.open(load_settings().db) as db:
        assert db.entries() == []
    machine = Slow(1)
    check_served(tune(kernel, [problem], machine, budget_s=0.0), machine, capsys)


def test_explain_is_for_the_gpu_here(kernel, monkeypatch, cli) -> None:
    problem = kernel.problem(rows=4096)
    tune(kernel, [problem], Slow(gpu=True), effort="quick", rivals="off")
    monkeypatch.setattr("tiledsched.cli.app.Invocation.gpus", lambda self: [dataclasses.replace(H200, name="Another")])
    said = cli(["explain", kernel.locator(), "--arch", "sm_90", "-p", "rows=4096"]).out
    assert "provenance  transferred: this problem was measured on NVIDIA H200" in said


# Only what computes the bits of what is served may win (--numerics same), and what that costs is said


class Numbered(Machine):
    """Tiles of 32 rows, the fastest, give other bits than those of 16 and 64; `unrepeatable` ones give others each time."""

    version, inputs, unrepeatable = "", "inputs", ()

    @property
    def tools(self) -> Tools:
        tools = super().tools
        return dataclasses.replace(
            tools,
            toolchain=lambda: dataclasses.replace(
                tools.toolchain(), **({"tileiras": self.version} if self.version else {})
            ),
        )

    def outcome(self, schedule):
        return self.get("sm_90", f"{schedule.id}{self.version}".ljust(24, "0"))

    def check(self, candidate):
        found, tile = super().check(candidate), candidate.schedule["TILE"]
        if not isinstance(found, Checked):
            return found
        outputs = f"{self.inputs}.{'32' if tile == 32 else 'others'}" if self.inputs else ""
        accuracy = dataclasses.replace(found.accuracy, outputs=outputs, repeatable=tile not in self.unrepeatable)
        return dataclasses.replace(found, accuracy=accuracy)


def tune_numbered(kernel, machine, rows=(4096,), **options):
    """The result of a quick tune of problems of so many rows."""
    problems = [kernel.problem(rows=each) for each in rows]
    return tune(kernel, problems, machine, **{"rivals": "off", "effort": "quick", **options}).results[0]


def test_only_the_numbers_of_the_default_win_where_nothing_was_served(kernel, tmp_path, cli) -> None:
    found = tune_numbered(kernel, Numbered(), numerics="same")
    numbers = found.numbers
    assert (found.entry.schedule["TILE"], found.entry.provenance, found.failed) == (16, "measured", 0)
    assert (numbers.incumbent["TILE"], numbers.fastest["TILE"], numbers.refused) == (16, 32, 2)
    assert numbers.gain == pytest.approx(1 - 1.0 / 1.5)
    with TuningDB.open(load_settings().db) as db:
        failures = db.failures("sm_90")
        assert {each.failure.kind for each in failures} == {FailureKind.OTHER_NUMBERS}
        assert {each.schedule["TILE"] for each in failures} == {32}
        assert all(
            each.failure.message.startswith("differs from the incumbent's numbers (TILE=16") for each in failures
        )
        assert list(contradictions(db.entries(), lambda each: db.measurements(each.problem))) == []
    told = ["bit for bit the numbers of TILE=16", "2 with others refused", "TILE=32", "takes 33.3% less time"]
    words = [kernel.locator(), "--arch", "sm_90"]
    explained = " ".join(cli(["explain", *words, "-p", "rows=4096"]).out.split())
    assert all(each in explained for each in told)
    assert "measured, same numbers" in cli(["show", *words]).out
    cli(["report", *words, "-o", str(tmp_path / "report")])
    page = next((tmp_path / "report").glob("*.md")).read_text()
    assert "Tuned with --numerics same" in page
    assert all(each in page for each in told)
    (entry,) = cli(["show", *words, "--json"]).json["entries"]
    assert all(each in entry["evidence"]["source"] for each in told)


def test_what_is_known_is_not_measured_again_and_any_may_win_later(kernel) -> None:
    tune_numbered(kernel, Numbered(), numerics="same")
    again = tune_numbered(kernel, Numbered(), numerics="same")
    assert (again.measured, again.entry.schedule["TILE"], again.numbers.refused) == (0, 16, 2)
    free = tune_numbered(kernel, Numbered())
    assert (free.measured, free.entry.schedule["TILE"], free.numbers) == (0, 32, None)
    kept = tune_numbered(kernel, Numbered(), numerics="same")  # the numbers of what is served today
    assert (kept.entry.schedule["TILE"], kept.numbers.incumbent["TILE"], kept.numbers.gain) == (32, 32, 0.0)


@pytest.mark.parametrize("inputs", ["", "others"])
def test_evidence_that_does_not_tell_the_numbers_is_taken_again(kernel, inputs) -> None:
    """It is from before digests were noted, or of other inputs."""
    old = Numbered()
    old.inputs = inputs
    tune_numbered(kernel, old)
    found = tune_numbered(kernel, Numbered(), numerics="same")
    assert found.measured > 0
    assert (found.entry.schedule["TILE"], found.numbers.fastest) == (32, None)


@pytest.mark.parametrize("unrepeatable", [(16,), (64,), (16, 32, 64)])
def test_what_does_not_equal_itself_equals_nothing(kernel, unrepeatable) -> None:
    machine = Numbered()
    machine.unrepeatable = unrepeatable
    found = tune_numbered(kernel, machine, numerics="same")
    default = (found.entry.schedule["TILE"], found.entry.schedule["occupancy"]) == (16, 1)
    assert found.stored
    assert found.numbers.repeatable == (16 not in unrepeatable)
    assert found.numbers.refused == {(16,): 5, (64,): 4, (16, 32, 64): 5}[unrepeatable]
    assert default or 16 not in unrepeatable
    assert ("from run to run" in found.entry.source) == (16 in unrepeatable)


def test_whether_a_rival_serves_stays_as_the_numbers_do(kernel) -> None:
    first = Numbered()
    found = tune_numbered(kernel, first, effort="race", rivals="serve")
    assert [each.name for each in found.entry.rivals] == ["other"]
    again = Numbered()
    again.us = lambda candidate: candidate.schedule["TILE"] * 1.0 / candidate.schedule["occupancy"]  # another one wins
    kept = tune_numbered(kernel, again, numerics="same", rivals="serve")
    assert kept.entry.schedule != found.entry.schedule
    assert (kept.entry.rivals, again.raced) == (found.entry.rivals, [])


def test_no_numbers_to_keep_where_nothing_served_works(kernel) -> None:
    class Broken(Numbered):
        def check(self, candidate):
            self.broken = (4096,) if candidate.schedule["TILE"] == 16 else ()
            return super().check(candidate)

    found = tune_numbered(kernel, Broken(), numerics="same")
    assert (found.entry.schedule["TILE"], found.numbers) == (32, None)


def test_a_refresh_keeps_the_numbers_that_the_new_machine_code_of_what_is_served_gives(kernel, capsys) -> None:
    tune_numbered(kernel, Numbered(), numerics="same")
    newer = Numbered()
    newer.version = "99.0"
    with Session("sm_90", tools=newer.tools) as session:
        report = session.refresh(kernel, None, RefreshOptions(numerics="same"))
    (row,) = report.rows
    assert row.outcome == "raced"
    assert row.now.schedule["TILE"] == 16
    assert "TILE=32" in row.now.same_numbers
    assert (row.same_numbers, row.to_json()["same_numbers"]) == (True, True)
    print_refreshed(report)
    assert "its results are the same, bit for bit" in capsys.readouterr().out


def test_what_cannot_tell_bits_is_refused(kernel) -> None:
    class NoGpu(Numbered):
        @property
        def tools(self):
            return dataclasses.replace(super().tools, devices=list)

    with pytest.raises(ConfigError, match="no GPU of sm_90 is used here; leave out --numerics same"):
        tune_numbered(kernel, NoGpu(), numerics="same")
    old = Numbered()
    old.inputs = ""
    with pytest.raises(ConfigError, match="record them again, or leave out --numerics same"):
        tune_numbered(kernel, old, numerics="same")


def test_candidates_of_a_file_say_why_they_lost(kernel, tmp_path) -> None:
    listed = tmp_path / "listed.json"
    listed.write_text(json.dumps([{"TILE": tile, "occupancy": 1} for tile in (32, 64)]))
    found = tune_numbered(kernel, Numbered(), numerics="same", candidates=str(listed))
    assert found.candidates["differs from the incumbent's numbers"] == 1


@pytest.mark.parametrize("options", [TuneOptions, RefreshOptions])
def test_a_fleet_carries_it_as_any_other_option(options) -> None:
    written = json.loads(json.dumps(options(numerics="same").to_json()))
    assert options.from_mapping(written, "tune").numerics == "same"
    assert find_job("tune" if options is TuneOptions else "refresh").unknown(written) == []
    with pytest.raises(ConfigError, match=r"numerics must be one of any, same.* not 'equal'"):
        options(numerics="equal")


# The digest


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint8", "int64"])
@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_a_digest_tells_every_bit_and_its_place(dtype, size, monkeypatch) -> None:
    monkeypatch.setattr("tiledsched.measure.arrays.WORDS_AT_ONCE", 100)
    rng = numpy.random.default_rng(0)
    bits = rng.integers(0, 256, size * numpy.dtype(dtype).itemsize, dtype=numpy.uint8)
    array = bits.view(dtype)
    found = {digest(numpy, array, 0), digest(numpy, array, 1)}
    assert digest(numpy, array.copy(), 0) in found
    for place in rng.integers(0, len(bits), 20):
        other = bits.copy()
        other[place] ^= 1 << int(rng.integers(8))
        found.add(digest(numpy, other.view(dtype), 0))
        found.add(digest(numpy, numpy.roll(bits, 1).view(dtype), 0))
    assert len(found) > min(20, size)
    assert len(found) >= 3


def test_a_digest_is_of_the_elements_however_they_lie(kernel) -> None:
    array = numpy.arange(12.0).reshape(3, 4)
    assert digest(numpy, array, 0) == digest(numpy, numpy.asfortranarray(array), 0)
    assert digest(numpy, array, 0) != digest(numpy, array.T, 0)
    zeros = numpy.zeros(4)
    assert digest(numpy, zeros, 0) != digest(numpy, -zeros, 0)
