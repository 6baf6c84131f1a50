"""One control program is timed on every GPU: which GPUs differ by more than noise, and whose evidence is stored under another
name."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiledsched.core.groups import grouped
from tiledsched.measure.estimate import Timing
from tiledsched.store.evidence import SPREAD

FEWEST = 3
"""GPUs of one arch that it takes to say which of them is the odd one."""
LEAST = 0.01
"""Smaller differences are never reported: the clock and a warm day make a percent."""
NOISES = 3.0
"""A GPU is reported where its median differs from that of the others by this many times its own noise."""


@dataclass(frozen=True, kw_only=True)
class Control(Timing):
    """The control program, timed once on one GPU."""

    gpu: str
    """UUID."""
    hostname: str
    """The host it is in."""
    arch: str
    """The GPU's arch."""
    fingerprint: str
    """Fingerprint of the control program: only equal machine code is compared."""


@dataclass(frozen=True, kw_only=True)
class GpuSpread:
    """One GPU compared with the others of its arch."""

    gpu: str
    """UUID."""
    hostname: str
    """The host it is in."""
    arch: str
    """The GPU's arch."""
    timed: int
    """How often it ran the control program."""
    median_us: float
    """Middle of those times."""
    over_fleet: float
    """Its median over the median of all GPUs of its arch, less 1; positive means slower."""
    noise: float
    """How much its own timings vary, relative to their median."""
    named: bool
    """Whether it differs from the others by more than noise."""
    apart: bool
    """Whether by more than healthy GPUs of one kind do: its evidence is kept under a name of its own."""


def spread_of(controls: Iterable[Control]) -> list[GpuSpread]:
    """Every GPU that was timed, the slowest compared with the others of its arch first.

    A GPU's noise is the larger of the confidence interval of its timings and of what they differ by among themselves.
    """
    found = []
    for same in grouped(((each.arch, each.fingerprint), each) for each in controls).values():
        gpus = grouped((each.gpu, each) for each in same)
        middles = {gpu: statistics.median(each.median_us for each in own) for gpu, own in gpus.items()}
        fleet_us = statistics.median(middles.values())
        for gpu, own in gpus.items():
            over, noise = middles[gpu] / fleet_us - 1, _noise(own)
            named = len(gpus) >= FEWEST and abs(over) > max(LEAST, NOISES * noise)
            found.append(
                GpuSpread(
                    gpu=gpu,
                    hostname=own[-1].hostname,
                    arch=own[-1].arch,
                    timed=len(own),
                    median_us=middles[gpu],
                    over_fleet=over,
                    noise=noise,
                    named=named,
                    apart=named and abs(over) > SPREAD,
                )
            )
    return sorted(found, key=lambda each: (each.arch, -each.over_fleet, each.gpu))


def _noise(own: Sequence[Control]) -> float:
    middle = statistics.median(each.median_us for each in own)
    within = statistics.median((each.ci_high_us - each.ci_low_us) / 2 for each in own)
    between = statistics.median(abs(each.median_us - middle) for each in own)
    return max(within, between) / middle


def is_outlier(controls: Iterable[Control], gpu: str) -> bool:
    """Whether a GPU differs from the others of its arch by so much that its evidence is stored under a name of its own."""
    return any(each.apart for each in spread_of(controls) if each.gpu == gpu)
