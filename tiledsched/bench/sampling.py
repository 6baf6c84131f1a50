"""How the methods of one cell take turns: how many samples each gets, in which order, and with what pauses.

Methods differ a hundredfold in time here, unlike the candidates of a race. Each gets the same share of the time instead of the
same number of samples, and the samples of each are spread evenly over the whole run, so that a drift of clocks hits
all of them alike.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from tiledsched.measure.timing import BURST_GAP_S, SUSTAINED_WARMUP_S, Log, Stopwatch

LEAST_SAMPLES = 6
"""Of each method, whatever it costs: below six there is no 95% interval of the median."""
MOST_SUSTAINED = 10
"""Sustained: samples of a method, at most, for each round asked for. They follow each other at once and spread more."""
REST = 2.0
"""Burst: the next launch begins no sooner than this many times the last one's own time after it began."""
QUEUED = 8
"""Sustained: launches queued ahead of the one waited for, so that the GPU never waits for the host."""
POLL_S = 0.020
"""Distance of two readings of the clocks, at least."""


def sample_counts(
    times_us: Sequence[float], *, regime: str, rounds: int, gap_s: float = BURST_GAP_S, seconds: float | None = None
) -> list[int]:
    """Samples of each method, of which one call takes `times_us`.

    Args:
        times_us: one call of each, in microseconds; with CUDA graphs, one replay.
        regime: burst or sustained.
        rounds: samples of a quick method in the burst regime; sustained, up to `MOST_SUSTAINED` times as many.
        gap_s: burst: start-to-start distance of launches.
        seconds: for all methods together, but what `LEAST_SAMPLES` needs; None for what `rounds` paced samples of
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

    Where all counts are equal these parts are rounds, in shuffled order.
    """
    moments = [((turn + rng.random()) / count, index) for index, count in enumerate(counts) for turn in range(count)]
    return [index for _, index in sorted(moments)]


def sample_in_turn(
    watch: Stopwatch,
    counts: Sequence[int],
    *,
    regime: str,
    rng: random.Random,
    log: Log,
    gap_s: float = BURST_GAP_S,
    warmup_s: float = SUSTAINED_WARMUP_S,
) -> list[list[float]]:
    """Microseconds of each method, `counts[i]` samples of method i, less those that the stopwatch takes for the host's (NaN).

    Args:
        watch: launches and times.
        counts: samples of each, as `sample_counts` says.
        regime: burst or sustained.
        rng: of the order.
        log: polled along the way.
        gap_s: burst only: start-to-start distance of launches.
        warmup_s: sustained only: how long launches run before samples count.
    """
    order = spread_evenly(counts, rng)
    samples: list[list[float]] = [[] for _ in counts]
    readings = _Readings(log)
    if regime == "burst":
        _burst(watch, order, samples, readings, gap_s)
    else:
        _sustained(watch, order, samples, readings, warmup_s)
    return samples


class _Readings:
    """Polls a log, but not too often: NVML takes its time, too."""

    def __init__(self, log: Log) -> None:
        self._log, self._next = log, 0.0

    def poll(self) -> None:
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + POLL_S
            self._log.poll()


def _keep(samples: list[float], microseconds: float) -> None:
    if not math.isnan(microseconds):
        samples.append(microseconds)


def _burst(
    watch: Stopwatch, order: Sequence[int], samples: list[list[float]], readings: _Readings, gap_s: float
) -> None:
    next_start = time.perf_counter()
    for index in order:
        pause = next_start - time.perf_counter()
        if pause > 0:
            time.sleep(pause)
        start = time.perf_counter()
        microseconds = watch.read(watch.queue(index, paced=True))
        next_start = start + max(gap_s, REST * microseconds / 1e6)
        _keep(samples[index], microseconds)
        readings.poll()


def _sustained(
    watch: Stopwatch, order: Sequence[int], samples: list[list[float]], readings: _Readings, warmup_s: float
) -> None:
    """The GPU never waits: `QUEUED` launches are ahead of the one whose time is read."""
    ahead: deque[tuple[int, Any, bool]] = deque()

    def read_oldest() -> None:
        index, queued, counts = ahead.popleft()
        microseconds = watch.read(queued)
        if counts:
            _keep(samples[index], microseconds)
            readings.poll()

    def queue(index: int, counts: bool) -> None:
        ahead.append((index, watch.queue(index, paced=False), counts))
        if len(ahead) > QUEUED:
            read_oldest()

    warm_at = time.perf_counter() + warmup_s
    for index in itertools.cycle(order):
        if time.perf_counter() >= warm_at:
            break
        queue(index, False)
    for index in order:
        queue(index, True)
    while ahead:
        read_oldest()
