"""`--numerics same`: only what computes the bits of what is served may win, and what that costs is said. No GPU."""

from __future__ import annotations

import dataclasses
import json

import numpy
import pytest
from test_seen import Machine
from test_tuned_served import kernel as kernel  # a fixture

from tiledsched.cli.tuned_output import print_refreshed
from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError, FailureKind
from tiledsched.fleet.jobs import find_job
from tiledsched.measure.arrays import digest
from tiledsched.measure.runner import Checked
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import contradictions
from tiledsched.tuning.options import RefreshOptions, TuneOptions
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.session import Session


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


def tune(kernel, machine, rows=(4096,), **options):
    with Session("sm_90", tools=machine.tools) as session:
        problems = [kernel.problem(rows=each) for each in rows]
        report = session.tune(kernel, problems, TuneOptions(**{"rivals": "off", "effort": "quick", **options}))
    return report.results[0]


def test_only_the_numbers_of_the_default_win_where_nothing_was_served(kernel, tmp_path, cli) -> None:
    found = tune(kernel, Numbered(), numerics="same")
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
    tune(kernel, Numbered(), numerics="same")
    again = tune(kernel, Numbered(), numerics="same")
    assert (again.measured, again.entry.schedule["TILE"], again.numbers.refused) == (0, 16, 2)
    free = tune(kernel, Numbered())
    assert (free.measured, free.entry.schedule["TILE"], free.numbers) == (0, 32, None)
    kept = tune(kernel, Numbered(), numerics="same")  # the numbers of what is served today
    assert (kept.entry.schedule["TILE"], kept.numbers.incumbent["TILE"], kept.numbers.gain) == (32, 32, 0.0)


@pytest.mark.parametrize("inputs", ["", "others"])
def test_evidence_that_does_not_tell_the_numbers_is_taken_again(kernel, inputs) -> None:
    """It is from before digests were noted, or of other inputs."""
    old = Numbered()
    old.inputs = inputs
    tune(kernel, old)
    found = tune(kernel, Numbered(), numerics="same")
    assert found.measured > 0
    assert (found.entry.schedule["TILE"], found.numbers.fastest) == (32, None)


@pytest.mark.parametrize("unrepeatable", [(16,), (64,), (16, 32, 64)])
def test_what_does_not_equal_itself_equals_nothing(kernel, unrepeatable) -> None:
    machine = Numbered()
    machine.unrepeatable = unrepeatable
    found = tune(kernel, machine, numerics="same")
    default = (found.entry.schedule["TILE"], found.entry.schedule["occupancy"]) == (16, 1)
    assert found.stored
    assert found.numbers.repeatable == (16 not in unrepeatable)
    assert found.numbers.refused == {(16,): 5, (64,): 4, (16, 32, 64): 5}[unrepeatable]
    assert default or 16 not in unrepeatable
    assert ("from run to run" in found.entry.source) == (16 in unrepeatable)


def test_whether_a_rival_serves_stays_as_the_numbers_do(kernel) -> None:
    first = Numbered()
    found = tune(kernel, first, effort="race", rivals="serve")
    assert [each.name for each in found.entry.rivals] == ["other"]
    again = Numbered()
    again.us = lambda candidate: candidate.schedule["TILE"] * 1.0 / candidate.schedule["occupancy"]  # another one wins
    kept = tune(kernel, again, numerics="same", rivals="serve")
    assert kept.entry.schedule != found.entry.schedule
    assert (kept.entry.rivals, again.raced) == (found.entry.rivals, [])


def test_no_numbers_to_keep_where_nothing_served_works(kernel) -> None:
    class Broken(Numbered):
        def check(self, candidate):
            self.broken = (4096,) if candidate.schedule["TILE"] == 16 else ()
            return super().check(candidate)

    found = tune(kernel, Broken(), numerics="same")
    assert (found.entry.schedule["TILE"], found.numbers) == (32, None)


def test_a_refresh_keeps_the_numbers_that_the_new_machine_code_of_what_is_served_gives(kernel, capsys) -> None:
    tune(kernel, Numbered(), numerics="same")
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
        tune(kernel, NoGpu(), numerics="same")
    old = Numbered()
    old.inputs = ""
    with pytest.raises(ConfigError, match="record them again, or leave out --numerics same"):
        tune(kernel, old, numerics="same")


def test_candidates_of_a_file_say_why_they_lost(kernel, tmp_path) -> None:
    listed = tmp_path / "listed.json"
    listed.write_text(json.dumps([{"TILE": tile, "occupancy": 1} for tile in (32, 64)]))
    found = tune(kernel, Numbered(), numerics="same", candidates=str(listed))
    assert found.candidates["differs from the incumbent's numbers"] == 1


@pytest.mark.parametrize("options", [TuneOptions, RefreshOptions])
def test_a_fleet_carries_it_as_any_other_option(options) -> None:
    written = json.loads(json.dumps(options(numerics="same").to_json()))
    assert options.from_mapping(written, "tune").numerics == "same"
    assert find_job("tune" if options is TuneOptions else "refresh").unknown(written) == []
    with pytest.raises(ConfigError, match="numerics must be one of any, same, not 'equal'"):
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
