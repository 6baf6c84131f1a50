"""Calls from torch timed by torch's events, whatever they launch, so that what they cost the host is no part of it.

torch is an argument: nothing here imports it, and tests bring one of their own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tiledsched.core.errors import MeasureError

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
