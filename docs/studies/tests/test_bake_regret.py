"""The study of what baked trees lose, with a GPU that is not there."""

from __future__ import annotations

from types import SimpleNamespace

from docs.studies import bake_regret
from tiledsched.core.errors import Failure, FailureKind


class Program(SimpleNamespace):
    """A program of one schedule."""

    @property
    def schedule(self):
        return self.schedules[0]


class FakeSession:
    """Builds anything, and takes as many microseconds as TILE_ROWS says; a schedule with occupancy 2 fails."""

    toolchain = SimpleNamespace(tileiras="13.5.37")
    device = SimpleNamespace(name="NVIDIA H200")
    probe_us = 1.0

    def builder(self, kernel, timeout_s):
        return SimpleNamespace(
            build_for_each=list,
            programs=lambda schedules, problem, device: [Program(schedules=(each,)) for each in schedules],
            candidates=list,
        )

    def open_runner(self, kernel, name):
        failure = Failure(kind=FailureKind.LAUNCH_FAILURE, message="no")
        return SimpleNamespace(
            device=self.device,
            begin=lambda problem: None,
            probe=lambda one: failure if one.schedule["occupancy"] == 2 else self.probe_us,
            sample=self.sample,
        )

    def sample(self, some, rounds, regime):
        assert rounds == (5 if self.probe_us > 1e4 else 16)
        return [SimpleNamespace(samples_us=(float(each.schedule["TILE_COLUMNS"]),) * rounds) for each in some]


def test_choices_are_timed_beside_the_tables():
    name = "rms_norm, all measured"
    drawn, said = bake_regret.chosen(name, "sm_90", 5, 1)
    assert len(drawn) == 5
    assert said[-1].startswith(f"{name}, all leaves: 13 leaves, ")
    assert "chooses what the table chooses in 14 of 14" in said[-1]
    again = bake_regret.loaded(bake_regret.saved({name: drawn}))
    assert again == {name: drawn}
    bake_regret.build(FakeSession(), name, drawn)
    rows = list(bake_regret.timed(FakeSession(), name, again[name]))
    assert [{row["choice"] for row in each} for each in rows] == [{"table", "8 leaves", "16 leaves", "all leaves"}] * 5
    slow = FakeSession()
    slow.probe_us = 2e4
    assert str(list(bake_regret.timed(slow, name, drawn))) == str(rows)  # but of fewer samples
    lines = bake_regret.summary([row for each in rows for row in each]).splitlines()
    assert len(lines) == 5
    assert all(line.startswith(f"|{name}|") for line in lines[2:])
    one = {"set": "s", "choice": "8 leaves"}
    assert bake_regret.summary([{**one, "ratio": 1.0}, {**one, "ratio": "1.21"}, {**one, "ratio": "nan"}]).endswith(
        "\n|s|8 leaves|3|1|1.1000|1.210|1|1|"
    )


def test_choices_name_all_knobs(monkeypatch):
    of = bake_regret.Set(
        "matmul", lambda kernel: kernel.suite("llama_8b")[:6], bake_regret.SETS["matmul, all measured"].draw
    )
    monkeypatch.setitem(bake_regret.SETS, "six", of)
    drawn, said = bake_regret.chosen("six", "sm_90", 3, 1)
    assert "chooses what the table chooses in 6 of 6" in said[-1]
    assert all(choice.keys() == each.choices["table"].keys() for each in drawn for choice in each.choices.values())
