"""How the methods of one cell take turns: how many samples each gets, in which order, and with what pauses.

Unlike the candidates of a race, methods differ a hundredfold in time. So each gets the same share of the time instead of
the same number of samples, and the samples of each are spread evenly over the whole run, so that a drift of the clocks
affects all of them alike.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.measure.timing import (
    BURST_GAP_S,
    SUSTAINED_REWARM_S,
    SUSTAINED_WARMUP_S,
    Log,
    Stopwatch,
    back_to_back,
    paced,
)

LEAST_SAMPLES = 6
"""Samples of each method, whatever it costs: fewer than six give no 95% interval of the median."""
MOST_SUSTAINED = 10
"""In the sustained regime, a method gets at most so many samples for each round: they follow at once and spread more."""
REST = 2.0
"""In the burst regime, a launch begins no sooner after the last one's beginning than this many times the last one's time."""
QUEUED = 8
"""In the sustained regime, launches queued ahead of the one that is waited for, so that the GPU never waits for the host."""
POLL_S = 0.020
"""Seconds between two readings of the clocks, at least."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Pauses between launches, and how long the GPU is warmed up."""

    gap_s: float = BURST_GAP_S
    """In the burst regime, seconds from the beginning of one launch to the next."""
    warmup_s: float = SUSTAINED_WARMUP_S
    """In the sustained regime, seconds of launches before samples count."""
    rewarm_s: float = SUSTAINED_REWARM_S
    """In the sustained regime, seconds of launches before samples count, where another sustained cell has just ended."""
    clock: Any = time
    """Tells the time by `perf_counter` and waits by `sleep`, both in seconds; tests bring another."""


USUAL_PACE = Pace()


def sample_counts(
    times_us: Sequence[float], *, regime: str, rounds: int, gap_s: float = BURST_GAP_S, seconds: float | None = None
) -> list[int]:
    """How many samples each method gets.

    Args:
        times_us: time of one call of each method, in microseconds; of one replay where CUDA graphs are used.
        regime: burst or sustained.
        rounds: samples of a quick method in the burst regime; in the sustained one up to `MOST_SUSTAINED` times as many.
        gap_s: in the burst regime, seconds from the beginning of one launch to the next.
        seconds: for all methods together, except that each gets `LEAST_SAMPLES`; None for what `rounds` paced samples of
            each take.
    """
    usual_s = rounds * gap_s
    share_s = usual_s if seconds is None else min(usual_s, seconds / max(1, len(times_us)))
    most = rounds if regime == "burst" else MOST_SUSTAINED * rounds
    costs_s = [max(gap_s, REST * us / 1e6) if regime == "burst" else us / 1e6 for us in times_us]
    # Rounded, not cut: 0.3 s over 10 ms are 30 samples, whatever binary fractions make of it.
    return [max(LEAST_SAMPLES, min(most, round(share_s / max(cost_s, 1e-9)))) for cost_s in costs_s]


def spread_evenly(counts: Sequence[int], rng: random.Random) -> list[int]:
    """An order in which method i appears `counts[i]` times: once at a random moment of each of so many equal parts of the run.

    Where all counts are equal, these parts are rounds in shuffled order.
    """
    moments = [((turn + rng.random()) / count, index) for index, count in enumerate(counts) for turn in range(count)]
    return [index for _, index in sorted(moments)]


def sample_in_turn(
    watch: Stopwatch, counts: Sequence[int], *, regime: str, rng: random.Random, log: Log, pace: Pace = USUAL_PACE
) -> list[list[float]]:
    """Samples of each method in microseconds: `counts[i]` of method i, less those that the stopwatch gives as NaN.

    NaN stands for a sample that took as long as it did because the GPU waited for the host.

    Args:
        watch: launches and times.
        counts: samples of each method, as `sample_counts` gives them.
        regime: burst or sustained.
        rng: draws the order.
        log: polled along the way.
        pace: pauses and warm-up.
    """
    order, clock = spread_evenly(counts, rng), pace.clock
    if regime == "burst":
        taken = paced(watch, order, gap_s=pace.gap_s, rest=REST, clock=clock)
    else:
        taken = back_to_back(watch, order, queued=QUEUED, warmup_s=pace.warmup_s, clock=clock)
    samples: list[list[float]] = [[] for _ in counts]
    next_poll = 0.0
    for index, microseconds in taken:
        if not math.isnan(microseconds):
            samples[index].append(microseconds)
        now = clock.perf_counter()
        if now >= next_poll:  # not too often, since NVML takes its time, too
            next_poll = now + POLL_S
            log.poll()
    return samples
