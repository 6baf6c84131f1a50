"""Programs that are served, shipped or modelled: which are built, what is written of them, and that processes agree."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import store_samples
import store_samples as samples

from docs.studies import modelled_programs as study
from docs.studies.served_programs import DRAWN, add, build_all, drawn
from docs.studies.shipped_programs import HEAD, row
from tiledsched.build.compiler import Built
from tiledsched.build.cubin import Artifact
from tiledsched.core.device import MAX_SPILL_BYTES, arch_spec
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.softmax import Softmax
from tiledsched.store.build_files import read_builds
from tiledsched.store.spills import DOES_NOT_BUILD

PROBLEM = Attention.standard(seq_len=1024, head_dim=64)


class Pool:
    """Builds every schedule with a tile of 64 keys into a program that spills, and refuses tiles of 128."""

    def __init__(self) -> None:
        self.built = []

    def build(self, tasks):
        for task in tasks:
            self.built.append((task.problem.dtype, task.schedule["tile_n"]))
            facts = store_samples.artifact().facts
            kept = MAX_SPILL_BYTES + 8 if task.schedule["tile_n"] == 64 else 0
            failure = Failure(kind=FailureKind.COMPILE_ERROR, message="no") if task.schedule["tile_n"] == 128 else None
            artifact = None if failure else SimpleNamespace(facts=replace(facts, spill_bytes=kept))
            yield SimpleNamespace(task=task, artifact=artifact, failure=failure)


def test_choices_are_built_until_one_is_sound_and_what_spills_is_written(tmp_path) -> None:
    default = space_for("sm_90", Attention).default(PROBLEM)
    choices = tuple(default.replace(tile_n=tile) for tile in (64, 128, 32))
    pool = Pool()
    same = PROBLEM.replace(batch=3)
    outcomes = build_all(Attention, "sm_90", [(PROBLEM, choices), (same, choices), (PROBLEM, ())], pool, math.inf)
    assert pool.built == [("float16", 64), ("float16", 128), ("float16", 32)]  # the element type makes no difference
    path = tmp_path / "attention" / "spills.json"
    assert add(path, "sm_90", "13.5.37", outcomes) == 2
    before = path.read_text()
    known = json.loads(before)["archs"]["sm_90"]["13.5.37"]
    assert list(known[choices[0].id].values()) == [MAX_SPILL_BYTES + 8]
    assert list(known[choices[1].id].values()) == [DOES_NOT_BUILD]
    assert add(path, "sm_90", "13.5.37", outcomes) == 2
    assert path.read_text() == before
    key = (choices[0].id, next(iter(known[choices[0].id])))
    assert add(path, "sm_90", "13.5.37", {key: 0}) == 1  # another build of it no longer spills
    assert add(path, "sm_90", "13.4.92", {key: 64}) == 1


def test_problems_are_drawn_by_a_seed_and_stand_for_their_bucket() -> None:
    for name in DRAWN:
        kernel = kernel_named(name)
        found = list(drawn(kernel, 3, 40))
        assert found == list(drawn(kernel, 3, 40)) != list(drawn(kernel, 4, 40))
        assert [kernel.similarity.bucketed(each) for each in found] == found


CHOICES = """
from docs.studies.served_programs import drawn
from tiledsched.core.config import load_settings
from tiledsched.kernels.attention import Attention
from tiledsched.serve.entries import load_table
table = load_table(load_settings(), kernel=Attention, archs={"sm_90"})
print([table.resolve(problem, "sm_90").schedule.id for problem in drawn(Attention, 1, 12)])
"""


def test_processes_serve_the_same_whatever_their_hashes(tmp_path) -> None:
    nothing = {"TILEDSCHED_DB": str(tmp_path / "none.db"), "TILEDSCHED_CACHE": str(tmp_path)}
    said = [
        subprocess.check_output([sys.executable, "-c", CHOICES], env={**os.environ, **nothing, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] != b"[]\n"


# What shipped tables serve, compiled: each program counts once, and those that fail or spill are named


def test_each_program_counts_once_and_those_that_fail_or_spill_are_named() -> None:
    problems = [samples.PROBLEM.replace(batch=number) for number in range(1, 5)]
    spills = {1: 0, 2: MAX_SPILL_BYTES + 8, 3: None}
    entries = [
        samples.entry("modelled", problem=problem, schedule=samples.schedule(occupancy=occupancy))
        for problem, occupancy in zip(problems, (1, 2, 2, 3), strict=True)
    ]

    def record(schedule, problem):
        kept = spills[schedule["occupancy"]]
        failure = Failure(kind=FailureKind.COMPILE_TIMEOUT, message="stopped") if kept is None else None
        facts = None if kept is None else SimpleNamespace(spill_bytes=kept)
        return SimpleNamespace(key=schedule.id, facts=facts, failure=failure)

    builder = SimpleNamespace(arch="sm_121", kernel=SimpleNamespace(name="attention"), record=record)
    cells, lines = row(builder, entries)
    assert dict(zip(HEAD[2:], map(int, cells[2:]), strict=True)) == {
        "entries": 4,
        "programs": 3,
        "fail": 1,
        "spill more than the limit": 1,
        "most bytes spilled": MAX_SPILL_BYTES + 8,
        "entries of those": 3,
    }
    assert [line.partition(": ")[2] for line in lines] == [
        f"{entries[1].schedule.short()} spills {MAX_SPILL_BYTES + 8} bytes",
        f"{entries[3].schedule.short()} compile_timeout: stopped",
    ]


# Modelled programs


class NothingCompiled:
    """Compiles nothing. Machine code depends on the schedule alone, or, where told so, on the arch as well."""

    def __init__(self, ends_after=10**9, by_arch=False):
        self.tasks, self.ends_after, self.by_arch = [], ends_after, by_arch

    def build(self, tasks):
        for task in list(tasks)[: self.ends_after]:
            self.tasks.append(task)
            facts = Softmax.cost.expected(task.problem, task.schedule, arch_spec(task.arch))
            name = task.schedule.id * 2 if not self.by_arch else f"{task.schedule.id}{task.arch:_>12}"
            artifact = Artifact(arch=task.arch, fingerprint=name, facts=facts, cubin=b"cubin")
            yield Built(task=task, artifact=artifact, failure=None, seconds=1.0)


def compiled(folder, pool, limit=30):
    kinds = study.kinds_of(Softmax, "sm_121", limit)
    study.compile_all(kinds, ["sm_120"], folder, pool, time.monotonic() + 60)
    return read_builds(study.file_of(kinds[0], folder)), kinds[0]


@pytest.mark.compiler  # whose version is written
def test_a_run_goes_on_where_an_earlier_one_stopped(tmp_path):
    first, _ = compiled(tmp_path, NothingCompiled(ends_after=20))
    assert (len(first.builds), first.alike) == (20, {})
    rest = NothingCompiled()
    whole, kind = compiled(tmp_path, rest)
    assert len(rest.tasks) == 10 + study.SAMPLE
    assert {build.key for build in whole.builds} == set(kind.wanted)
    assert (whole.space, whole.alike) == (len(kind.wanted), {"sm_120": study.SAMPLE})
    assert all(whole.builds[place].key in keys for name, keys in kind.serves.items() for place in whole.serves[name])
    again = NothingCompiled()
    compiled(tmp_path, again)
    assert again.tasks == []


@pytest.mark.compiler
def test_another_arch_is_named_only_where_the_machine_code_is_the_same(tmp_path):
    found, _ = compiled(tmp_path, NothingCompiled(by_arch=True))
    assert found.alike == {}
