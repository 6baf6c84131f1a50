"""Compiling the shipped spaces into files of builds, with compile processes that are faked."""

from __future__ import annotations

import time

import pytest

from docs.studies import modelled_programs as study
from tiledsched.build.compiler import Built
from tiledsched.build.cubin import Artifact
from tiledsched.core.device import arch_spec
from tiledsched.kernels.softmax import Softmax
from tiledsched.store.build_files import read_builds


class Pool:
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
    first, _ = compiled(tmp_path, Pool(ends_after=20))
    assert (len(first.builds), first.alike) == (20, {})
    rest = Pool()
    whole, kind = compiled(tmp_path, rest)
    assert len(rest.tasks) == 10 + study.SAMPLE
    assert {build.key for build in whole.builds} == set(kind.wanted)
    assert (whole.space, whole.alike) == (len(kind.wanted), {"sm_120": study.SAMPLE})
    assert all(whole.builds[place].key in keys for name, keys in kind.serves.items() for place in whole.serves[name])
    again = Pool()
    compiled(tmp_path, again)
    assert again.tasks == []


@pytest.mark.compiler
def test_another_arch_is_named_only_where_the_machine_code_is_the_same(tmp_path):
    found, _ = compiled(tmp_path, Pool(by_arch=True))
    assert found.alike == {}
