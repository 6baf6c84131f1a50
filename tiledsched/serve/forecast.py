"""What rivals and our own choice are expected to take on a problem on which neither was timed.

`tuning_db/model/KERNEL/timed_ARCH.json` has times of problems that were drawn at random: of every rival, and of our kernel as it
was served untuned (`python -m docs.studies.untuned`). Entries of tuned tables add their times of rivals.

Times are told as logarithms of their ratio to one rival's, the reference, because much of what makes a problem slow makes it
slow for all. The ratio on another problem is interpolated from the nearest timed ones by kriging: the best linear unbiased
estimate where values agree the more the nearer two problems are. Its standard error is the spread. No problem is fitted alone.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tiledsched.core.cost import LAUNCH_US
from tiledsched.core.device import ArchSpec, arch_spec
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.store.manifest import model_file
from tiledsched.store.records import Entry

OURS = "ours"
"""Stands for our kernel among the methods."""
NEAREST = 64
"""Number of the nearest timed problems that say something."""
NOISE = 0.01
"""Variance of what nearness does not explain, over the variance of what it does."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected time of one method on a problem."""

    us: float
    """On the GPU, in microseconds."""
    spread: float
    """Standard error of the logarithm of its ratio to the reference."""
    host_us: float
    """Time until a call returns, in microseconds."""
    cases: int
    """Number of the timed problems behind it."""
    nearest: Problem
    """The nearest of them."""

    def caller_us(self, *, captured: bool, dispatch_us: float = 0.0) -> float:
        """The time that a caller sees: on the GPU in a captured graph, else the larger of that and of the host's."""
        return self.us if captured else max(self.us, self.host_us + dispatch_us)


class TimedProblems:
    """Problems of one kernel and arch on which methods were timed.

    Args:
        rows: for each problem the microseconds of methods, by name.
        host_us: for each method the time until a call returns.
        spec: the arch.
    """

    def __init__(
        self, rows: Mapping[Problem, Mapping[str, float]], host_us: Mapping[str, float], spec: ArchSpec
    ) -> None:
        self._problems, self._host_us, self._spec = list(rows), host_us, spec
        self._places = np.array([_features(p) for p in rows])
        counts = {name: sum(name in times for times in rows.values()) for name in host_us}
        self.reference = max(counts, key=lambda name: (name != OURS, counts[name]), default="")
        self._logs = {
            name: np.array([math.log(times[name]) if name in times else math.nan for times in rows.values()])
            for name in host_us
            if counts[name]
        }

    def forecast(self, p: Problem) -> dict[str, Forecast]:
        """What each method is expected to take on a problem; nothing where the kernel does not place it among those timed.

        Far from all of them it is what the methods take on average, and the spread says so.
        """
        place = _features(p)
        if not place or self.reference not in self._logs:
            return {}
        apart = np.sqrt(((self._places - place) ** 2).sum(axis=1))
        base = self._logs[self.reference]
        near = self._nearest(base, apart)
        above = np.array([base[each] - log_floor_us(self._problems[each], self._spec) for each in near])
        reference_us = math.exp(self._interpolated(above, near, apart)[0] + log_floor_us(p, self._spec))
        found = {}
        for name, logs in self._logs.items():
            near = self._nearest(logs + base, apart)
            if len(near):
                values = logs[near] - base[near]
                ratio, spread = (0.0, 0.0) if name == self.reference else self._interpolated(values, near, apart)
                found[name] = Forecast(
                    us=reference_us * math.exp(ratio),
                    spread=spread,
                    host_us=self._host_us[name],
                    cases=len(near),
                    nearest=self._problems[near[0]],
                )
        return found

    @staticmethod
    def _nearest(values: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """The places of the nearest problems that have a value, the nearest first."""
        known = np.flatnonzero(~np.isnan(values))
        return known[np.argsort(apart[known], kind="stable")[:NEAREST]]

    def _interpolated(self, values: np.ndarray, near: np.ndarray, apart: np.ndarray) -> tuple[float, float]:
        """The value at a distance `apart` from each timed problem, and its spread, from the values of those at places `near`."""
        steps = self._places[near][:, None] - self._places[near][None]
        among, ones = _likeness(np.sqrt((steps**2).sum(axis=-1))) + NOISE * np.eye(len(near)), np.ones(len(near))
        to_new = _likeness(apart[near])
        solved = np.linalg.solve(among, np.stack([ones, values, to_new], axis=1))
        total = ones @ solved[:, 0]
        mean = ones @ solved[:, 1] / total
        rest = solved[:, 1] - mean * solved[:, 0]
        variance = max(0.0, float((values - mean) @ rest)) / len(near)
        unknown = 1 + NOISE - to_new @ solved[:, 2] + (1 - ones @ solved[:, 2]) ** 2 / total
        return float(mean + to_new @ rest), math.sqrt(variance * max(float(unknown), 0.0))


def _likeness(apart: np.ndarray) -> np.ndarray:
    """How much values agree at a distance: 1 at none, 0.48 at 1 (Matern's function of order 3/2)."""
    scaled = math.sqrt(3) * apart
    likeness: np.ndarray = (1 + scaled) * np.exp(-scaled)
    return likeness


def _features(p: Problem) -> tuple[float, ...]:
    found: tuple[float, ...] = p.declaration.similarity.timing_features(p)
    return found


def log_floor_us(p: Problem, spec: ArchSpec) -> float:
    """Logarithm of the microseconds that the GPU's rates allow: of a launch, and of arithmetic or memory, whichever is longer."""
    compute_us = p.flops / (spec.tensor_flops * spec.sm_count * spec.clock_ghz * 1e3)
    return math.log(LAUNCH_US + max(compute_us, p.min_bytes / (spec.dram_gbps * 1e3)))


@lru_cache(maxsize=16)
def _shipped(kernel: KernelClass, arch: str) -> tuple[Mapping[Problem, Mapping[str, float]], Mapping[str, float]]:
    """What `tuning_db/model/KERNEL/timed_ARCH.json` says: times by problem and method, and what calls cost the host."""
    found = model_file(kernel.name, f"timed_{arch}.json")
    if not found:
        return {}, {}
    names: Sequence[str] = found["methods"]
    rows = {
        problem_from_json(row["problem"]): {
            name: us for name, us in zip(names, row["us"], strict=True) if us is not None
        }
        for row in found["rows"]
    }
    return rows, found["host_us"]


def timed_problems(
    kernel: KernelClass, arch: str, entries: Iterable[Entry], hidden: Container[Problem] = ()
) -> TimedProblems | None:
    """The timed problems of a kernel: those that ship, and the times of rivals in entries; None where no times ship.

    Args:
        kernel: the kernel.
        arch: of the GPU.
        entries: measured entries of the arch.
        hidden: problems to leave out, whose times are to be predicted.
    """
    shipped, host_us = _shipped(kernel, arch)  # type: ignore[arg-type]  # a class is hashable
    if not shipped:
        return None
    rows = dict(shipped)
    for entry in entries:
        times = {each.name: each.median_us for each in entry.rivals or () if each.median_us and each.name in host_us}
        if times and entry.arch == arch and entry.problem not in rows and _features(entry.problem):
            rows[entry.problem] = times
    return TimedProblems({p: times for p, times in rows.items() if p not in hidden}, host_us, arch_spec(arch))
