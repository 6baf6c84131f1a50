"""Programs that are served where nothing was measured: which are built, what is written of them, and that processes agree."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import store_samples

from docs.studies.served_programs import DRAWN, add, build_all, drawn
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.registry import kernel_named
from tiledsched.core.resources import MAX_SPILL_BYTES
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
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
            artifact = (
                None if failure else SimpleNamespace(facts=type(facts)(**{**facts.to_json(), "spill_bytes": kept}))
            )
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
