"""Taking samples: pacing, interleaving, and a GPU that never waits at the power cap."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tiledsched.measure import timing
from tiledsched.measure.runner import Conditions, GapTrial
from tiledsched.measure.timing import calibrate, sample_rounds, steady_gap


class Watch:
    """Notes what is queued and read, and when."""

    def __init__(self) -> None:
        self.queued: list[tuple[int, bool, float]] = []
        self.waiting = 0
        self.waiting_after_reads: list[int] = []

    def queue(self, index: int, *, paced: bool) -> int:
        self.queued.append((index, paced, time.perf_counter()))
        self.waiting += 1
        return index

    def read(self, queued: int) -> float:
        self.waiting -= 1
        self.waiting_after_reads.append(self.waiting)
        return 100.0 + queued


class Log:
    polls = 0

    def poll(self) -> None:
        self.polls += 1

    def summary(self) -> Conditions:
        return Conditions(sm_clock_mhz=1900)


def test_burst_is_paced_interleaved_and_shuffled() -> None:
    watch, log = Watch(), Log()
    samples = sample_rounds(watch, 3, rounds=6, regime="burst", rng=random.Random(1), log=log, gap_s=0.004)
    order, paced, starts = zip(*watch.queued, strict=True)
    rounds = [order[i : i + 3] for i in range(0, 18, 3)]
    assert samples == [[100.0 + i] * 6 for i in range(3)]
    assert {tuple(sorted(each)) for each in rounds} == {(0, 1, 2)}
    assert len(set(rounds)) > 1
    assert min(later - earlier for earlier, later in itertools.pairwise(starts)) >= 0.9 * 0.004
    assert (set(paced), log.polls) == ({True}, 6)


class Noisy(Watch):
    """Times that depend on how long the GPU rested: steady from 2 ms on, or never."""

    def __init__(self, steady_from_s: float) -> None:
        super().__init__()
        self.steady_from_s, self.rng = steady_from_s, random.Random(7)

    def read(self, queued: int) -> float:
        starts = [start for *_, start in self.queued[-2:]]
        rest = starts[-1] - starts[0]
        steady = len(starts) == 2 and rest >= 0.9 * self.steady_from_s
        return 100.0 + self.rng.gauss(0, 0.1) if steady else 110.0 + self.rng.gauss(0, 4)


def test_calibration_finds_the_shortest_steady_gap(monkeypatch) -> None:
    monkeypatch.setattr(timing, "TRIAL_S", 0.08)
    watch = Noisy(0.002)
    trials = calibrate(watch, log=Log, gaps_s=(0.001, 0.002, 0.004))
    assert len(watch.queued) == 1 + (80 + 2) + (40 + 2) + (20 + 2)
    assert [trial.gap_ms for trial in trials] == [1.0, 2.0, 4.0]
    assert all(trial.sm_clock_mhz == 1900 for trial in trials)
    assert trials[0].spread > timing.STEADY_SPREAD > trials[1].spread
    assert trials[1].median_us == pytest.approx(100.0, abs=0.2)
    assert steady_gap(trials).gap_ms == 2.0


@pytest.mark.parametrize(("us", "gaps_ms"), [(900.0, [2.0, 5.0]), (1100.0, [5.0, 10.0]), (5000.0, [10.0, 20.0])])
def test_no_gap_leaves_the_gpu_without_rest_and_each_is_compared_with_a_longer_one(us, gaps_ms) -> None:
    watch = Watch()
    watch.read = lambda queued: us
    trials = calibrate(watch, log=Log, gaps_s=(0.002, 0.005))
    assert [trial.gap_ms for trial in trials] == gaps_ms
    assert steady_gap(trials) == trials[0]


def test_a_long_kernel_that_slows_where_it_rests_less_is_timed_farther_apart(monkeypatch) -> None:
    """Of 6 ms: at 20 ms, the only usual distance that lets the GPU rest, it is slower than at 40."""
    watch = Watch()

    def read(queued):
        starts = [start for *_, start in watch.queued[-2:]]
        return 6000.0 if starts[-1] - starts[0] > 0.030 else 6600.0

    watch.read = read
    trials = calibrate(watch, log=Log)
    assert [(trial.gap_ms, trial.median_us) for trial in trials] == [(20.0, 6600.0), (40.0, 6000.0)]


@pytest.mark.parametrize(
    ("trials", "gap_ms"),
    [
        ([(2, 100.0, 0.05), (5, 100.0, 0.02), (10, 100.0, 0.03)], 5),
        ([(2, 110.0, 0.004), (5, 100.0, 0.004), (10, 100.0, 0.003)], 5),  # at 2 ms it is calm, and 10% slower
        ([(10, 100.0, 0.5)], 10),
    ],
)
def test_without_a_steady_gap_the_calmest_counts(trials, gap_ms) -> None:
    """Of each trial: its gap in ms, its median in us and its spread."""
    made = [GapTrial(gap_ms=gap, median_us=us, spread=spread, sm_clock_mhz=0) for gap, us, spread in trials]
    assert steady_gap(made).gap_ms == gap_ms


def test_sustained_keeps_a_round_queued_and_counts_only_warm_samples() -> None:
    watch, log, started = Watch(), Log(), time.perf_counter()
    samples = sample_rounds(watch, 2, rounds=4, regime="sustained", rng=random.Random(1), log=log, warmup_s=0.05)
    assert time.perf_counter() - started >= 0.05
    assert samples == [[100.0] * 4, [101.0] * 4]
    assert len(watch.queued) > 2 * 4
    assert not any(paced for _, paced, _ in watch.queued)
    assert (log.polls, watch.waiting) == (4, 0)
    assert min(watch.waiting_after_reads[:-2]) >= 2  # the next round is queued before this one is read


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_the_same_seed_gives_the_same_orders(regime) -> None:
    watches = Watch(), Watch()
    for watch in watches:
        sample_rounds(watch, 4, rounds=3, regime=regime, rng=random.Random(5), log=Log(), gap_s=0, warmup_s=0)
    first, second = ([index for index, *_ in watch.queued][:12] for watch in watches)
    assert first == second
