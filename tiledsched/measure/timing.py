"""How samples are taken, whatever launches the kernels: paced one by one, or back to back at the power cap.

Candidates take turns in rounds, in an order shuffled anew each round, so that a drift of clocks hits all of them alike.
"""

from __future__ import annotations

import random
import time
from typing import Any, Protocol

BURST_GAP_S = 0.010
"""Start-to-start distance of paced launches. On an H200 the clock is steady at 10 ms; see docs/measuring.md."""
SUSTAINED_WARMUP_S = 2.0
"""How long back-to-back launches run before samples count: the power cap takes that long to act."""


class Stopwatch(Protocol):
    """Launches candidates between two events."""

    def queue(self, index: int, *, paced: bool) -> Any:
        """Queue a start event, candidate `index` and a stop event; when paced, behind an L2 flush and a spin kernel.

        The spin keeps the GPU busy while the host queues what follows it, so that the events time the kernel and never
        the host.
        """
        ...

    def read(self, queued: Any) -> float:
        """Wait for the stop event; microseconds between the two."""
        ...


class Log(Protocol):
    """Reads the state of the GPU."""

    def poll(self) -> None:
        """Take one reading."""
        ...


def sample_rounds(watch: Stopwatch, count: int, *, rounds: int, regime: str, rng: random.Random,
                  log: Log) -> list[list[float]]:  # fmt: skip
    """Microseconds of `count` candidates, `rounds` samples each; sample i of every candidate is of round i."""
    return (_burst if regime == "burst" else _sustained)(watch, count, rounds, rng, log)


def _burst(watch: Stopwatch, count: int, rounds: int, rng: random.Random, log: Log) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in range(count)]
    next_start = time.perf_counter()
    for _ in range(rounds):
        for index in _shuffled(count, rng):
            pause = next_start - time.perf_counter()
            if pause > 0:
                time.sleep(pause)
            next_start = time.perf_counter() + BURST_GAP_S
            samples[index].append(watch.read(watch.queue(index, paced=True)))
        log.poll()
    return samples


def _sustained(watch: Stopwatch, count: int, rounds: int, rng: random.Random, log: Log) -> list[list[float]]:
    """The GPU never waits: while one round runs, the next is queued behind it."""
    samples: list[list[float]] = [[] for _ in range(count)]
    warm_at = time.perf_counter() + SUSTAINED_WARMUP_S
    ahead = _queue_round(watch, count, rng)
    while len(samples[0]) < rounds:
        warm = time.perf_counter() > warm_at
        running, ahead = ahead, _queue_round(watch, count, rng)
        for index, queued in running:
            microseconds = watch.read(queued)
            if warm:
                samples[index].append(microseconds)
        if warm:
            log.poll()
    for _, queued in ahead:
        watch.read(queued)
    return samples


def _queue_round(watch: Stopwatch, count: int, rng: random.Random) -> list[tuple[int, Any]]:
    return [(index, watch.queue(index, paced=False)) for index in _shuffled(count, rng)]


def _shuffled(count: int, rng: random.Random) -> list[int]:
    order = list(range(count))
    rng.shuffle(order)
    return order
