"""What samples say: intervals and the paired test."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tiledsched.measure.estimate import median_interval, probability_not_slower, relative_spread, relative_uncertainty

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
