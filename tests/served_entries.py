"""Entries of attention as a tuned table holds them, for tests of serving."""

from __future__ import annotations

import functools
from datetime import datetime, timezone

from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Conditions, Device
from tiledsched.store.records import Entry, MeasurementSummary, Toolchain

SPACE = space_for("sm_90", Attention)
SUMMARY = MeasurementSummary(
    id=1,
    uid="u",
    median_us=300.0,
    ci_low_us=299.0,
    ci_high_us=301.0,
    samples=30,
    device=Device(name="NVIDIA H200", arch="sm_90", sm_count=132),
    conditions=Conditions(),
    accuracy=None,
    runner="gpu",
    toolchain=Toolchain(cuda_tile="1.7.0", tileiras="13.4.92", ptxas="13.4.92", nvvm="13.4.92"),
    created_at=datetime(2026, 11, 20, tzinfo=timezone.utc),
)


@functools.cache
def default(problem: Problem) -> Schedule:
    """The default schedule on sm_90."""
    return SPACE.default(problem)


def entry(problem: Problem, provenance: str = "measured", *, device: str = "NVIDIA H200", **more) -> Entry:
    """An entry of sm_90; `more` are further fields of it."""
    measured = provenance in ("measured", "transferred")
    values = {
        "kernel": "attention",
        "arch": "sm_90",
        "problem": problem,
        "provenance": provenance,
        "schedule": more["schedule"] if "schedule" in more else default(problem),
        "device_name": device if measured else "",
        "regime": "burst" if measured else "",
        "measurement": SUMMARY if measured else None,
        "model_us": None if measured else 500.0,
        "fingerprint": "f" * 24,
    }
    return Entry(**(values | more))
