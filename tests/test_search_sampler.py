"""Proposing schedules: never twice, only valid ones, the same for the same seed, and quickly."""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiledsched import space_files
from tiledsched.errors import ConfigError
from tiledsched.kernels.attention import Attention
from tiledsched.schedule import Schedule
from tiledsched.search import tpe
from tiledsched.search.sampler import SAMPLERS, ScheduleSampler
from tiledsched.space_files import load_space

PROBLEM = Attention.standard(seq_len=4096, head_dim=128, causal=True)
PINNED = {"accum_mode": "fp32"}


def read_space(path):
    """A space of knobs that its kernel has not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(space_files, "known_knobs", lambda kernel: ())
        return load_space(path)


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    """Twelve knobs, 1500 schedules and constraints, as a real one; its own file, because the shipped ones change."""
    path = tmp_path_factory.mktemp("space") / "space.toml"
    knobs = {"tile_m": [64, 128, 256], "tile_n": [32, 64, 128], "occupancy": [1, 2, 3], "warps": [4, 8],
             "latency_k": [0, 2, 4], "latency_v": [0, 2, 4], "split": [False, True], "order": ["a", "b", "c"],
             "persistent": [False, True], "accum_mode": ["fp32", "fp16"]}  # fmt: skip
    lines = ['kernel = "attention"', 'arch = "sm_90"']
    lines += [f"[knobs.{name}]\nchoices = {str(choices).lower()}" for name, choices in knobs.items()]
    for rule in ("tile_m * tile_n * occupancy <= 16384", "latency_k <= latency_v", "order != 'b' or causal",
                 "not (persistent and split)", "latency_v == 0 or warps == 8 or order == 'a'"):  # fmt: skip
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


@pytest.mark.parametrize("name", SAMPLERS)
def test_never_twice_and_only_valid(space, name):
    sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED, name=name)
    assert 1000 < sampler.size < 2500
    asked = asked_in_batches(sampler, limit=300)
    assert len(asked) == len(set(asked)) == 300
    for schedule in asked:
        assert schedule["accum_mode"] == "fp32"
        assert space.violations(schedule, PROBLEM) == []


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_wider_sampler_proposes_what_was_added(space, name):
    everything = list(space.schedules(PROBLEM, pinned=PINNED | {"tile_m": 128, "latency_v": 0}))
    listed, more = everything[:20], everything[20:60]
    invalid = listed[0].replace(latency_k=4)
    assert space.violations(invalid, PROBLEM)
    sampler = ScheduleSampler(space.limited_to(listed), PROBLEM, pinned=PINNED, name=name)
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


@pytest.mark.parametrize("name", SAMPLERS)
def test_all_of_it_when_asked_long_enough(space, name):
    pinned = PINNED | {"tile_m": 128, "order": "a", "split": False, "latency_v": 0}
    everything = list(space.schedules(PROBLEM, pinned=pinned))
    sampler = ScheduleSampler(space, PROBLEM, pinned=pinned, name=name)
    asked = asked_in_batches(sampler, size=7)
    assert sampler.size == len(everything) > 20
    assert set(asked) == set(everything)
    assert len(asked) == len(everything)
    assert sampler.ask(1) == []
    if name == "exhaustive":
        assert asked == everything
    else:
        assert asked != everything


@pytest.mark.parametrize("name", SAMPLERS)
def test_same_seed_same_proposals(space, name):
    def asked(seed):
        return asked_in_batches(ScheduleSampler(space, PROBLEM, pinned=PINNED, name=name, seed=seed), limit=60)

    assert asked(1) == asked(1)
    assert (asked(1) == asked(2)) is (name == "exhaustive")


def test_same_proposals_in_another_process(space):
    """Hashes of strings differ between processes; proposals must not."""
    program = f"""
from tiledsched.search.sampler import ScheduleSampler
from test_search_sampler import *
sampler = ScheduleSampler(read_space({space.source!r}), PROBLEM, pinned=PINNED, seed=5)
print([schedule.id for schedule in asked_in_batches(sampler, limit=60)])
"""
    program = f"import sys\nsys.path[:] = {[str(Path(__file__).parent), *sys.path]!r}\n{program}"

    def output(hash_seed):
        return subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": hash_seed}, capture_output=True,
                              text=True, check=True).stdout  # fmt: skip

    assert output("1") == output("2") != ""


@pytest.mark.parametrize("name", SAMPLERS)
def test_first_come_first(space, name):
    everything = list(space.schedules(PROBLEM, pinned=PINNED))
    first = [everything[500], everything[3], everything[500], everything[77]]
    invalid = [first[0].replace(accum_mode="fp16"), first[0].replace(tile_m=7)]
    sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED, name=name, first=[*first, *invalid])
    asked = sampler.ask(20)
    assert asked[:3] == [everything[500], everything[3], everything[77]]
    assert len(set(asked)) == 20
    assert not set(asked) & set(invalid)


@pytest.mark.parametrize("name", SAMPLERS)
def test_known_are_not_proposed_again(space, name):
    everything = list(space.schedules(PROBLEM, pinned=PINNED))
    known = {
        schedule: None if i % 3 == 0 else 100.0 + i for i, schedule in enumerate(everything[: len(everything) - 10])
    }
    outside = everything[0].replace(accum_mode="fp16")
    sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED, name=name, first=everything[:2])
    sampler.known([*known.items(), (outside, 1.0), (Schedule(other=1), None)])
    assert set(sampler.ask(100)) == set(everything[-10:])


def test_what_is_known_informs(space):
    """A search that was told what an earlier one found goes on near the best of it, at once."""
    everything = list(space.schedules(PROBLEM, pinned=PINNED))
    told = [schedule for schedule in everything[::3] if schedule["persistent"] is False]
    sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED)
    sampler.known((schedule, landscape(schedule)) for schedule in told)
    informed = [landscape(schedule) for schedule in sampler.ask(24)]
    assert statistics.mean(informed) < statistics.quantiles(map(landscape, everything), n=10)[1]


@pytest.mark.parametrize("name", ["surrogate", "tpe"])
@pytest.mark.parametrize("seed", range(3))
def test_learning_finds_what_random_does_not(space, seed, name):
    best = min(map(landscape, space.schedules(PROBLEM, pinned=PINNED)))

    def found(how):
        sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED, name=how, seed=seed)
        return min(map(landscape, asked_in_batches(sampler, limit=96))) / best - 1

    assert found(name) < 0.02
    assert found(name) <= found("random")


def test_failures_are_told_as_none(space):
    """Half of the space fails; nothing breaks, nothing repeats, and the good half is still found."""
    everything = list(space.schedules(PROBLEM, pinned=PINNED))
    best = min(landscape(schedule) for schedule in everything if schedule["warps"] == 8)
    sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED)
    asked = asked_in_batches(sampler, limit=128, time_of=lambda s: landscape(s) if s["warps"] == 8 else None)
    assert len(set(asked)) == 128
    assert min(landscape(schedule) for schedule in asked if schedule["warps"] == 8) < 1.05 * best


def test_everything_fails(space):
    sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED)
    assert len(set(asked_in_batches(sampler, limit=64, time_of=lambda schedule: None))) == 64


def test_told_late_or_never(space):
    """Asked again before anything is told, as when a batch is lost to a deadline."""
    sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED)
    asked = sampler.ask(40)
    for schedule in asked[::2]:
        sampler.tell(schedule, landscape(schedule))
    more = sampler.ask(40)
    assert len({*asked, *more}) == 80
    for schedule in itertools.chain(more, asked[1::2]):
        sampler.tell(schedule, landscape(schedule))
    assert len(sampler.ask(5)) == 5


def test_no_valid_schedule(space):
    for name in SAMPLERS:
        sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED | {"tile_m": 4096}, name=name)
        assert (sampler.size, sampler.ask(3)) == (0, [])


def test_unknown_sampler(space):
    with pytest.raises(ConfigError, match="known are surrogate, tpe, random, exhaustive"):
        ScheduleSampler(space, PROBLEM, pinned=PINNED, name="genetic")


def test_quick_enough(space):
    """Seconds of processor time, not of the clock: the machine may be busy."""
    started = time.process_time()
    sampler = ScheduleSampler(space, PROBLEM, pinned=PINNED)
    asked_in_batches(sampler, limit=128)
    assert time.process_time() - started < 5.0


def test_tpe_is_asked_a_bounded_number_of_times(space, monkeypatch):
    asked = []
    propose = tpe._Study.propose
    monkeypatch.setattr(tpe._Study, "propose", lambda study: (asked.append(1), propose(study))[1])
    asked_in_batches(ScheduleSampler(space, PROBLEM, pinned=PINNED, name="tpe"), limit=96)
    assert 0 < len(asked) <= tpe.PROPOSALS * (96 - tpe.STARTUP)


def test_optuna_is_imported_only_for_tpe():
    program = "import sys, tiledsched.search.sampler; print('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"
