"""Compilers compared: each compiler's program takes its turn, and the rows say which is slower."""

from __future__ import annotations

import store_samples as samples

from docs.studies import compilers
from tiledsched.build.toolchain import Toolchain
from tiledsched.measure.runner import Batch, Conditions
from tiledsched.rivals.rows import append_rows, read_rows

OLD, NEW = (Toolchain(cuda_tile="1.7.0", tileiras=each, ptxas=each, nvvm=each) for each in ("13.4.92", "13.5.37"))


class Stopwatch:
    """A GPU on which each machine code takes as long as it is told to."""

    device = samples.DEVICE

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.runs = times, []

    def begin(self, problem) -> None:
        pass

    def probe(self, candidate):
        return self.times[candidate.artifact.fingerprint]

    def sample(self, candidates, *, rounds, regime):
        self.runs.append([each.artifact.fingerprint for each in candidates])
        return [Batch(samples_us=(self.probe(each),) * rounds, conditions=Conditions()) for each in candidates]


class Rebuilt:
    """A builder of the newer compiler, under which every old schedule becomes one program."""

    toolchain = NEW

    def fingerprint(self, schedule, problem) -> str:
        return "stale"


class MachineCode:
    """Machine code of every fingerprint, but one."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing

    def get(self, fingerprint):
        return None if fingerprint == self.missing else samples.artifact(fingerprint)


def entry_of(toolchain, fingerprint, **knobs):
    return samples.entry(
        "measured",
        fingerprint=fingerprint,
        schedule=samples.schedule(**knobs),
        toolchain=toolchain,
        device_name=samples.DEVICE.name,
        regime="burst",
        measurement=samples.stored(fingerprint=fingerprint).summary,
    )


def compare(gpu, code):
    served = compilers.served_by(
        [entry_of(NEW, "new", tile_m=128), entry_of(OLD, "old")], samples.PROBLEM, samples.DEVICE.name
    )
    assert list(served) == ["13.4.92", "13.5.37"]
    return compilers.compare(gpu, Rebuilt(), code, served, samples.PROBLEM, regime="burst", rounds=8)


def test_what_each_compiler_serves_is_timed_in_one_run(tmp_path, capsys) -> None:
    gpu = Stopwatch({"old": 100.0, "stale": 113.0, "new": 101.5})
    rows = compare(gpu, MachineCode())
    assert gpu.runs == [["old", "stale", "new"]]
    assert [(row.method, row.compiler, row.median_us, row.samples) for row in rows] == [
        ("tiledsched", "13.4.92", 100.0, 8),
        ("stale", "13.5.37", 113.0, 8),
        ("tiledsched", "13.5.37", 101.5, 8),
    ]
    append_rows(rows, tmp_path / "rows.csv")
    assert [row.compiler for row in read_rows(tmp_path / "rows.csv")] == ["13.4.92", "13.5.37", "13.5.37"]
    assert compilers.main(["--summary", str(tmp_path / "rows.csv")]) == 0
    said = capsys.readouterr().out
    assert "what is served now, burst: +1.5% by geometric mean of 1, 1 slower by more than 1%, worst +1.5%" in said
    assert "the old schedules, burst: +13.0% by geometric mean of 1" in said
