"""One control program on every GPU: which of them differ by more than noise, and whose evidence is kept apart."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.measure.estimate import Timing
from tiledsched.store.evidence import SPREAD

FEWEST = 3
"""GPUs of one arch to tell which of them is the odd one."""
LEAST = 0.01
"""Differences up to this are never named: a percent is what the clock and a warm day make."""
NOISES = 3.0
"""A GPU is named where it is so many times its own noise from the others' middle."""


@dataclass(frozen=True, kw_only=True)
class Control(Timing):
    """The control program, timed once on one GPU."""

    gpu: str
    """UUID."""
    hostname: str
    """Where it is."""
    arch: str
    """Its arch."""
    fingerprint: str
    """Of the control program: only equal machine code is compared."""


@dataclass(frozen=True, kw_only=True)
class GpuSpread:
    """One GPU beside its like."""

    gpu: str
    """UUID."""
    hostname: str
    """Where it is."""
    arch: str
    """Its arch."""
    timed: int
    """How often it ran the control program."""
    median_us: float
    """Middle of those times."""
    over_fleet: float
    """That over the middle of all GPUs of its arch, less 1: positive is slower."""
    noise: float
    """What it differs from itself by, relative."""
    named: bool
    """Whether it differs from the others by more than noise."""
    apart: bool
    """Whether by more than healthy GPUs of one kind do: its evidence is kept under a name of its own."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def spread_of(controls: Iterable[Control]) -> list[GpuSpread]:
    """Every GPU that was timed, the slowest beside its like first.

    A GPU's noise is the larger of the confidence interval of its timings and of what they differ by among themselves.
    """
    timed: dict[tuple[str, str], dict[str, list[Control]]] = defaultdict(lambda: defaultdict(list))
    for each in controls:
        timed[each.arch, each.fingerprint][each.gpu].append(each)
    found = []
    for gpus in timed.values():
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


def apart(controls: Iterable[Control], gpu: str) -> bool:
    """Whether a GPU's evidence is to be kept apart."""
    return any(each.apart for each in spread_of(controls) if each.gpu == gpu)


def label_of(gpu: str) -> str:
    """What is added to the name of a GPU that is kept apart."""
    return gpu[:12]
