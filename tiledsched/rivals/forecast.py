"""What rivals and our own choice are expected to take on a problem on which neither was timed.

`tuning_db/model/KERNEL/timed_ARCH.json` has times of problems that were drawn at random: of every rival, and of our kernel as it
was served untuned (`python -m docs.studies.untuned`). It also has the times of rivals in the tables that ship. Entries of other
layers add theirs. Of a kernel for which no such file ships, all entries say what rivals and our tuned schedules took.

Times are stored as logarithms of their ratio to an estimate: ours to what the performance model gives for the schedule, a rival's
to the mean of what the GPU's rates allow and what the model gives for our default schedule; where no file ships, for the one
of ours that serves, because default schedules take long to find. The ratio on another problem is
interpolated from the nearest timed ones by kriging: the best linear unbiased estimate where values agree the more the nearer two
problems are. Its standard error is the spread. No problem is fitted alone. No forecast is shorter than arithmetic takes at the
share of its nominal rate that products reach; none of the programs in the tables that ship was faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tiledsched.core.cost import EFFICIENCY, LAUNCH_US, tensor_rate
from tiledsched.core.device import ArchSpec, arch_spec
from tiledsched.core.groups import grouped
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.core.similarity import FAR
from tiledsched.store.manifest import model_file
from tiledsched.store.records import Entry

OURS = "ours"
"""Stands for our kernel among the methods."""
NEAREST = 64
"""Number of the nearest timed problems that say something."""
FEWEST = 8
"""Least number of problems in entries from which times are forecast: fewer tell too little of how they differ."""
NOISE = 0.01
"""Variance of what nearness does not explain, over the variance of what it does."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expected time of one method on a problem."""

    us: float
    """On the GPU, in microseconds."""
    spread: float
    """Standard error of the logarithm of its ratio to the estimate."""
    host_us: float
    """Time until a call returns, in microseconds."""
    cases: int
    """Number of the timed problems behind it."""
    nearest: Problem
    """The nearest of them."""


@dataclass(frozen=True, kw_only=True)
class TimedProblem:
    """What methods took on one problem. A file has hundreds of them, so that a problem is read only where it is named."""

    problem: Mapping[str, Any]
    """The problem, as JSON."""
    place: Sequence[float]
    """Where the kernel places it among others; see `Similarity.timing_features`."""
    us: Mapping[str, float]
    """Microseconds by method; of ours, with the schedule that was served untuned."""
    base_us: float
    """The estimate that rivals' times are divided by; see :func:`base_us`."""
    ours_us: float | None = None
    """What the model gives for the schedule of ours that was timed; None where none was."""

    @classmethod
    def of(
        cls, p: Problem, us: Mapping[str, float], spec: ArchSpec, default_us: float, ours_us: float | None = None
    ) -> TimedProblem:
        """What methods took on `p`, for whose default schedule the model gives `default_us`."""
        return cls(
            problem=p.to_json(), place=_features(p), us=us, base_us=base_us(p, default_us, spec), ours_us=ours_us
        )


class TimedProblems:
    """Problems of one kernel and arch on which methods were timed.

    Args:
        rows: what methods took on each problem.
        host_us: for each method the time until a call returns.
        spec: the arch.
        by_default: whether the estimate for rivals knows the default schedule; see the top of this file.
    """

    def __init__(
        self, rows: Sequence[TimedProblem], host_us: Mapping[str, float], spec: ArchSpec, by_default: bool = True
    ) -> None:
        self._rows, self._host_us, self._spec, self._by_default = rows, host_us, spec, by_default
        self._places = np.array([each.place for each in rows])
        self._above = {
            name: np.array(
                [
                    math.log(us / ((name == OURS and each.ours_us) or each.base_us))
                    if (us := each.us.get(name))
                    else math.nan
                    for each in rows
                ]
            )
            for name in host_us
        }

    def forecast(self, p: Problem, ours_us: float, default_us: float) -> dict[str, Forecast]:
        """What each method is expected to take on a problem; nothing where the kernel does not place it among those timed.

        Far from all of them it is what the methods take on average, and the spread says so.

        Args:
            p: the problem.
            ours_us: what the model gives for the schedule that is served.
            default_us: what it gives for the default schedule of the problem as which `p` is timed (`Cost.timed_as`).
        """
        place = _features(p)
        if not place or not self._rows:
            return {}
        apart = np.sqrt(((self._places - place) ** 2).sum(axis=1))
        least_us = floor_us(p, self._spec, EFFICIENCY)
        base = base_us(p.declaration.cost.timed_as(p), default_us if self._by_default else ours_us, self._spec)
        found = {}
        for name, above in self._above.items():
            near = self._nearest(above, apart)
            if len(near):
                value, spread = self._interpolated(above[near], near, apart)
                found[name] = Forecast(
                    us=max(least_us, math.exp(value) * (ours_us if name == OURS else base)),
                    spread=spread,
                    host_us=self._host_us[name],
                    cases=len(near),
                    nearest=problem_from_json(self._rows[near[0]].problem),
                )
        if not p.declaration.timed_with or OURS not in found:
            return found
        return {OURS: found[OURS]} | {
            name: replace(found[of], us=found[of].us + us, host_us=found[of].host_us + host_us)
            for name, (of, us, host_us) in p.declaration.cost.lent_times(p).items()
            if of in found
        }

    @staticmethod
    def _nearest(values: np.ndarray, apart: np.ndarray) -> np.ndarray:
        """The places of the nearest problems that have a value, the nearest first."""
        known = np.flatnonzero(~np.isnan(values) & (apart < FAR))
        return known[np.argsort(apart[known], kind="stable")[:NEAREST]]

    def _interpolated(self, values: np.ndarray, near: np.ndarray, apart: np.ndarray) -> tuple[float, float]:
        """The value at a distance `apart` from each timed problem, and its spread, from the values of those at places `near`."""
        steps = self._places[near][:, None] - self._places[near][None]
        among, ones = _correlation(np.sqrt((steps**2).sum(axis=-1))) + NOISE * np.eye(len(near)), np.ones(len(near))
        to_new = _correlation(apart[near])
        solved = np.linalg.solve(among, np.stack([ones, values, to_new], axis=1))
        total = ones @ solved[:, 0]
        mean = ones @ solved[:, 1] / total
        rest = solved[:, 1] - mean * solved[:, 0]
        variance = max(0.0, float((values - mean) @ rest)) / len(near)
        unknown = 1 + NOISE - to_new @ solved[:, 2] + (1 - ones @ solved[:, 2]) ** 2 / total
        return float(mean + to_new @ rest), math.sqrt(variance * max(float(unknown), 0.0))


def _correlation(apart: np.ndarray) -> np.ndarray:
    """How much values agree at a distance: 1 at none, 0.48 at 1 (Matern's function of order 3/2)."""
    scaled = math.sqrt(3) * apart
    return np.asarray((1 + scaled) * np.exp(-scaled))


def _features(p: Problem) -> tuple[float, ...]:
    return tuple(p.declaration.similarity.timing_features(p))


def floor_us(p: Problem, spec: ArchSpec, share: float = 1.0) -> float:
    """What the GPU's rates allow, in microseconds: of a launch, and of arithmetic or memory, whichever is longer.

    Args:
        p: the problem.
        spec: of the GPU.
        share: of the rate of arithmetic that is reached.
    """
    compute_us = p.flops / (share * spec.tensor_flops * tensor_rate(p) * spec.sm_count * spec.clock_ghz * 1e3)
    return LAUNCH_US + max(compute_us, p.min_bytes / (spec.dram_gbps * 1e3))


def base_us(p: Problem, default_us: float, spec: ArchSpec) -> float:
    """The geometric mean of what the GPU's rates allow and of what the model gives for our default schedule."""
    return math.sqrt(floor_us(p, spec) * default_us)


@lru_cache(maxsize=16)
def _shipped(kernel: str, arch: str) -> tuple[Sequence[TimedProblem], Mapping[str, float]]:
    """What `tuning_db/model/KERNEL/timed_ARCH.json` says: what methods took, and what calls cost the host."""
    found = model_file(kernel, f"timed_{arch}.json")
    if not found:
        return (), {}
    rows = [
        TimedProblem(
            problem=row["problem"],
            place=row["place"],
            us={name: us for name, us in zip(found["methods"], row["us"], strict=True) if us is not None},
            base_us=row["base_us"],
            ours_us=row["ours_us"],
        )
        for row in found["rows"]
    ]
    return rows, found["host_us"]


def _hosts_us(entries: Iterable[Entry]) -> Mapping[str, float]:
    """What calls of each rival cost the host, the median of what was measured. What our own calls cost was not measured: they
    count as free, so that only their time on the GPU makes a rival faster.
    """
    found = grouped((each.name, each.host_us) for entry in entries for each in entry.rivals or ())
    return {OURS: 0.0} | {name: statistics.median(each) for name, each in found.items()}


def timed_problems(
    kernel: KernelClass,
    arch: str,
    entries: Iterable[Entry],
    modelled_us: Callable[..., float],
    hidden: Problem | None = None,
) -> TimedProblems | None:
    """The timed problems of a kernel: those that ship, and the times of rivals in entries of other layers; where none ship, those
    in entries of all layers, with our own times. None where too few were timed.

    Args:
        kernel: the kernel.
        arch: of the GPU.
        entries: measured entries of the arch.
        modelled_us: what the model gives for a problem and a schedule; for its default schedule where none is named.
        hidden: a problem to leave out, whose times are to be predicted.
    """
    lender = kernel.timed_with or kernel.name
    rows, host_us = _shipped(lender, arch)
    spec, found, left_out = arch_spec(arch), list(rows), hidden and hidden.to_json()
    raced = [
        entry
        for entry in entries
        if entry.kernel == lender
        and entry.arch == arch
        and _features(entry.problem)
        and not (rows and entry.layer == "shipped")
    ]
    host_us = host_us if rows else _hosts_us(raced)
    for entry in raced:
        timed = [each for each in entry.rivals or () if each.median_us and each.name in host_us]
        times = {each.name: each.median_us or 0.0 for each in timed}
        if timed:
            ours = {} if rows else {OURS: timed[0].ours_us or 0.0}
            ours_us = modelled_us(entry.problem, *([] if rows else [entry.schedule]))
            found.append(TimedProblem.of(entry.problem, times | ours, spec, ours_us, None if rows else ours_us))
    found = [each for each in found if each.problem != left_out]
    if not rows and len(found) < FEWEST:
        return None
    return TimedProblems(found, host_us, spec, bool(rows))
