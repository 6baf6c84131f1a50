"""Schedules whose launches overlap (the knob `pdl`): where they are allowed, how they race, and what is without the knob."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from fake_builds import FakeBuilds
from fake_machine import toolchain
from test_invariant import H200, WEIGHT, Gpu

from tiledsched.cli import main
from tiledsched.core.config import load_settings
from tiledsched.core.problem import missing_on
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.matmul import Matmul
from tiledsched.kernels.scaled_matmul import ScaledMatmul
from tiledsched.serve.transfer import repaired
from tiledsched.tuning.invariant import InvariantTune
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.session import Session

DECODING = Attention.problem(batch=1, heads=64, kv_heads=8, seq_q=1, seq_k=8192, head_dim=128, dtype="bfloat16")
PRODUCT = Matmul.problem(m=16, **WEIGHT)
ODD = Matmul.problem(m=2047, n=2049, k=2048)
SCALED = ScaledMatmul.problem(m=16, n=3584, k=18944, scales="row", fast_accum=True)
SPLIT = {"kv_splits": 8, "kv_combine": "launch"}
SHARES = {"SPLIT_K": 4, "PERSISTENT": False}
TIMES = {"burst": (1.0, 0.9, 0.8), "graph": (1.0, 0.8, 0.9)}
"""What the values of the knob make of a time."""


@pytest.mark.parametrize(
    ("problem", "changes", "allowed"),
    [
        (DECODING, SPLIT, True),
        (DECODING, {}, False),
        (DECODING, {**SPLIT, "kv_combine": "in_order"}, False),
        (PRODUCT, SHARES, True),
        (PRODUCT, {}, False),
        (PRODUCT, {**SHARES, "SPLIT_K": -4, "num_worker_warps": 8, "TILE_M": 64}, False),
        (ODD, {"PAD": True}, False),
        (SCALED, SHARES, True),
        (SCALED, {}, False),
    ],
)
def test_launches_overlap_from_sm_90_on_where_shares_are_combined_by_a_second_one(problem, changes, allowed) -> None:
    for arch in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_121"):
        if missing_on(arch, problem):
            continue
        space = space_for(arch, problem.declaration)
        changed = repaired(space.default(problem).replace(**changes), problem, space)
        assert changes.items() <= changed.items()
        for value in (1, 2):
            schedule = changed.replace(pdl=value)
            wanted = allowed and int(arch[3:]) >= 90
            assert (not space.unworkable(schedule, problem)) == wanted, (arch, value)
            assert space.violations(schedule, problem)  # no search lists it
            assert repaired(schedule, problem, space) == (schedule if wanted else changed)
        order = problem.declaration.reduction_order
        assert order(problem, changed) == order(problem, changed.replace(pdl=2))


def test_a_schedule_with_an_order_of_its_own_has_no_launches_that_overlap() -> None:
    space = space_for("sm_90", Attention)
    schedule = space.default(DECODING).replace(**SPLIT, pdl=1)
    assert not space.unworkable(Attention.ordered(DECODING, schedule), DECODING)


def test_launches_overlap_in_other_ways_of_one_schedule_alone() -> None:
    """Not of each that is near it. And the schedules near one whose launches overlap may have one launch."""
    space = space_for("sm_90", Matmul)
    schedule = repaired(space.default(PRODUCT).replace(**SHARES), PRODUCT, space)
    near = [each for each in space.neighbours(schedule, PRODUCT) if each["pdl"]]
    assert near == [schedule.replace(pdl=1), schedule.replace(pdl=2)]
    search = SimpleNamespace(kernel=Matmul, space=space, tuner=SimpleNamespace(pinned={}))
    around = list(InvariantTune.one_knob_away(search, near[0], PRODUCT))
    assert {each["SPLIT_K"] for each in around if not space.unworkable(each, PRODUCT)} >= {1, 2, 4, -2}


def test_what_was_stored_before_there_was_the_knob_is_the_same_schedule() -> None:
    before = Schedule(SPLIT)
    assert len({before.id, before.replace(pdl=0).id, before.replace(pdl=1).id, before.replace(pdl=2).id}) == 3
    assert before.id == before.replace(pdl=0).id
    for problem in (DECODING, PRODUCT, SCALED):
        space = space_for("sm_90", problem.declaration)
        schedule = space.default(problem)
        assert space.complete(Schedule({name: schedule[name] for name in schedule if name != "pdl"})) == schedule


class Overlapping(Gpu):
    """A GPU on which a second launch pays, and launches that overlap take other times, in graphs and out of them."""

    regimes = frozenset(TIMES)

    def __init__(self) -> None:
        super().__init__()
        self.factors, self.timed = TIMES["burst"], Counter()

    def probe(self, candidate) -> float:
        schedule = candidate.schedule
        second = schedule.get("kv_combine") == "launch" or schedule.get("SPLIT_K", 1) > 1
        self.timed[schedule] += 1
        return super().probe(candidate) * (0.1 if second else 1.0) * self.factors[schedule["pdl"]]

    def sample(self, candidates, *, rounds, regime):
        self.factors = TIMES[regime]
        return super().sample(candidates, rounds=rounds, regime=regime)


@pytest.mark.parametrize(
    "problem", [PRODUCT, pytest.param(SCALED, marks=pytest.mark.slow)], ids=lambda problem: problem.kernel
)
def test_the_fastest_schedules_race_with_launches_that_overlap(tmp_path, problem) -> None:
    builds, gpu = FakeBuilds(), Overlapping()
    tools = Tools(
        toolchain=toolchain,
        artifacts=lambda cache: builds,
        pool=lambda jobs: builds,
        devices=lambda: [H200],
        lacking=str,
        runner=lambda kernel, seed: gpu,
    )
    settings = load_settings({"db": str(tmp_path / "tuning.db"), "rivals": "off"})

    def winner(of=problem, **options) -> int:
        builds.schedules.clear()
        gpu.timed.clear()
        (entry,) = session.tune(problem.declaration, [of], TuneOptions(**options)).entries
        return entry.schedule["pdl"]

    with Session("sm_90", settings=settings, tools=tools) as session:
        assert winner(effort="race") == 0  # which searches nothing
        assert winner(effort="quick", deploy="graph") == 1
        assert winner(effort="quick") == 2
        assert 0 < sum(schedule["pdl"] > 0 for schedule in gpu.timed) <= 4
        large = problem.replace(seq_q=8192) if problem.kernel == "attention" else problem.replace(m=8192, n=8192)
        assert winner(large, effort="quick") == 0
        assert builds.schedules
        assert not any(schedule["pdl"] for schedule in builds.schedules)
    assert main(["--db", settings.db, "db", "check"]) == 0  # ids that leave out the knob are no damage
