"""What samples tell: the estimate of a time, how much samples spread, and whether one program is slower than another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
EXACT_ROUNDS = 13
"""Up to this many rounds the paired test counts all 2**13 ways to deal out the signs."""


def median_interval(samples: Sequence[float], confidence: float) -> tuple[float, float]:
    """Distribution-free confidence interval of the median, from order statistics.

    The number of samples below the true median is binomial(n, 1/2); the interval runs between the order statistics
    that leave at most (1 - confidence) / 2 outside on each side (Conover, Practical Nonparametric Statistics, ch. 3).
    With fewer than six samples no such pair exists at 95%, and the range is returned.
    """
    from scipy.stats import binom

    ordered = sorted(samples)
    count = len(ordered)
    outside = (1.0 - confidence) / 2
    rank = int(binom.ppf(outside, count, 0.5))  # the smallest k with P(X <= k) >= outside
    if binom.cdf(rank, count, 0.5) <= outside:
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[count - rank]


def relative_uncertainty(samples: Sequence[float], confidence: float) -> float:
    """Half the width of the median's confidence interval over the median; infinite below six samples."""
    if len(samples) < 6:
        return math.inf
    low, high = median_interval(samples, confidence)
    return (high - low) / 2 / statistics.median(samples)


def relative_spread(samples: Sequence[float]) -> float:
    """A coefficient of variation that outliers do not move: 1.4826 times the median absolute deviation, over the median.

    Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation" (1993), section 1.
    """
    middle = statistics.median(samples)
    return MAD_TO_DEVIATION * statistics.median(abs(sample - middle) for sample in samples) / middle


def probability_not_slower(ratios: Sequence[float]) -> float:
    """One-sided p-value that times paired by round are not longer than their partner's, given their ratios.

    Wilcoxon signed-rank test of the logarithms (Wilcoxon 1945), rounds of equal times left out. Of few rounds all ways to
    deal out the signs are counted, which is exact with equal ranks, too (SciPy counts them one by one, in seconds); of
    more it is `scipy.stats.wilcoxon`. All ratios exactly 1 give 1.
    """
    from scipy.stats import rankdata, wilcoxon

    logs = np.log([ratio for ratio in ratios if ratio != 1.0])
    if not len(logs):
        return 1.0
    if len(logs) > EXACT_ROUNDS:
        return float(wilcoxon(logs, alternative="greater").pvalue)
    ranks = rankdata(np.abs(logs))
    signs = (np.arange(2 ** len(logs))[:, None] >> np.arange(len(logs))) & 1
    return float(np.mean(signs @ ranks >= ranks[logs > 0].sum()))


CONFIDENCE = 0.95
"""Confidence of the interval that is stated with a time."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of a launch, estimated from samples. A measurement is a timing with its samples and conditions."""

    median_us: float
    """Median of the samples, in microseconds."""
    ci_low_us: float
    """Lower end of the confidence interval of the median (95% unless stated otherwise), in microseconds."""
    ci_high_us: float
    """Upper end of that interval, in microseconds."""

    @classmethod
    def of(cls, samples_us: Sequence[float], confidence: float = CONFIDENCE) -> Timing:
        """The timing that these samples, in microseconds, give."""
        from tiledsched.measure.estimate import median_interval  # imports NumPy, which serving does without

        low, high = median_interval(samples_us, confidence)
        return Timing(median_us=statistics.median(samples_us), ci_low_us=low, ci_high_us=high)
