"""Taking samples: pacing, interleaving, and a GPU that never waits at the power cap; and what samples say."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time

import pytest

from tiledsched.measure import timing
from tiledsched.measure.estimate import median_interval, probability_not_slower, relative_spread, relative_uncertainty
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


# What samples say: intervals and the paired test


# Intervals of the median


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (5, 1, 5),
        (6, 1, 6),
        (8, 1, 8),
        (9, 2, 8),
        (10, 2, 9),
        (20, 6, 15),
        (30, 10, 21),
        (50, 18, 33),
        (100, 40, 61),
        (5000, 2431, 2570),
    ],
)
def test_ranks_of_the_95_percent_interval(count, low, high):
    """Conover, Practical Nonparametric Statistics, table of the binomial at p = 1/2."""
    values = random.Random(count).sample(range(1, count + 1), count)
    assert median_interval(values, 0.95) == (low, high)


@pytest.mark.parametrize("count", [9, 30, 79])
def test_coverage(count):
    """Never below 95% but for chance; above, because ranks are whole numbers."""
    rng = random.Random(count)
    intervals = [median_interval([rng.lognormvariate(0, 0.3) for _ in range(count)], 0.95) for _ in range(600)]
    assert 0.935 < sum(low <= 1.0 <= high for low, high in intervals) / 600 < 0.985


def test_relative_uncertainty():
    assert relative_uncertainty([100.0] * 5, 0.95) == math.inf
    assert relative_uncertainty([100.0] * 6, 0.95) == 0.0
    assert relative_uncertainty([float(value) for value in range(1, 31)], 0.95) == pytest.approx((21 - 10) / 2 / 15.5)


# Spread


def test_the_spread_of_a_normal_distribution_is_its_deviation():
    rng = random.Random(1)
    samples = [rng.gauss(100, 2) for _ in range(20_000)]
    assert relative_spread(samples) == pytest.approx(0.02, rel=0.03)
    assert relative_spread([*samples, *[1e6] * 1000]) == pytest.approx(0.02, rel=0.2)
    assert statistics.stdev([*samples, *[1e6] * 1000]) > 1e5


# The paired test


def test_the_paired_test_sees_through_common_drift():
    rng = random.Random(3)
    drift = [1 + i / 20 for i in range(20)]
    ratios = [1.01 * math.exp(rng.gauss(0, 0.005)) for _ in drift]
    assert probability_not_slower(ratios) < 1e-4
    assert probability_not_slower([1 / ratio for ratio in ratios]) > 0.999


def test_the_paired_test_is_exact_for_few_samples():
    """All of n ratios above one: probability 2**-n under the null hypothesis."""
    for count in (3, 8, 13):
        ratios = [1 + (i + 1) / 1000 for i in range(count)]
        assert probability_not_slower(ratios) == pytest.approx(2.0**-count)
    assert probability_not_slower([1.0] * 8) == 1.0


def test_the_paired_test_errs_as_often_as_it_says():
    rng = random.Random(4)
    wrong = sum(probability_not_slower([math.exp(rng.gauss(0, 0.01)) for _ in range(13)]) < 0.05 for _ in range(800))
    assert 0.03 < wrong / 800 < 0.065
