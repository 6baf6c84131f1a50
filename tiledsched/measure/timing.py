"""How samples are taken, whatever launches the kernels: paced one by one, or back to back at the power cap.

Candidates take turns in rounds, in an order shuffled anew each round, so that a drift of clocks affects all of them equally.
How far apart paced launches must be for the clock to hold still is found out on the spot: see `calibrate`.

Calls from torch are timed by its events, whatever they launch, so that what they cost the host is no part of it. torch is an
argument: nothing here imports it, and tests bring one of their own.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from tiledsched.core.errors import MeasureError
from tiledsched.measure.estimate import relative_spread
from tiledsched.measure.runner import Conditions, GapTrial

BURST_GAP_S = 0.010
"""Start-to-start distance of paced launches where none was calibrated. On an H200 it serves every kernel."""
SHORT_US = 50.0
"""Paced launches below this spread by several percent: their start and events, a microsecond or two, are part of the time."""
GAPS_S = (0.002, 0.005, 0.010, 0.020)
"""Distances tried by a calibration."""
LEAST_REST = 2.0
"""Distances shorter than this many times the candidate's own time are not tried: the GPU would hardly rest."""
TRIAL_SAMPLES = 16
"""Samples per distance tried, at least, after two that do not count..."""
LONG_TRIAL_SAMPLES = 8
"""...or, where the distance is longer than all of `GAPS_S`, so many..."""
TRIAL_S = 0.2
"""...and how long each is tried, at least: the power controller takes its time, too."""
STEADY_SPREAD = 0.01
"""A distance is steady when samples spread by no more than this..."""
STEADY_STEP = 0.01
"""...and the next longer one moves the median by no more than this."""
SUSTAINED_WARMUP_S = 2.0
"""How long back-to-back launches run before samples count: the power cap takes that long to act."""
SUSTAINED_REWARM_S = 0.2
"""How long they run where the last sustained run ended less than `STILL_WARM_S` ago."""
STILL_WARM_S = 1.0
"""How long the GPU stays as warm as it was."""
GRAPH_BELOW_US = 150.0
"""Sustained: launches that take less are timed as one CUDA graph of `GRAPH_LAUNCHES`; back to back, the host takes longer to
launch such a kernel than the GPU to run it, and events would time the host.
"""
GRAPH_LAUNCHES = 20


def launches_in_graph(us: float, changes: bool) -> int:
    """How many launches a graph holds in the graph regime: so many that the graph's own start hardly counts, and so few that the
    GPU rests between replays.

    Args:
        us: what the fastest candidate takes, in microseconds.
        changes: whether launches change arrays in place, which are restored before each replay and not within it.
    """
    return 1 if changes else max(1, min(GRAPH_LAUNCHES, round(GRAPH_BELOW_US / us)))


def flush_bytes(l2_bytes: int) -> int:
    """How many bytes are written to empty a second-level cache of this size."""
    return max(2 * l2_bytes, 1 << 26)


class Stopwatch(Protocol):
    """Launches candidates between two events."""

    def queue(self, index: int, *, paced: bool) -> Any:
        """Queue a start event, candidate `index` and a stop event; when paced, behind an L2 flush, or a replay that is not timed,
        and a spin kernel.

        The spin keeps the GPU busy while the host queues what follows it, so that the events time the kernel and never
        the host.
        """

    def read(self, queued: Any) -> float:
        """Wait for the stop event; microseconds between the two."""


class Log(Protocol):
    """Reads the state of the GPU."""

    def poll(self) -> None:
        """Take one reading."""

    def summary(self) -> Conditions:
        """All readings in one."""


def sample_rounds(
    watch: Stopwatch,
    count: int,
    *,
    rounds: int,
    regime: str,
    rng: random.Random,
    log: Log,
    gap_s: float = BURST_GAP_S,
    warmup_s: float = SUSTAINED_WARMUP_S,
) -> list[list[float]]:
    """Microseconds of `count` candidates, `rounds` samples each; sample i of every candidate is of round i.

    Args:
        watch: launches and times.
        count: candidates, which `watch` knows by index.
        rounds: samples of each.
        regime: burst, sustained, graph or graph-cold.
        rng: shuffles each round.
        log: polled once a round.
        gap_s: start-to-start distance of launches that are paced: in every regime but sustained.
        warmup_s: sustained only: how long launches run before samples count.
    """
    order = [index for _ in range(rounds) for index in rng.sample(range(count), count)]
    # At the power cap the next round is queued while one runs.
    taken = (
        back_to_back(watch, order, queued=count, warmup_s=warmup_s)
        if regime == "sustained"
        else paced(watch, order, gap_s=gap_s)
    )
    samples: list[list[float]] = [[] for _ in range(count)]
    for number, (index, microseconds) in enumerate(taken, start=1):
        samples[index].append(microseconds)
        if number % count == 0:
            log.poll()
    return samples


def paced(
    watch: Stopwatch, order: Iterable[int], *, gap_s: float, rest: float = 0.0, clock: Any = time
) -> Iterator[tuple[int, float]]:
    """Candidate and microseconds of launches one after the other.

    Args:
        watch: launches and times.
        order: the candidates.
        gap_s: seconds from the beginning of one launch to the next, at least...
        rest: ...and this many times what the first of the two took.
        clock: tells the time by `perf_counter` and waits by `sleep`, both in seconds.
    """
    next_start = clock.perf_counter()
    for index in order:
        pause = next_start - clock.perf_counter()
        if pause > 0:
            clock.sleep(pause)
        start = clock.perf_counter()
        microseconds = watch.read(watch.queue(index, paced=True))
        next_start = start + max(gap_s, rest * microseconds / 1e6)
        yield index, microseconds


def back_to_back(
    watch: Stopwatch, order: Sequence[int], *, queued: int, warmup_s: float, clock: Any = time
) -> Iterator[tuple[int, float]]:
    """Candidate and microseconds of launches without a pause, so that the GPU never waits.

    Args:
        watch: launches and times.
        order: the candidates.
        queued: launches that are queued behind the one whose time is read.
        warmup_s: seconds of launches in the same order that come before and do not count.
        clock: as for :func:`paced`.
    """
    ahead: deque[tuple[int, Any, bool]] = deque()
    warm_at = clock.perf_counter() + warmup_s
    warming_up = itertools.takewhile(lambda index: clock.perf_counter() < warm_at, itertools.cycle(order))
    launches = itertools.chain(((index, False) for index in warming_up), ((index, True) for index in order))

    def read_oldest() -> Iterator[tuple[int, float]]:
        index, events, counts = ahead.popleft()
        microseconds = watch.read(events)
        if counts:
            yield index, microseconds

    for index, counts in launches:
        ahead.append((index, watch.queue(index, paced=False), counts))
        if len(ahead) > queued:
            yield from read_oldest()
    while ahead:
        yield from read_oldest()


def calibrate(watch: Stopwatch, *, log: Callable[[], Log], gaps_s: Sequence[float] | None = None) -> list[GapTrial]:
    """Time candidate 0 of `watch` at several distances that let the GPU rest, shortest first, until one is steady.

    Args:
        watch: launches and times.
        log: makes the log of each trial.
        gaps_s: distances in seconds; None for `GAPS_S`.
    """
    least_s = LEAST_REST * watch.read(watch.queue(0, paced=True)) / 1e6
    trials: list[GapTrial] = []
    chosen = [gap_s for gap_s in (GAPS_S if gaps_s is None else gaps_s) if gap_s >= least_s] or [least_s]
    for gap_s in chosen if len(chosen) > 1 else [chosen[0], 2 * chosen[0]]:  # one alone is compared with nothing
        readings = log()
        count = max(LONG_TRIAL_SAMPLES if gap_s > GAPS_S[-1] else TRIAL_SAMPLES, int(TRIAL_S / gap_s) if gap_s else 0)
        rng, burst = random.Random(0), "burst"
        samples = sample_rounds(watch, 1, rounds=count + 2, regime=burst, rng=rng, log=readings, gap_s=gap_s)[0][2:]
        trials.append(
            GapTrial(
                gap_ms=gap_s * 1e3,
                median_us=statistics.median(samples),
                spread=relative_spread(samples),
                sm_clock_mhz=readings.summary().sm_clock_mhz,
            )
        )
        if _first_steady(trials):
            break
    return trials


def steady_gap(trials: Sequence[GapTrial]) -> GapTrial:
    """The shortest distance at which times hold still, alone and against the next longer one.

    Where none does, the one of least spread.
    """
    return _first_steady(trials) or min(trials, key=lambda trial: trial.spread)


def _first_steady(trials: Sequence[GapTrial]) -> GapTrial | None:
    for trial, longer in itertools.pairwise(trials):
        if trial.spread <= STEADY_SPREAD and abs(longer.median_us / trial.median_us - 1) <= STEADY_STEP:
            return trial
    return None


LEAST_SPIN_US = 300.0
"""Ahead of every paced call: the host queues what follows meanwhile, so that events never time it."""
SPIN_MARGIN = 2.0
"""The spin takes this many times as long as the slowest call takes the host."""
CYCLES_PER_US = 3000
"""A clock rate above that of any GPU: where the GPU's is lower, the spin takes longer, and nothing else changes."""
MOST_DOUBLINGS = 5
"""Times that a spin which was over too soon is doubled."""
LOOKS = 3
Call = Callable[[], Any]


def host_cost_us(torch: Any, call: Call) -> float:
    """Microseconds until a call returns, the GPU idle before it."""
    found = []
    for _ in range(LOOKS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


class TorchStopwatch:
    """Times calls between torch events; see `tiledsched.measure.timing.Stopwatch`.

    Args:
        torch: the module.
        calls: what is timed, by index.
        flush: a tensor larger than the L2 cache.
        host_us: what the slowest of the calls costs the host. All spins are as long, so that all calls are timed alike.
        warm: whether a paced call follows another one of its own, which is not timed, in place of a flush.
    """

    def __init__(
        self, torch: Any, calls: Sequence[Call], flush: Any, *, host_us: float = 0.0, warm: bool = False
    ) -> None:
        self._torch, self._calls, self._flush, self._warm = torch, list(calls), flush, warm
        self._launches = [1] * len(self._calls)
        self.spin_us = max(LEAST_SPIN_US, SPIN_MARGIN * host_us)

    def capture(self, index: int, launches: int) -> bool:
        """Time call `index` as a CUDA graph of `launches` calls from now on; False where it cannot be captured."""
        torch, call = self._torch, self._calls[index]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # as torch would have a capture warmed up
                call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for _ in range(launches):
                    call()
            graph.replay()
            torch.cuda.synchronize()
        except Exception:  # a library that must not be captured; it is timed call by call
            torch.cuda.synchronize()
            return False
        self._calls[index], self._launches[index] = graph.replay, launches
        return True

    def prepare(self, index: int) -> None:
        """Do what a call needs before it is timed: nothing, unless a subclass does something."""

    def queue(self, index: int, *, paced: bool) -> tuple[int, Any, Any]:
        """Events around one call, or one graph; when paced, behind an L2 flush and a spin kernel.

        If the spin was over before all was queued, the events timed the host: they are dropped, and from now on every call
        is given twice the spin. One that was not paced is marked: :meth:`read` gives NaN for it.

        Raises:
            MeasureError: no spin is long enough.
        """
        for _ in range(MOST_DOUBLINGS + 1):
            self.prepare(index)
            before, after = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
            if paced:
                (self._calls[index] if self._warm else self._flush.zero_)()
                self._torch.cuda._sleep(round(self.spin_us * CYCLES_PER_US))
            before.record()
            self._calls[index]()
            after.record()
            if not before.query():
                return index, before, after
            if not paced:  # launched back to back: the host fell behind, and what the events say is its time
                return index, before, None
            after.synchronize()
            self.spin_us *= 2
        raise MeasureError(
            f"the call waits for the GPU, or takes the host more than {self.spin_us / 1e3:.0f} ms: its time on "
            "the GPU alone cannot be told; leave it out with --methods"
        )

    def read(self, queued: tuple[int, Any, Any]) -> float:
        """Microseconds of one call; NaN where the GPU had nothing left to do when it was queued."""
        index, before, after = queued
        if after is None:
            before.synchronize()
            return math.nan
        after.synchronize()
        return float(before.elapsed_time(after) * 1e3) / self._launches[index]
