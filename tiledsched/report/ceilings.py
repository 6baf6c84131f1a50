"""The highest rates that were measured on a GPU, which are the ceilings of a roofline chart."""

from __future__ import annotations

from collections.abc import Iterable

from tiledsched.core.problem import unit_of
from tiledsched.report.records import MEASURED, Ceiling
from tiledsched.store.records import Entry

LEAST_CACHES = 4
"""A memory rate counts only for problems of at least this many times the L2 cache, which may keep what is written last."""


def measured_ceilings(entries: Iterable[Entry], regime: str, dtypes: Iterable[str]) -> tuple[Ceiling, ...]:
    """The highest measured rate for each GPU and unit.

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
            ceiling = Ceiling(
                device_name=entry.device_name,
                unit=unit,
                rate=rate,
                problem=problem,
                taken=taken.created_at,
                sm_clock_mhz=taken.conditions.sm_clock_mhz,
            )
            known = found.setdefault((entry.device_name, unit), ceiling)
            found[entry.device_name, unit] = max(known, ceiling, key=lambda each: each.rate)
    return tuple(found[key] for key in sorted(found))
