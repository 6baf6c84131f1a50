"""Proposing schedules: never twice, only valid ones, the same for the same seed, and quickly."""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from tiledsched.core import space_files
from tiledsched.core.errors import ConfigError
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import load_space
from tiledsched.kernels.attention import Attention
from tiledsched.tuning import surrogate
from tiledsched.tuning.samplers import SAMPLERS
from tiledsched.tuning.study import ScheduleStudy
from tiledsched.tuning.surrogate import Known, SurrogateSampler

PROBLEM = Attention.standard(seq_len=4096, head_dim=128, causal=True)
PINNED = {"accum_mode": "fp32"}
QUICK = [name for name in SAMPLERS if name != "gp"]
"""Optuna's Gaussian process takes a second for a proposal."""


def read_space(path):
    """A space of knobs that its kernel has not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(space_files, "known_knobs", lambda kernel: ())
        return load_space(path)


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    """Twelve knobs, 1500 schedules and constraints, as a real one; its own file, because the shipped ones change."""
    path = tmp_path_factory.mktemp("space") / "space.toml"
    knobs = {
        "tile_m": [64, 128, 256],
        "tile_n": [32, 64, 128],
        "occupancy": [1, 2, 3],
        "warps": [4, 8],
        "latency_k": [0, 2, 4],
        "latency_v": [0, 2, 4],
        "split": [False, True],
        "order": ["a", "b", "c"],
        "persistent": [False, True],
        "accum_mode": ["fp32", "fp16"],
    }
    lines = ['kernel = "attention"', 'arch = "sm_90"']
    lines += [f"[knobs.{name}]\nchoices = {str(choices).lower()}" for name, choices in knobs.items()]
    for rule in (
        "tile_m * tile_n * occupancy <= 16384",
        "latency_k <= latency_v",
        "order != 'b' or causal",
        "not (persistent and split)",
        "latency_v == 0 or warps == 8 or order == 'a'",
    ):
        lines.append(f'[[constraints]]\nrequire = "{rule}"\nbecause = "so it is"')
    path.write_text("\n".join(lines))
    return read_space(path)


def landscape(schedule: Schedule) -> float:
    """Microseconds: smooth in the knobs, with two that only pay together."""
    us = (
        100 + 20 * abs(math.log2(schedule.number("tile_m") / 128)) + 15 * abs(math.log2(schedule.number("tile_n") / 64))
    )
    us += 8 * (schedule["order"] != "c") + 3 * abs(schedule.number("occupancy") - 2) + 5 * (schedule["warps"] == 4)
    return us - 10 * (schedule["persistent"] is True and schedule["latency_v"] == 0) + schedule.number("latency_k")


def asked_in_batches(sampler, size=16, limit=None, time_of=landscape):
    asked = []
    while batch := sampler.ask(size if limit is None else min(size, limit - len(asked))):
        asked.extend(batch)
        for schedule in batch:
            sampler.tell(schedule, time_of(schedule))
    return asked


@pytest.mark.parametrize("name", QUICK)
def test_never_twice_and_only_valid(space, name):
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler=name)
    assert 1000 < sampler.size < 2500
    asked = asked_in_batches(sampler, limit=100)
    assert len(asked) == len(set(asked)) == 100
    for schedule in asked:
        assert schedule["accum_mode"] == "fp32"
        assert space.violations(schedule, PROBLEM) == []


@pytest.mark.parametrize("name", QUICK)
def test_a_wider_sampler_proposes_what_was_added(space, name):
    everything = list(space.schedules(PROBLEM, pinned=PINNED | {"tile_m": 128, "latency_v": 0}))
    listed, more = everything[:20], everything[20:60]
    invalid = listed[0].replace(latency_k=4)
    assert space.violations(invalid, PROBLEM)
    sampler = ScheduleStudy(space.limited_to(listed), PROBLEM, pinned=PINNED, sampler=name)
    size = sampler.size
    first = sampler.ask(5)
    for schedule in first:
        sampler.tell(schedule, landscape(schedule))
    known = more.pop()
    sampler.tell(known, landscape(known))  # from an earlier search, say
    sampler.widen([*more, known, invalid, first[0]])
    assert sampler.size == size + len(more) + 2
    asked = asked_in_batches(sampler, size=7)
    assert {*listed, *more, invalid} <= {*asked, *first}
    assert known not in asked
    assert len({*asked, *first, known}) == len(asked) + len(first) + 1 == sampler.size


@pytest.mark.parametrize("name", QUICK)
def test_all_of_it_when_asked_long_enough(space, name):
    pinned = PINNED | {"tile_m": 128, "order": "a", "split": False, "latency_v": 0}
    everything = list(space.schedules(PROBLEM, pinned=pinned))
    sampler = ScheduleStudy(space, PROBLEM, pinned=pinned, sampler=name)
    asked = asked_in_batches(sampler, size=7)
    assert sampler.size == len(everything) > 20
    assert set(asked) == set(everything)
    assert len(asked) == len(everything)
    assert sampler.ask(1) == []
    if name == "exhaustive":
        assert asked == everything
    else:
        assert asked != everything


@pytest.mark.parametrize("name", QUICK)
def test_same_seed_same_proposals(space, name):
    def asked(seed):
        return asked_in_batches(ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler=name, seed=seed), limit=60)

    assert asked(1) == asked(1)
    assert (asked(1) == asked(2)) is (name == "exhaustive")


def test_same_proposals_in_another_process(space):
    """Hashes of strings differ between processes; proposals must not."""
    program = f"""
from tiledsched.tuning.study import ScheduleStudy
from test_search_study import *
sampler = ScheduleStudy(read_space({space.source!r}), PROBLEM, pinned=PINNED, seed=5)
print([schedule.id for schedule in asked_in_batches(sampler, limit=60)])
"""
    program = f"import sys\nsys.path[:] = {[str(Path(__file__).parent), *sys.path]!r}\n{program}"

    said = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True
    ).stdout
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED, seed=5)
    assert said == f"{[schedule.id for schedule in asked_in_batches(sampler, limit=60)]}\n" != "[]\n"


@pytest.mark.parametrize("name", QUICK)
def test_first_come_first(space, name):
    everything = list(space.schedules(PROBLEM, pinned=PINNED))
    first = [everything[500], everything[3], everything[500], everything[77]]
    invalid = [first[0].replace(accum_mode="fp16"), first[0].replace(tile_m=7)]
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler=name, first=[*first, *invalid])
    asked = sampler.ask(20)
    assert asked[:3] == [everything[500], everything[3], everything[77]]
    assert len(set(asked)) == 20
    assert not set(asked) & set(invalid)


@pytest.mark.parametrize("name", QUICK)
def test_known_are_not_proposed_again(space, name):
    everything = list(space.schedules(PROBLEM, pinned=PINNED))
    known = {
        schedule: None if i % 3 == 0 else 100.0 + i for i, schedule in enumerate(everything[: len(everything) - 10])
    }
    outside = everything[0].replace(accum_mode="fp16")
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler=name, first=everything[:2])
    for schedule, median_us in [*known.items(), (outside, 1.0), (Schedule(other=1), None)]:
        sampler.tell(schedule, median_us)
    assert set(sampler.ask(100)) == set(everything[-10:])


def test_what_is_known_informs(space):
    """A search that was told what an earlier one found goes on near the best of it, at once."""
    everything = list(space.schedules(PROBLEM, pinned=PINNED))
    told = [schedule for schedule in everything[::3] if schedule["persistent"] is False]
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED)
    for schedule in told:
        sampler.tell(schedule, landscape(schedule))
    informed = [landscape(schedule) for schedule in sampler.ask(24)]
    assert statistics.mean(informed) < statistics.quantiles(map(landscape, everything), n=10)[1]


@pytest.mark.parametrize("name", ["surrogate", "tpe"])
@pytest.mark.parametrize("seed", range(3))
def test_learning_finds_what_random_does_not(space, seed, name):
    best = min(map(landscape, space.schedules(PROBLEM, pinned=PINNED)))

    def found(how):
        sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler=how, seed=seed)
        return min(map(landscape, asked_in_batches(sampler, limit=96))) / best - 1

    assert found(name) < 0.02
    assert found(name) <= found("random")


def test_failures_are_told_as_none(space):
    """Half of the space fails; nothing breaks, nothing repeats, and the good half is still found."""
    everything = list(space.schedules(PROBLEM, pinned=PINNED))
    best = min(landscape(schedule) for schedule in everything if schedule["warps"] == 8)
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED)
    asked = asked_in_batches(sampler, limit=128, time_of=lambda s: landscape(s) if s["warps"] == 8 else None)
    assert len(set(asked)) == 128
    assert min(landscape(schedule) for schedule in asked if schedule["warps"] == 8) < 1.05 * best


def test_everything_fails(space):
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED)
    assert len(set(asked_in_batches(sampler, limit=64, time_of=lambda schedule: None))) == 64


def test_told_late_or_never(space):
    """Asked again before anything is told, as when a batch is lost to a deadline."""
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED)
    asked = sampler.ask(40)
    for schedule in asked[::2]:
        sampler.tell(schedule, landscape(schedule))
    more = sampler.ask(40)
    assert len({*asked, *more}) == 80
    for schedule in itertools.chain(more, asked[1::2]):
        sampler.tell(schedule, landscape(schedule))
    assert len(sampler.ask(5)) == 5


def test_no_valid_schedule(space):
    for name in QUICK:
        sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED | {"tile_m": 4096}, sampler=name)
        assert (sampler.size, sampler.ask(3)) == (0, [])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("genetic", "known are surrogate, tpe, gp, cmaes, qmc, random, exhaustive, and module:Class"),
        ("nowhere.at_all:Sampler", "needs nowhere"),
        ("optuna.samplers:Nothing", "is no sampler"),
        ("optuna.samplers:GridSampler", "cannot be made without more arguments"),
    ],
)
def test_samplers_that_cannot_be(space, name, words):
    with pytest.raises(ConfigError, match=words):
        ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler=name)


def test_a_package_that_a_sampler_needs_is_named(space, monkeypatch):
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(ConfigError, match="sampler cmaes needs cmaes; install it"):
        ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler="cmaes")


class Hasty(optuna.samplers.RandomSampler):
    """Somebody's sampler that cannot do with knobs as they are."""

    def sample_independent(self, study, trial, param_name, param_distribution):
        raise NotImplementedError("only floats")


def test_optunas_gaussian_process_searches_schedules(space):
    asked = asked_in_batches(ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler="gp"), limit=12)
    assert len(set(asked)) == 12


def test_anyones_sampler_may_take_its_place(space):
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler="optuna.samplers:RandomSampler", seed=3)
    asked = asked_in_batches(sampler, limit=40)
    assert len(set(asked)) == 40
    assert not any(space.violations(schedule, PROBLEM) for schedule in asked)
    hasty = ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler="test_search_study:Hasty")
    with pytest.raises(ConfigError, match="sampler Hasty cannot search schedules: only floats"):
        hasty.ask(1)


@pytest.mark.parametrize("name", ["surrogate", "tpe", "qmc"])
def test_trials_hold_what_was_tried(space, name):
    """Optuna's own view of the search: parameters, states and values are those of the schedules asked for and told."""
    searched = ScheduleStudy(space, PROBLEM, pinned=PINNED, sampler=name)
    told, failed, left, running = searched.ask(4)
    searched.tell(told, 12.5)
    searched.tell(failed, None)
    searched.leave(left)
    trials = searched.study.get_trials()
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "PRUNED", "RUNNING"]
    assert searched.study.best_value == 12.5
    for trial, schedule in zip(trials, (told, failed, left, running), strict=True):
        values = {n: space.knobs[n].choices[place] if name == "qmc" else place for n, place in trial.params.items()}
        assert Schedule(values) == schedule


def test_quick_enough(space):
    """Seconds of processor time, not of the clock: the machine may be busy."""
    started = time.process_time()
    sampler = ScheduleStudy(space, PROBLEM, pinned=PINNED)
    asked_in_batches(sampler, limit=128)
    assert time.process_time() - started < 5.0


def test_only_searching_imports_optuna():
    program = "import sys, tiledsched.cli.commands; print('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"


# The surrogate as a sampler of any study

CHOICES = {"x": (1, 2, 4, 8, 16), "y": ("a", "b", "c"), "z": (False, True)}
CANDIDATES = [{"x": x, "y": y, "z": z} for x in CHOICES["x"] for y in CHOICES["y"] for z in CHOICES["z"] if x < 16 or z]


def cost(params) -> float:
    return 10 + abs(math.log2(params["x"]) - 3) + 2 * (params["y"] != "b") + params["z"]


def rough(params) -> float:
    """An estimate that knows half of it."""
    return 10 + abs(math.log2(params["x"]) - 3)


def test_the_surrogate_drives_a_study_of_anything():
    sampler = SurrogateSampler(CANDIDATES, choices=CHOICES, expected=map(rough, CANDIDATES))
    study = optuna.create_study(sampler=sampler)
    study.optimize(
        lambda trial: cost({n: trial.suggest_categorical(n, each) for n, each in CHOICES.items()}), n_trials=9
    )
    assert study.best_params == {"x": 8, "y": "b", "z": False}
    tried = [tuple(trial.params.values()) for trial in study.get_trials()]
    assert len(set(tried)) == 9
    assert all(trial.params in CANDIDATES for trial in study.get_trials())
    assert 0 <= sampler.expected_gain(study) < 0.05


def test_the_surrogate_learns_from_other_tasks_as_far_as_they_are_alike():
    known = Known(
        task=2,
        candidates=tuple(CANDIDATES),
        expected=tuple(map(rough, CANDIDATES)),
        values=tuple(map(cost, CANDIDATES)),
    )

    def first(alike):
        sampler = SurrogateSampler(
            CANDIDATES, choices=CHOICES, task=1, elsewhere=[known], similarity=lambda p, q: alike ** (p != q)
        )
        study = optuna.create_study(sampler=sampler)
        return study.ask({n: CategoricalDistribution(each) for n, each in CHOICES.items()}).params

    assert first(0.9) == {"x": 8, "y": "b", "z": False}
    assert first(0.0) == CANDIDATES[0]  # nothing is known: the first of equals


def test_what_the_surrogate_promises_is_the_gaussian_posterior():
    weights, tried = {"x": 1.0, "y": 2.0, "z": 0.5}, {3: 14.0, 8: 11.0, 20: None}
    encoder = surrogate.Encoder(CHOICES, weights)
    expected = surrogate.losses([rough(each) for each in CANDIDATES])
    made = surrogate.Surrogate(
        encoder.total,
        encoder.encode(CANDIDATES),
        expected,
        tried,
        (surrogate._Points(codes=np.zeros((0, 10)), expected=np.zeros(0), task=np.zeros(0, np.int64)), np.zeros(0)),
        np.ones((1, 1)),
        np.arange(len(CANDIDATES)),
    )
    chosen = made.choose(3)

    apart = np.array([[sum(w for n, w in weights.items() if a[n] != b[n]) for b in CANDIDATES] for a in CANDIDATES])
    prior = surrogate.UNEVEN * np.exp(-apart) + surrogate.SLOPE * np.outer(expected, expected) + surrogate.LEVEL
    seen, truth = list(tried), surrogate.losses(list(tried.values()))
    noise = np.diag(surrogate.NOISE + surrogate.COARSENESS * truth**2)
    mean = expected + prior[:, seen] @ np.linalg.solve(prior[np.ix_(seen, seen)] + noise, truth - expected[seen])
    # The last was chosen as if the two before it had come out as expected.
    seen, noise = [*seen, *chosen[:2]], np.diag([*np.diag(noise), surrogate.NOISE, surrogate.NOISE])
    solved = np.linalg.solve(prior[np.ix_(seen, seen)] + noise, prior[seen])
    spread = np.sqrt(np.diag(prior) - np.einsum("ij,ij->j", prior[seen], solved))
    normal = statistics.NormalDist()
    promised = [s * (-m / s * normal.cdf(-m / s) + normal.pdf(-m / s)) for m, s in zip(mean, spread, strict=True)]
    assert made.improvement() == pytest.approx(promised, rel=1e-6)
    assert chosen[2] == max(set(range(len(CANDIDATES))) - set(chosen[:2]), key=promised.__getitem__)


def test_the_surrogate_minimises_and_says_so():
    study = optuna.create_study(direction="maximize", sampler=SurrogateSampler(CANDIDATES, choices=CHOICES))
    with pytest.raises(ValueError, match="minimises"):
        study.ask({n: CategoricalDistribution(each) for n, each in CHOICES.items()})


def test_the_surrogate_stands_alone():
    """It needs no other part of the package: it could be published as it is."""
    import ast

    tree = ast.parse(Path(surrogate.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any((module or "").startswith("tiledsched") for module in modules)
