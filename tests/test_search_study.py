"""Proposing schedules: never twice, only valid ones, the same for the same seed, and quickly."""

from __future__ import annotations

import ast
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


def made(space, sampler="surrogate", pinned=None, **more):
    return ScheduleStudy(space, PROBLEM, pinned={**PINNED, **(pinned or {})}, sampler=sampler, **more)


def proposals(study, size=16, limit=None, time_of=landscape):
    """What a study proposes, told in batches; each is a valid schedule, and none comes twice."""
    found = []
    while batch := study.ask(size if limit is None else min(size, limit - len(found))):
        found.extend(batch)
        for schedule in batch:
            study.tell(schedule, time_of(schedule))
    assert len(found) == len(set(found))
    return found


def every(space, **pinned):
    return list(space.schedules(PROBLEM, pinned={**PINNED, **pinned}))


@pytest.mark.parametrize("name", QUICK)
def test_never_twice_only_valid_and_the_same_for_the_same_seed(space, name):
    first, again, other = (made(space, name, seed=seed) for seed in (1, 1, 2))
    found = proposals(first, limit=60)
    assert 1000 < first.size < 2500
    assert len(found) == 60
    assert {schedule["accum_mode"] for schedule in found} == {"fp32"}
    assert not any(space.violations(schedule, PROBLEM) for schedule in found)
    assert proposals(again, limit=60) == found
    assert (proposals(other, limit=60) == found) is (name == "exhaustive")
    nothing = made(space, name, {"tile_m": 4096})
    assert (nothing.size, nothing.ask(3)) == (0, [])


@pytest.mark.parametrize("name", QUICK)
def test_a_wider_sampler_proposes_what_was_added(space, name):
    everything = every(space, tile_m=128, latency_v=0)
    listed, more = everything[:20], everything[20:60]
    invalid = listed[0].replace(latency_k=4)
    assert space.violations(invalid, PROBLEM)
    study = made(space.limited_to(listed), name)
    size, first, known = study.size, study.ask(5), more.pop()
    for schedule in (*first, known):  # the last one from an earlier search, say
        study.tell(schedule, landscape(schedule))
    study.widen([*more, known, invalid, first[0]])
    assert study.size == size + len(more) + 2
    found = proposals(study, size=7)
    assert {*listed, *more, invalid} <= {*found, *first}
    assert known not in found
    assert len({*found, *first, known}) == len(found) + len(first) + 1 == study.size


@pytest.mark.parametrize("name", QUICK)
def test_all_of_it_when_asked_long_enough(space, name):
    pinned = {"tile_m": 128, "order": "a", "split": False, "latency_v": 0}
    everything, study = every(space, **pinned), made(space, name, pinned)
    found = proposals(study, size=7)
    assert study.size == len(everything) == len(found) > 20
    assert set(found) == set(everything)
    assert study.ask(1) == []
    assert (found == everything) is (name == "exhaustive")


@pytest.mark.slow
def test_same_proposals_in_another_process(space):
    """Hashes of strings differ between processes; proposals must not."""
    program = f"""
import sys
sys.path[:] = {[str(Path(__file__).parent), *sys.path]!r}
from test_search_study import *
print([schedule.id for schedule in proposals(made(read_space({space.source!r}), seed=5), limit=60)])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{[schedule.id for schedule in proposals(made(space, seed=5), limit=60)]}\n" != "[]\n"


@pytest.mark.parametrize("name", QUICK)
def test_first_come_first_and_what_is_known_is_not_proposed_again(space, name):
    everything = every(space)
    first = [everything[500], everything[3], everything[500], everything[77]]
    invalid = [first[0].replace(accum_mode="fp16"), first[0].replace(tile_m=7)]
    found = made(space, name, first=[*first, *invalid]).ask(20)
    assert found[:3] == [everything[500], everything[3], everything[77]]
    assert len(set(found)) == 20
    assert not set(found) & set(invalid)
    study = made(space, name, first=everything[:2])
    for place, schedule in enumerate([*everything[:-10], invalid[0], Schedule(other=1)]):
        study.tell(schedule, None if place % 3 == 0 else 100.0 + place)
    assert set(study.ask(100)) == set(everything[-10:])


def test_what_is_known_informs(space):
    """A search that was told what an earlier one found goes on near the best of it, at once."""
    everything, study = every(space), made(space)
    for schedule in everything[::3]:
        if schedule["persistent"] is False:
            study.tell(schedule, landscape(schedule))
    informed = [landscape(schedule) for schedule in study.ask(24)]
    assert statistics.mean(informed) < statistics.quantiles(map(landscape, everything), n=10)[1]


@pytest.mark.parametrize("seed", range(2))
def test_learning_finds_what_random_does_not(space, seed):
    best = min(map(landscape, every(space)))
    found = {
        name: min(map(landscape, proposals(made(space, name, seed=seed), limit=96))) / best - 1
        for name in ("surrogate", "tpe", "random")
    }
    assert max(found["surrogate"], found["tpe"]) < 0.02
    assert max(found["surrogate"], found["tpe"]) <= found["random"]


@pytest.mark.parametrize(("works", "limit"), [(lambda s: s["warps"] == 8, 128), (lambda s: False, 64)])
def test_failures_are_told_as_none(space, works, limit):
    """Half of the space fails, or all of it; nothing breaks, nothing repeats, and the good half is still found."""
    found = proposals(made(space), limit=limit, time_of=lambda s: landscape(s) if works(s) else None)
    best = min((landscape(schedule) for schedule in every(space) if works(schedule)), default=1.0)
    assert len(found) == limit
    assert min((landscape(schedule) for schedule in found if works(schedule)), default=1.0) < 1.05 * best


def test_told_late_or_never(space):
    """Asked again before anything is told, as when a batch is lost to a deadline."""
    study = made(space)
    first = study.ask(40)
    for schedule in first[::2]:
        study.tell(schedule, landscape(schedule))
    more = study.ask(40)
    assert len({*first, *more}) == 80
    for schedule in (*more, *first[1::2]):
        study.tell(schedule, landscape(schedule))
    assert len(study.ask(5)) == 5


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
        made(space, name)


def test_a_package_that_a_sampler_needs_is_named(space, monkeypatch):
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(ConfigError, match="sampler cmaes needs cmaes; install it"):
        made(space, "cmaes")


class Hasty(optuna.samplers.RandomSampler):
    """Somebody's sampler that cannot do with knobs as they are."""

    def sample_independent(self, study, trial, param_name, param_distribution):
        raise NotImplementedError("only floats")


@pytest.mark.parametrize(("name", "limit"), [("gp", 12), ("optuna.samplers:RandomSampler", 40)])
def test_anyones_sampler_may_take_its_place(space, name, limit):
    found = proposals(made(space, name, seed=3), limit=limit)
    assert len(found) == limit
    assert not any(space.violations(schedule, PROBLEM) for schedule in found)


def test_a_sampler_that_cannot_search_schedules_is_told(space):
    with pytest.raises(ConfigError, match="sampler Hasty cannot search schedules: only floats"):
        made(space, "test_search_study:Hasty").ask(1)


@pytest.mark.parametrize("name", ["surrogate", "tpe", "qmc"])
def test_trials_hold_what_was_tried(space, name):
    """Optuna's own view of the search: parameters, states and values are those of the schedules asked for and told."""
    searched = made(space, name)
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
    proposals(made(space), limit=128)
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
    tried = [trial.params for trial in study.get_trials()]
    assert study.best_params == {"x": 8, "y": "b", "z": False}
    assert len({tuple(each.values()) for each in tried}) == 9
    assert all(each in CANDIDATES for each in tried)
    assert 0 <= sampler.expected_gain(study) < 0.05


def first_of(sampler, direction="minimize"):
    """The first proposal of a study of the sampler's."""
    study = optuna.create_study(direction=direction, sampler=sampler)
    return study.ask({n: CategoricalDistribution(each) for n, each in CHOICES.items()}).params


@pytest.mark.parametrize(("alike", "first"), [(0.9, {"x": 8, "y": "b", "z": False}), (0.0, CANDIDATES[0])])
def test_the_surrogate_learns_from_other_tasks_as_far_as_they_are_alike(alike, first):
    """Where nothing is known, the first of equals is proposed."""
    columns = {"expected": tuple(map(rough, CANDIDATES)), "values": tuple(map(cost, CANDIDATES))}
    known = Known(task=2, candidates=tuple(CANDIDATES), **columns)
    more = {"task": 1, "elsewhere": [known], "similarity": lambda p, q: alike ** (p != q)}
    assert first_of(SurrogateSampler(CANDIDATES, choices=CHOICES, **more)) == first


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
    with pytest.raises(ValueError, match="minimises"):
        first_of(SurrogateSampler(CANDIDATES, choices=CHOICES), "maximize")


def test_the_surrogate_stands_alone():
    """It needs no other part of the package: it could be published as it is."""
    tree = ast.parse(Path(surrogate.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any((module or "").startswith("tiledsched") for module in modules)
