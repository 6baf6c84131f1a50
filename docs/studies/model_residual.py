"""What measurements say beyond the static model: factors for knob values, few and additive in log time.

A ridge regression of log(measured / modelled) on which knob values a schedule has, alone and together with the knobs
they are known to interact with. Only differences within a problem count, and fast programs count most: a program twice
as slow as the best weighs 256 times less. `python -m docs.studies.model_agreement` prints what the factors add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from docs.studies.landscapes import Landscape
from tiledsched.core.device import ResourceFacts
from tiledsched.core.schedule import PLAIN, Schedule

RIDGE = 10.0
"""Strength of the pull towards zero: it weighs as much as so many programs as fast as the best."""
STEEPNESS = 8.0
"""A program weighs (best time / its time) to this power."""
ALONE = (
    "latency_k",
    "latency_v",
    "opt_level",
    "block_order",
    "kv_subtiles",
    "q_subtiles",
    "tma_loads",
    "tma_store",
    "division",
    "lazy_rescale",
    "num_ctas",
    "persistent",
)
"""Knobs whose effect is assumed to be the same everywhere."""
DEPENDENT = ("loop_split", "qk_ahead", "kv_direction")
"""Knobs whose effect depends on the warps and on whether the grid is persistent."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """Measured factors of one arch."""

    coefficients: Mapping[str, float]
    """Feature -> logarithm of its factor."""

    def log_factor(self, schedule: Schedule, facts: ResourceFacts) -> float:
        """What is added to the logarithm of the static estimate. Features that were never seen add nothing."""
        return sum(self.coefficients.get(name, 0.0) for name in features(schedule, facts))


def features(schedule: Schedule, facts: ResourceFacts) -> list[str]:
    """The features of a program, such as `qk_ahead=true` or `tile=64x128 warps=8`; each has weight one."""
    if "tile_m" not in schedule:  # of another kernel: every knob value by itself
        return [f"{name}={value}" for name, value in schedule.items()]
    warps, grid = f"warps={schedule['num_worker_warps']}", "tiles" if schedule["persistent"] == "no" else "persistent"
    tile = f"tile={schedule['tile_m']}x{schedule['tile_n']}"
    found = [tile, f"{tile} {warps}", f"{tile} {grid}", f"{warps} resident={min(3, facts.ctas_per_sm)}"]
    for knob in (*ALONE, *DEPENDENT):
        plain = PLAIN.get(knob, 0)  # read here: the kernel adds its plain values when it is imported
        value = schedule.get(knob, plain)
        if value != plain:
            name = f"{knob}={str(value).lower()}"
            found += [name, f"{name} {grid}", f"{name} {warps}"] if knob in DEPENDENT else [name]
    return found


def fit(landscapes: Sequence[Landscape], ridge: float = RIDGE) -> Residual:
    """The factors that landscapes of one arch give, pulled towards zero by `ridge`."""
    named = [[features(p.schedule, p.facts) for p in one.programs] for one in landscapes]
    names = sorted({name for landscape in named for program in landscape for name in program})
    index = {name: i for i, name in enumerate(names)}
    gram: NDArray[np.float64] = ridge * np.eye(len(names))
    moment = np.zeros(len(names))
    for landscape, programs in zip(landscapes, named, strict=True):
        matrix = np.zeros((len(programs), len(names)))
        for row, program in enumerate(programs):
            matrix[row, [index[name] for name in program]] = 1.0
        target = np.log(landscape.measured_us / landscape.modelled_us)
        weight = (landscape.measured_us.min() / landscape.measured_us) ** STEEPNESS
        matrix -= np.average(matrix, axis=0, weights=weight)
        target -= np.average(target, weights=weight)
        gram = gram + matrix.T @ (matrix * weight[:, None])
        moment = moment + matrix.T @ (weight * target)
    solved = np.linalg.solve(gram, moment).tolist()
    return Residual(coefficients=dict(zip(names, solved, strict=True)))
