"""What a tune names as its result is what is served afterwards, however little time there was. No GPU, no compiler."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from test_seen import H200, SCALE, Machine

from tiledsched.cli.tuned_output import print_tuned
from tiledsched.core.config import load_settings
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.registry import load_kernel
from tiledsched.core.space_files import space_for
from tiledsched.serve.entries import load_entries, load_table
from tiledsched.store.db import TuningDB
from tiledsched.tuning.options import TuneOptions
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
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEDSCHED_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setenv("TILEDSCHED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "first.py").write_text(SCALE.replace("NAME", "First"))
    return load_kernel(f"{tmp_path}/first.py:First")


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


def test_a_copy_of_a_kernels_entries_is_read_while_the_database_stays(kernel, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tiledsched.serve.entries.SETTLED_NS", 0)
    tune(kernel, [kernel.problem(rows=4096)], Slow(), budget_s=0.0)
    first, folder = load_entries(load_settings(), kernel=kernel), tmp_path / "cache" / "entries"
    copies = list(folder.iterdir())
    assert load_entries(load_settings())
    assert list(folder.iterdir()) == copies != []  # of all kernels together nothing is copied
    with monkeypatch.context() as patch:
        patch.setattr(TuningDB, "open", lambda *given, **more: pytest.fail("the database was read"))
        assert load_entries(load_settings(), kernel=kernel) == first
