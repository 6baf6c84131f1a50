"""An estimate of a time from samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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
        from tiledsched.measure.statistics import median_interval  # imports NumPy, which serving does without

        low, high = median_interval(samples_us, confidence)
        return Timing(median_us=statistics.median(samples_us), ci_low_us=low, ci_high_us=high)
