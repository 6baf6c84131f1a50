"""What a few calls of a method tell before it is timed in turn with others, and which methods are timed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.rivals import Call
from tiledsched.measure.timing import GRAPH_BELOW_US, GRAPH_LAUNCHES
from tiledsched.measure.torch_timing import LOOKS, SPIN_MARGIN, TorchStopwatch, host_cost_us


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A call that ran."""

    call: Call
    """Computes the problem once."""
    look_us: float
    """Rough time of a call on the GPU, in microseconds."""
    host_us: float = 0.0
    """Time until a call returns, in microseconds."""


def try_call(torch: Any, call: Call, flush: Any, looks: int = LOOKS) -> Trial:
    """Time a call roughly, on the host and on the GPU.

    Args:
        torch: the module.
        call: has been called before.
        flush: a tensor larger than the L2 cache.
        looks: launches that are timed; the quickest counts.
    """
    host_us = host_cost_us(torch, call)
    watch = TorchStopwatch(torch, [call], flush, host_us=host_us)
    look_us = min(watch.read(watch.queue(0, paced=True)) for _ in range(looks))
    return Trial(call=call, look_us=look_us, host_us=host_us)


def capture_short(watch: TorchStopwatch, trials: Sequence[Trial]) -> list[int]:
    """Have the stopwatch time short calls as CUDA graphs: back to back, what costs the host more than the GPU would be timed with
    the host's part. Returns the calls in each graph, 0 for what is called without one.
    """
    return [
        GRAPH_LAUNCHES
        if each.look_us < max(GRAPH_BELOW_US, SPIN_MARGIN * each.host_us) and watch.capture(index, GRAPH_LAUNCHES)
        else 0
        for index, each in enumerate(trials)
    ]
