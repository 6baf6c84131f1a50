"""The highest rates that anything was measured at on a GPU: what a roofline's ceilings are drawn at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from tiledsched.core.problem import Problem, unit_of
from tiledsched.report.records import MEASURED
from tiledsched.store.records import Entry

LEAST_CACHES = 4
"""A rate of memory counts from so many times the L2 cache on: what is written last may still be in it."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The highest rate of one unit on one GPU, of whatever kernel reached it."""

    device_name: str
    """The GPU."""
    unit: str
    """TFLOP/s or GB/s."""
    rate: float
    """In that unit."""
    problem: Problem
    """What was computed."""
    sm_clock_mhz: int
    """Median SM clock of its samples; 0 where NVML did not tell."""
    power_w: float
    """Highest board power of its samples; 0 where NVML did not tell."""
    taken: datetime
    """When, UTC."""

    def __str__(self) -> str:
        clock = f" at {self.sm_clock_mhz} MHz" if self.sm_clock_mhz else ""
        return f"{self.rate:.0f} {self.unit}{clock} ({self.problem.kernel} {self.problem}, {self.taken:%Y-%m-%d})"


def measured_ceilings(entries: Iterable[Entry], regime: str, dtypes: Iterable[str]) -> tuple[Ceiling, ...]:
    """The highest measured rates, of each GPU and unit.

    Args:
        entries: what is served, of every kernel.
        regime: burst or sustained; entries of the other are left out.
        dtypes: element types whose arithmetic counts, since narrower ones have higher peaks. Memory has one rate for all.
    """
    dtypes, found = set(dtypes), dict[tuple[str, str], Ceiling]()
    for entry in entries:
        taken = entry.measurement
        if entry.provenance != MEASURED or entry.regime != regime or taken is None or not entry.problem.known:
            continue
        problem = entry.problem
        rates = (
            {"GB/s": problem.gbps(taken.median_us)} if problem.min_bytes >= LEAST_CACHES * taken.device.l2_bytes else {}
        )
        if unit_of(problem) == "TFLOP/s" and entry.accum_mode == "fp32" and problem.values.get("dtype") in dtypes:
            rates["TFLOP/s"] = problem.tflops(taken.median_us)
        for unit, rate in rates.items():
            if (entry.device_name, unit) not in found or rate > found[entry.device_name, unit].rate:
                found[entry.device_name, unit] = Ceiling(
                    device_name=entry.device_name,
                    unit=unit,
                    rate=rate,
                    problem=problem,
                    taken=taken.created_at,
                    sm_clock_mhz=taken.conditions.sm_clock_mhz,
                    power_w=taken.conditions.power_w,
                )
    return tuple(found[key] for key in sorted(found))


def roof_of(ceilings: Sequence[Ceiling], device_name: str) -> tuple[Ceiling, Ceiling] | None:
    """The ceilings of arithmetic and of memory of one GPU; None where one of the two is not known."""
    of = {each.unit: each for each in ceilings if each.device_name == device_name}
    return (of["TFLOP/s"], of["GB/s"]) if len(of) == 2 else None
